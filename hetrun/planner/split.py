"""Exact splits: layers over ordered stages, rows over replicas. Which stages and replicas there are is left to `search.py`.

All of these minimise the slowest part. Equal units (layers of one cost, rows) are handed out in order of the time
at which the part that takes them would end, which is exact for any speeds, starting times and caps. Ties (to twelve
digits, so that rounding decides nothing) go to the faster part, then to the earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import floor

from hetrun.errors import NoPlanError

_TIE_DIGITS = 12
_BELOW = 1 - 1e-9  # parts filled up to here hold what every optimum holds


def split_layers(
    num_layers: int,
    speeds: Sequence[float],
    *,
    caps: Sequence[int] | None = None,
    extras: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Return layers per stage that minimise max over stages of (extras + layers) / speed.

    `extras` is other work of a stage (embedding, head) in units of a layer; `caps` is how many layers its
    memory holds.

    Raises:
        NoPlanError: the caps add up to fewer layers.
    """
    _check(num_layers, speeds)
    extras = extras or [0.0] * len(speeds)
    unit_s = [1 / speed for speed in speeds]
    start_s = [extra / speed for extra, speed in zip(extras, speeds, strict=True)]
    return fill_parts(num_layers, unit_s, start_s=start_s, caps=caps)


def split_rows(
    total: int, speeds: Sequence[float], *, fills: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return rows (or microbatches) per replica that minimise max over replicas of fill + rows / speed.

    A replica that would do better without any rows gets none, and then its fill counts for nothing.
    """
    _check(total, speeds)
    return fill_parts(total, [1 / speed for speed in speeds], start_s=fills)


def split_unequal_layers(costs: Sequence[float], speeds: Sequence[float]) -> tuple[int, ...]:
    """Return how many of the ordered layers each stage takes when layers differ in cost.

    Linear partitioning: with best[s][i] the least maximum of i layers on s stages, best[s - 1][j] rises with j
    and the rest of the layers costs less, so the crossing is found by bisection. O(stages * layers * log layers).
    """
    _check(len(costs), speeds)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = [total / speeds[0] for total in sums]
    cuts: list[list[int]] = []
    for speed in speeds[1:]:
        chosen = [_crossing(best, sums, end, speed) for end in range(len(sums))]
        best = [max(best[j], (sums[end] - sums[j]) / speed) for end, j in enumerate(chosen)]
        cuts.append(chosen)
    counts: list[int] = []
    end = len(costs)
    for chosen in reversed(cuts):
        counts.append(end - chosen[end])
        end = chosen[end]
    return (end, *reversed(counts))


def fill_parts(
    total: int,
    unit_s: Sequence[float],
    *,
    start_s: Sequence[float] | None = None,
    caps: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Hand out `total` equal units that take part i `unit_s[i]` each, on top of `start_s[i]`; least maximum.

    Raises:
        NoPlanError: the caps add up to less than `total`.
    """
    starts = list(start_s) if start_s is not None else [0.0] * len(unit_s)
    limits = [total] * len(unit_s) if caps is None else [min(total, max(0, cap)) for cap in caps]
    if sum(limits) < total:
        raise NoPlanError(f"{total} to hand out, but the parts hold at most {limits}")
    if total == 0:
        return (0,) * len(unit_s)
    level_s = _relaxed_level(total, unit_s, starts)
    counts = [
        min(limit, max(0, floor((level_s * _BELOW - start) / unit)))
        for unit, start, limit in zip(unit_s, starts, limits, strict=True)
    ]
    waiting = [
        (round((starts[i] + (count + 1) * unit_s[i]) / level_s, _TIE_DIGITS), unit_s[i], i)
        for i, count in enumerate(counts)
        if count < limits[i]
    ]
    heapify(waiting)
    for _ in range(total - sum(counts)):
        _, unit, i = heappop(waiting)
        counts[i] += 1
        if counts[i] < limits[i]:
            next_s = starts[i] + (counts[i] + 1) * unit
            heappush(waiting, (round(next_s / level_s, _TIE_DIGITS), unit, i))
    return tuple(counts)


def _relaxed_level(total: int, unit_s: Sequence[float], starts: Sequence[float]) -> float:
    """Return when all parts end if units could be cut and no cap held: no split ends earlier."""
    order = sorted(range(len(unit_s)), key=lambda i: starts[i])
    speed = work = 0.0
    level_s = 0.0
    for number, i in enumerate(order):
        speed += 1 / unit_s[i]
        work += starts[i] / unit_s[i]
        level_s = (total + work) / speed
        if number + 1 < len(order) and level_s <= starts[order[number + 1]]:
            break
    return level_s


def _crossing(best: Sequence[float], sums: Sequence[float], end: int, speed: float) -> int:
    """Return where to cut the first `end` layers so that neither side is slower than it must be."""
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        if best[middle] < (sums[end] - sums[middle]) / speed:
            low = middle + 1
        else:
            high = middle
    if low > 0 and (sums[end] - sums[low - 1]) / speed <= best[low]:
        return low - 1
    return low


def _check(total: int, speeds: Sequence[float]) -> None:
    if total < 0 or not speeds or min(speeds) <= 0:
        raise ValueError(f"{total} over parts of speeds {list(speeds)}: need parts with speed")
