"""Repeats of a timed action until their median is steady, and what they say of a model's layers. Timing is left to `measure.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from hetrun.model import LayerCount, RowTiming, RunTiming

WARM_UP = 3
MIN_REPEATS = 5
MAX_REPEATS = 30
BUDGET_S = 1.5  # of repeats for one figure, once there are MIN_REPEATS
MIN_QUICK_REPEATS = 3
MAX_QUICK_REPEATS = 8
QUICK_BUDGET_S = 0.2

Timed = Callable[[], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Repeats:
    """Medians of the parts of a repeated action, (slowest - fastest) / median of their sum, and all sums."""

    medians_s: tuple[float, ...]
    spread: float
    sums_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Layers:
    """Figures of one layer of each run of equal ones: forward and backward, and the most bytes above what was there."""

    runs: tuple[tuple[LayerCount, Repeats, int | None], ...]

    def mean_s(self, part: int) -> float:
        """Seconds of a layer's forward (0) or backward (1), on average over all layers."""
        total = sum(run.num_layers * repeats.medians_s[part] for run, repeats, _ in self.runs)
        return total / sum(run.num_layers for run, _, _ in self.runs)

    def put_into(self, timing: RowTiming) -> RowTiming:
        """The timing with these figures of layers."""
        runs = tuple(
            RunTiming(
                num_layers=run.num_layers,
                forward_s=repeats.medians_s[0],
                backward_s=repeats.medians_s[1],
            )
            for run, repeats, _ in self.runs
        )
        peaks = [peak_bytes for _, _, peak_bytes in self.runs if peak_bytes is not None]
        return replace(
            timing,
            layer_forward_s=self.mean_s(0),
            layer_backward_s=self.mean_s(1),
            runs=runs if len(runs) > 1 else (),
            spread=max(repeats.spread for _, repeats, _ in self.runs),
            layer_peak_bytes=max(peaks, default=None),
        )


def repeat(once: Timed, *, quick: bool = False) -> Repeats:
    """Run an action until its median is steady: a few unmeasured times, then 5 to 30 times (3 to 8 if `quick`)."""
    for _ in range(WARM_UP):
        once()
    least, most, budget_s = (
        (MIN_QUICK_REPEATS, MAX_QUICK_REPEATS, QUICK_BUDGET_S)
        if quick
        else (MIN_REPEATS, MAX_REPEATS, BUDGET_S)
    )
    repeats: list[tuple[float, ...]] = []
    spent_s = 0.0
    while len(repeats) < least or (len(repeats) < most and spent_s < budget_s):
        repeats.append(once())
        spent_s += sum(repeats[-1])
    sums = [sum(parts) for parts in repeats]
    return Repeats(
        medians_s=tuple(statistics.median(part) for part in zip(*repeats, strict=True)),
        spread=(max(sums) - min(sums)) / statistics.median(sums),
        sums_s=tuple(sums),
    )
