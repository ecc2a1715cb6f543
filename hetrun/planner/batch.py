"""Exact splits of layers for thousands of pipelines at once, in arrays. One at a time: `split.py` and `ranges.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

    Integers = NDArray[np.int64]

_ROUNDS = 22  # halvings; what is handed out too much is taken back in order: the split is exact
_SLACK = 1e-12  # as in `ranges.py`
_EQUAL = 1 - 1e-11


def many_windows(lanes: Integers) -> Integers:
    """Return the windows of `lane_windows` for a pipeline per row of lanes; where there is no stage (0 lanes) 1."""
    import numpy as np

    left = np.cumsum(lanes[:, ::-1], axis=1)[:, ::-1]
    windows: Integers = np.maximum(1, -(-left // np.maximum(1, lanes)))
    return windows


def split_many(
    num_layers: int, unit_s: Floats, start_s: Floats, caps: Floats
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return layers per stage of every pipeline, at least one each, that minimise its slowest stage; and which fit.

    A row per pipeline and a column per stage; unused places have unit_s = inf. `start_s` is other work of a stage,
    `caps` is how many layers its memory holds. Rows that do not fit hold nothing of use.
    """
    import numpy as np

    used = np.isfinite(unit_s)
    unit = np.where(used, unit_s, 1.0)
    caps = np.where(used, np.minimum(caps, num_layers), 0.0)
    fits = ((caps >= 1) | ~used).all(axis=1) & (caps.sum(axis=1) >= num_layers)
    fits &= used.sum(axis=1) <= num_layers
    low = np.where(used, start_s + unit, 0.0).max(axis=1)
    high = np.where(used, start_s + unit * num_layers, 0.0).max(axis=1)
    low = low * (1 - 1e-9)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        enough = _held(middle, unit, start_s, caps).sum(axis=1) >= num_layers
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle)
    layers = _held(high, unit, start_s, caps)
    layers = np.where(used, np.maximum(layers, 1.0), 0.0)
    return _trimmed(num_layers, layers, unit, start_s, fits), fits


def _held(level_s: Floats, unit: Floats, start_s: Floats, caps: Floats) -> Floats:
    """Return how many layers each stage does within its pipeline's level."""
    import numpy as np

    whole = np.floor((level_s[:, None] - start_s) / unit + 1e-9)
    held: Floats = np.minimum(caps, np.maximum(whole, 0.0))
    return held


def _trimmed(
    num_layers: int, layers: Floats, unit: Floats, start_s: Floats, fits: NDArray[np.bool_]
) -> Floats:
    """Take surplus layers from the slowest stages that have more than one."""
    import numpy as np

    while True:
        surplus = np.flatnonzero((layers.sum(axis=1) > num_layers) & fits)
        if not len(surplus):
            return layers
        part = layers[surplus]
        loads = np.where(part > 1, start_s[surplus] + part * unit[surplus], -1.0)
        slowest = loads.argmax(axis=1)
        layers[surplus, slowest] -= 1


class Table:
    """Rows of sums over the first n layers, for every n; one search finds a place in any of the rows."""

    def __init__(self, sums: Floats) -> None:
        import numpy as np

        self.sums = sums
        self._scale = np.maximum(sums[:, -1], 1e-300)
        self._keys = (sums / self._scale[:, None] + 2.0 * np.arange(len(sums))[:, None]).ravel()

    def furthest(self, rows: Integers, first: Integers, most: Floats) -> Integers:
        """Return the last n for which the sum over layers [first, n) is at most `most`; at least `first`."""
        import numpy as np

        wanted = np.minimum((self.sums[rows, first] + most) / self._scale[rows], 1.5) + 2.0 * rows
        width = self.sums.shape[1]
        end = np.searchsorted(self._keys, wanted, side="right") - 1 - rows * width
        end = np.clip(end, first, width - 1)
        more = np.minimum(end + 1, width - 1)  # the search rounds, by a layer at most
        end = np.where(self.between(rows, first, more) <= most, more, end)
        less = np.maximum(end - 1, first)
        found: Integers = np.where(self.between(rows, first, end) <= most, end, less)
        return found

    def between(self, rows: Integers, first: Integers, end: Integers) -> Floats:
        """Return the sums over layers [first, end)."""
        found: Floats = self.sums[rows, end] - self.sums[rows, first]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelines:
    """A row per pipeline and a column per stage: rows of the tables that hold there, other work, bytes left for layers.

    `seconds` and `weights` are the tables.
    """

    seconds: Table
    weights: Table
    time_rows: Integers
    weight_rows: Integers
    start_s: Floats
    caps: Floats
    sizes: Integers


