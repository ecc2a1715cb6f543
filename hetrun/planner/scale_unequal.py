"""Splits of unequal layers for all shapes of `scale.py` at once: what `batch.py` needs of a problem, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetrun import arch
from hetrun.planner.batch import Pipelines, Table, split_many_unequal
from hetrun.planner.shapes import ShapeMaker

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyCuts:
    """Stages of all shapes, in the order in which they were given."""

    layers: Floats  # per stage, weighed by their parameters: 1 is a layer of mean size
    fits: NDArray[np.bool_]
    seconds: Floats  # of each stage
    least_s: Floats  # of each shape: no split of its stages has a quicker slowest stage


def cut_many_unequal(
    maker: ShapeMaker, kinds: Integers, row_numbers: Integers, windows: Integers
) -> ManyCuts:
    """Split the layers of every shape; `kinds` has a row per shape and a column per stage (-1: no such stage)."""
    import numpy as np

    problem = maker.problem
    pipes = _pipelines(maker, kinds, row_numbers, windows)
    cuts, fits, least_s = split_many_unequal(pipes)
    used = kinds >= 0
    seconds = pipes.start_s + pipes.seconds.between(pipes.time_rows, cuts[:, :-1], cuts[:, 1:])
    parameters = np.asarray(problem.parameter_sums, dtype=float)
    held = parameters[cuts[:, 1:]] - parameters[cuts[:, :-1]]
    return ManyCuts(
        layers=np.where(used, held / arch.mean_layer_parameters(problem.model), 0.0),
        fits=fits,
        seconds=np.where(used, seconds, 0.0),
        least_s=least_s,
    )


def _pipelines(
    maker: ShapeMaker, kinds: Integers, row_numbers: Integers, windows: Integers
) -> Pipelines:
    """Return what every stage takes and holds: tables by kind, microbatch size and window."""
    import numpy as np

    problem = maker.problem
    depth = int(windows.max())
    choices = problem.row_choices
    reaches = {
        (kind, number, window, first): maker.reach(kind, rows, window=window, first=bool(first))
        for kind in range(len(problem.kinds))
        for number, rows in enumerate(choices)
        for window in range(1, depth + 1)
        for first in (0, 1)
    }
    shape = (len(problem.kinds), len(choices), depth, 2)
    start_s = np.asarray([reach.start_s for reach in reaches.values()]).reshape(shape)
    peaks = [
        max(reach.peaks, default=0) for reach in reaches.values()
    ]  # as if all held the largest
    caps = np.asarray(
        [float(reach.cap - peak) for reach, peak in zip(reaches.values(), peaks, strict=True)]
    ).reshape(shape)
    used = kinds >= 0
    index = np.arange(kinds.shape[1])
    at = (np.where(used, kinds, 0), row_numbers[:, None], windows - 1, (index == 0).astype(int))
    time_rows = at[0] * len(choices) + at[1]
    return Pipelines(
        seconds=Table(np.asarray([r.sums for key, r in reaches.items() if key[2:] == (1, 0)])),
        weights=Table(
            np.asarray([r.weights for key, r in reaches.items() if key[3] == 0], dtype=float)
        ),
        time_rows=time_rows,
        weight_rows=time_rows * depth + at[2],
        start_s=np.where(used, start_s[at], 0.0),
        caps=caps[at],
        sizes=used.sum(axis=1),
    )
