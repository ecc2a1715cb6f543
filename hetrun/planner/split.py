"""Exact splits: layers over ordered stages, rows over replicas. Which stages and replicas there are is left to `search.py`.

All of these minimise the slowest part. Equal units (layers of one cost, rows) are handed out in order of the time
at which the part that takes them would end, which is exact for any speeds, starting times and caps. Ties (to twelve
digits, so that rounding decides nothing) go to the faster part, then to the earlier. Unequal layers: `ranges.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import floor

from hetrun.errors import NoPlanError
from hetrun.planner.ranges import Reach, relaxed_level, split_ranges

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


def split_unequal(
    costs: Sequence[float],
    speeds: Sequence[float],
    *,
    caps_bytes: Sequence[int] | None = None,
    layer_bytes: Sequence[int] | None = None,
    extras: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Return how many of the ordered layers each stage takes when layers differ in cost and in bytes.

    Minimises max over stages of (extras + cost of its layers) / speed; a stage may get none. `layer_bytes` is what
    each layer needs of the `caps_bytes` of its stage.

    Raises:
        NoPlanError: the caps cannot hold the layers in this order.
    """
    _check(len(costs), speeds)
    sizes = layer_bytes or [0] * len(costs)
    weights = tuple(accumulate(sizes, initial=0))
    stages = [
        Reach(
            sums=tuple(accumulate((cost / speed for cost in costs), initial=0.0)),
            start_s=(extras[number] if extras else 0.0) / speed,
            weights=weights,
            cap=caps_bytes[number] if caps_bytes else weights[-1],
        )
        for number, speed in enumerate(speeds)
    ]
    counts = split_ranges(stages)
    if counts is None:
        raise NoPlanError(f"{len(costs)} layers of {weights[-1]} bytes do not fit in their order")
    return counts


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
    level_s = relaxed_level(total, unit_s, starts)
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


def _check(total: int, speeds: Sequence[float]) -> None:
    if total < 0 or not speeds or min(speeds) <= 0:
        raise ValueError(f"{total} over parts of speeds {list(speeds)}: need parts with speed")