def split_many_unequal(pipes: Pipelines) -> tuple[Integers, NDArray[np.bool_], Floats]:
    """Return cuts (from 0 on, one more than stages), which pipelines fit, and a level that no split of theirs beats.

    Layers differ; every stage gets one at least. Each stage takes all that it can within the level and leaves a layer
    for each later one. That is exact, except where a single layer is too much for a stage and an earlier stage should
    stop short: `ranges.py` finds those splits. The level is that of stages that may also go without layers.
    """
    import numpy as np

    cuts, high_s, low_s = _bisected(pipes, np.arange(len(pipes.sizes)), least=1)
    fits = np.isfinite(high_s)
    tight = np.flatnonzero(~fits | _is_tight(pipes, high_s))
    if len(tight):
        low_s[tight] = np.minimum(high_s[tight], _bisected(pipes, tight, least=0)[2])
    return cuts, fits, low_s


def _is_tight(pipes: Pipelines, level_s: Floats) -> NDArray[np.bool_]:
    """Return whether some single layer is too much for some stage of each pipeline, at this level or right below."""
    import numpy as np

    longest = np.diff(pipes.seconds.sums, axis=1).max(axis=1)[pipes.time_rows] + pipes.start_s
    heaviest = np.diff(pipes.weights.sums, axis=1).max(axis=1)[pipes.weight_rows]
    used = np.arange(pipes.start_s.shape[1]) < pipes.sizes[:, None]
    tight: NDArray[np.bool_] = (
        used & ((longest >= level_s[:, None] * _EQUAL) | (heaviest > pipes.caps))
    ).any(axis=1)
    return tight


def _bisected(pipes: Pipelines, chosen: Integers, *, least: int) -> tuple[Integers, Floats, Floats]:
    """Return cuts, their slowest stage (inf: none fit) and the level below which none are, of some pipelines."""
    import numpy as np

    level_s = np.full(len(chosen), np.inf)
    cuts, high_s, _ = _swept(pipes, chosen, level_s, least=least)
    low_s = np.zeros(len(chosen))
    while True:
        open_ = np.flatnonzero(np.isfinite(high_s) & (low_s < high_s * _EQUAL))
        if not len(open_):
            return cuts, high_s, np.where(np.isfinite(high_s), high_s, 0.0)
        middle_s = (low_s[open_] + high_s[open_]) / 2
        found, slowest_s, next_s = _swept(pipes, chosen[open_], middle_s, least=least)
        kept = np.isfinite(slowest_s)
        high_s[open_[kept]] = slowest_s[kept]
        cuts[open_[kept]] = found[kept]
        low_s[open_[~kept]] = next_s[~kept]


def _swept(
    pipes: Pipelines, chosen: Integers, level_s: Floats, *, least: int
) -> tuple[Integers, Floats, Floats]:
    """Return what `_bisected` does, for one level, and the next level at which anything changes."""
    import numpy as np

    total = pipes.seconds.sums.shape[1] - 1
    depth = int(pipes.sizes[chosen].max())
    cuts = np.zeros((len(chosen), pipes.start_s.shape[1] + 1), dtype=np.int64)
    slowest_s = np.zeros(len(chosen))
    next_s = np.full(len(chosen), np.inf)
    for stage in range(depth):
        on = np.flatnonzero(pipes.sizes[chosen] > stage)
        pipe = chosen[on]
        first, level, start_s = cuts[on, stage], level_s[on], pipes.start_s[pipe, stage]
        rows, heavy = pipes.time_rows[pipe, stage], pipes.weight_rows[pipe, stage]
        slack = np.where(np.isfinite(level), _SLACK * level, 0.0)
        by_time = pipes.seconds.furthest(rows, first, level - start_s + slack)
        by_weight = pipes.weights.furthest(heavy, first, pipes.caps[pipe, stage])
        most = total - least * (pipes.sizes[pipe] - stage - 1)
        end = np.minimum(np.minimum(by_time, by_weight), most)
        more = np.minimum(by_time + 1, total)
        limited = (by_time < by_weight) & (by_time < most)
        more_s = np.where(limited, start_s + pipes.seconds.between(rows, first, more), np.inf)
        late = start_s > level * (1 + _SLACK)
        more_s = np.where(late, start_s, more_s)
        next_s[on] = np.minimum(next_s[on], more_s)
        stuck = late | (end < first + least)
        taken_s = start_s + pipes.seconds.between(rows, first, end)
        slowest_s[on] = np.where(stuck, np.inf, np.maximum(slowest_s[on], taken_s))
        cuts[on, stage + 1 :] = end[:, None]
    done = cuts[np.arange(len(chosen)), pipes.sizes[chosen]] == total
    return cuts, np.where(done, slowest_s, np.inf), next_s
