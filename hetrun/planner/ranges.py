"""The exact split of unequal layers over ordered stages. Equal ones are in `split.py`, thousands of pipelines at once in `batch.py`.

Linear partitioning. For a level T each stage can end wherever its layers take no longer than T and fit its memory;
from all layer numbers where the stage before it can end, these are again few intervals. So a sweep over the stages
says whether T can be kept, in O(stages x intervals x log layers) (one interval, unless a single layer is too much for
a stage), and, where it cannot, the next higher T at which anything changes. A level that is kept is replaced by the
slowest stage that it led to, one that is not by that next T; between them it is bisection, and it ends with the two
equal: exact, after about log2(layers x stages) sweeps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

_SLACK = 1e-12  # of the level: sums of the same layers differ by rounding
_EQUAL = 1 - 1e-11

Intervals = list[tuple[int, int]]  # of layer numbers, both ends in it, ascending


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What any range of layers takes on one stage: sums over the first n layers, for every n."""

    sums: Sequence[float]  # seconds
    start_s: float  # other work of the stage
    weights: Sequence[int]  # bytes
    cap: int  # bytes
    peaks: Sequence[int] = ()  # bytes of each layer, of which the largest counts once

    @cached_property
    def longest_s(self) -> float:
        """Seconds of the longest layer."""
        return max((b - a for a, b in pairwise(self.sums)), default=0.0)

    @cached_property
    def heaviest(self) -> int:
        """Bytes of the heaviest layer by itself."""
        return max((self.weight(n, n + 1) for n in range(len(self.weights) - 1)), default=0)

    def weight(self, first: int, end: int) -> int:
        """Return bytes of layers [first, end)."""
        return self.weights[end] - self.weights[first] + max(self.peaks[first:end], default=0)

    def seconds(self, first: int, end: int) -> float:
        """Return seconds of the stage with layers [first, end)."""
        return self.start_s + self.sums[end] - self.sums[first]

    def is_full(self, first: int, end: int) -> bool:
        """Whether memory keeps a stage with layers [first, end) from one more at either side."""
        last = len(self.weights) - 1
        return (
            self.weight(max(0, first - 1), end) > self.cap
            or self.weight(first, min(last, end + 1)) > self.cap
        )

    def furthest(self, first: int, level_s: float) -> tuple[int, float]:
        """Return where layers from `first` on must end to keep a level, and the level that allows one more (inf: none)."""
        most_s = self.sums[first] + level_s - self.start_s + _SLACK * level_s
        by_time = max(first, bisect_right(self.sums, most_s) - 1)
        by_memory = bisect_right(self.weights, self.weights[first] + self.cap) - 1
        if self.peaks and first < by_memory:
            ends = range(first, by_memory + 1)
            by_memory = (
                first + bisect_right(ends, self.cap, key=lambda n: self.weight(first, n)) - 1
            )
        if by_memory <= by_time:
            return max(first, by_memory), inf
        return by_time, self.seconds(first, by_time + 1)

    def earliest(self, end: int, level_s: float) -> int:
        """Return where layers that end before `end` can begin at the earliest."""
        least_s = self.sums[end] - (level_s - self.start_s) - _SLACK * level_s
        by_memory = bisect_left(self.weights, self.weights[end] - self.cap)
        if self.peaks and by_memory < end:
            firsts = range(by_memory, end + 1)
            most = -self.cap  # weights fall as a range begins later
            by_memory += bisect_left(firsts, most, key=lambda n: -self.weight(n, end))
        return min(end, max(bisect_left(self.sums, least_s), by_memory))

    def holds_any(self, level_s: float) -> bool:
        """Whether each single layer keeps a level and fits."""
        return self.start_s + self.longest_s <= level_s and self.heaviest <= self.cap


def split_ranges(stages: Sequence[Reach], *, least: int = 0) -> tuple[int, ...] | None:
    """Return layers per stage, at least `least` (0 or 1) each, that minimise the slowest stage; None where none fit.

    Among splits that are as good, cuts are as near as that allows to where all stages would end together.
    """
    targets = _targets(stages)
    ends, _ = _sweep(stages, inf, least)
    if ends is None:
        return None
    best = _cuts(stages, ends, inf, least=least, targets=targets)
    low_s, high_s = 0.0, _slowest(stages, best)
    level_s = _together(stages)[0]
    while low_s < high_s * _EQUAL:
        if not low_s < level_s < high_s * _EQUAL:
            level_s = (low_s + high_s) / 2
        ends, next_s = _sweep(stages, level_s, least)
        if ends is None:
            low_s = next_s
        else:
            best = _cuts(stages, ends, level_s, least=least, targets=targets)
            high_s = _slowest(stages, best)
    return tuple(end - first for first, end in pairwise(best))


