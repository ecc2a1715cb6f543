"""Were the repeats of one measurement alike? Pure: what is done about it is said by `measure.py` and profile.

Thresholds are on the safe side for a shared machine: a single slow repeat is no finding, a trend or a second
speed is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

MIN_REPEATS = 8  # fewer say nothing about a trend
DRIFT = 0.10  # change of the median from the first third to the last third
ORDERED = 0.5  # Kendall's tau of time against number: 0 is no order, 1 is always slower
SECOND_SPEED = 0.15  # distance of two groups of repeats, as a share of the faster one
GROUP_SHARE = 0.2  # of the repeats, that the smaller group must hold
GROUP_DISTANCE = 4.0  # distance of the groups in units of their own scatter


class Steadiness(str, Enum):
    """What a series of repeats looks like."""

    STEADY = "steady"
    SLOWING = "slowing"  # hotter, hence throttled
    SPEEDING = "speeding"  # was not warm yet
    BIMODAL = "bimodal"  # two speeds: a clock that switches, or somebody else's work


def judge(seconds: Sequence[float]) -> Steadiness:
    """Look for a trend, then for two speeds; fewer than MIN_REPEATS repeats pass as steady."""
    if len(seconds) < MIN_REPEATS:
        return Steadiness.STEADY
    third = len(seconds) // 3
    first, last = statistics.median(seconds[:third]), statistics.median(seconds[-third:])
    order = _kendall_tau(seconds)
    if last > (1 + DRIFT) * first and order > ORDERED:
        return Steadiness.SLOWING
    if first > (1 + DRIFT) * last and order < -ORDERED:
        return Steadiness.SPEEDING
    return Steadiness.BIMODAL if _has_two_speeds(seconds) else Steadiness.STEADY


def finding(what: str, seconds: Sequence[float]) -> str | None:
    """Say in words what is wrong with a series of repeats, None where nothing is."""
    third = max(1, len(seconds) // 3)
    first, last = statistics.median(seconds[:third]), statistics.median(seconds[-third:])
    match judge(seconds):
        case Steadiness.STEADY:
            return None
        case Steadiness.SLOWING:
            return (
                f"{what}: repeats got {last / first:.2f} times as slow while measuring; throttled?"
            )
        case Steadiness.SPEEDING:
            return f"{what}: repeats got {first / last:.2f} times as fast while measuring; was not warm"
        case Steadiness.BIMODAL:
            fast, slow = _groups(seconds)
            ratio = statistics.median(slow) / statistics.median(fast)
            return (
                f"{what}: two speeds, {len(slow)} of {len(seconds)} repeats are {ratio:.2f} times as slow;"
                " throttled, or other work on the device?"
            )


def _kendall_tau(values: Sequence[float]) -> float:
    """Share of later-is-slower pairs minus share of later-is-faster pairs."""
    size = len(values)
    signs = sum(
        (values[late] > values[early]) - (values[late] < values[early])
        for early in range(size)
        for late in range(early + 1, size)
    )
    return signs / (size * (size - 1) / 2)


def _groups(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Cut at the widest gap of the sorted values."""
    ordered = sorted(values)
    gaps = [b - a for a, b in pairwise(ordered)]
    cut = gaps.index(max(gaps)) + 1
    return ordered[:cut], ordered[cut:]


def _has_two_speeds(values: Sequence[float]) -> bool:
    fast, slow = _groups(values)
    if min(len(fast), len(slow)) < max(2, GROUP_SHARE * len(values)):
        return False
    middles = statistics.median(fast), statistics.median(slow)
    scatter = max(
        statistics.fmean(abs(value - middle) for value in group)
        for group, middle in zip((fast, slow), middles, strict=True)
    )
    distance = middles[1] - middles[0]
    return distance > SECOND_SPEED * middles[0] and distance > GROUP_DISTANCE * scatter