def _slowest(stages: Sequence[Reach], cuts: Sequence[int]) -> float:
    return max(
        stage.seconds(first, end)
        for stage, (first, end) in zip(stages, pairwise(cuts), strict=True)
    )


def _sweep(
    stages: Sequence[Reach], level_s: float, least: int
) -> tuple[list[Intervals] | None, float]:
    """Return where each stage can end (None: not all layers can be held), and the next level at which that changes."""
    total = len(stages[0].sums) - 1
    ends: list[Intervals] = []
    at: Intervals = [(0, 0)]
    next_s = inf
    for stage in stages:
        if stage.start_s > level_s * (1 + _SLACK):
            return None, stage.start_s
        if least and not stage.holds_any(level_s):
            at, blocked_s = _startable(stage, at, level_s)
            next_s = min(next_s, blocked_s)
        reached: Intervals = []
        for low, high in at:
            high = min(high, total - least)
            if high < low:
                continue
            end, more_s = stage.furthest(high, level_s)
            next_s = min(next_s, more_s)
            if reached and low + least <= reached[-1][1] + 1:
                reached[-1] = (reached[-1][0], max(end, reached[-1][1]))
            else:
                reached.append((low + least, end))
        at = reached
        ends.append(at)
    return (ends if at and at[-1][1] == total else None), next_s


def _startable(stage: Reach, at: Intervals, level_s: float) -> tuple[Intervals, float]:
    """Return the layers of intervals that a stage can hold by themselves, and the least level that allows one more."""
    found: Intervals = []
    next_s = inf
    last = len(stage.sums) - 2
    for low, high in at:
        for first in range(low, min(high, last) + 1):
            end, more_s = stage.furthest(first, level_s)
            if end == first:
                next_s = min(next_s, more_s)
            elif found and found[-1][1] == first - 1:
                found[-1] = (found[-1][0], first)
            else:
                found.append((first, first))
    return found, next_s


def _cuts(
    stages: Sequence[Reach],
    ends: Sequence[Intervals],
    level_s: float,
    *,
    least: int,
    targets: Sequence[int],
) -> list[int]:
    """Return the cuts, from layer 0 to the last, that keep a level and stand as near to the targets as it allows."""
    end = len(stages[0].sums) - 1
    cuts = [end]
    for number in range(len(stages) - 1, 0, -1):
        low = stages[number].earliest(end, level_s)
        allowed = [
            (max(low, first), min(end - least, last))
            for first, last in ends[number - 1]
            if max(low, first) <= min(end - least, last)
        ]
        target = targets[number - 1]
        end = min(
            (max(first, min(last, target)) for first, last in allowed),
            key=lambda cut: abs(cut - target),
        )
        cuts.append(end)
    return [0, *reversed(cuts)]


def _together(stages: Sequence[Reach]) -> tuple[float, list[float]]:
    """Return when all stages would end together if layers could be cut and no cap held, and their shares of the layers."""
    total = len(stages[0].sums) - 1
    if total == 0:
        return 0.0, [0.0] * len(stages)
    unit_s = [stage.sums[-1] / total for stage in stages]
    starts = [stage.start_s for stage in stages]
    level_s = relaxed_level(total, unit_s, starts)
    return level_s, [
        max(0.0, level_s - start) / (unit * total)
        for start, unit in zip(starts, unit_s, strict=True)
    ]


def _targets(stages: Sequence[Reach]) -> list[int]:
    """Return the layer numbers that are nearest to where all stages would end together."""
    targets = []
    done = 0.0
    for stage, share in zip(stages, _together(stages)[1], strict=True):
        done += share
        wanted_s = done * stage.sums[-1]
        place = min(bisect_left(stage.sums, wanted_s), len(stage.sums) - 1)
        if place and wanted_s - stage.sums[place - 1] < stage.sums[place] - wanted_s:
            place -= 1
        targets.append(place)
    return targets


def relaxed_level(total: int, unit_s: Sequence[float], starts: Sequence[float]) -> float:
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
