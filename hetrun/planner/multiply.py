"""How many replicas of each of many shapes: deadline, linear programme, whole numbers. What a shape does is given in arrays.

For a deadline T a replica of shape p does rows_p * floor((T - fill_p) / cycle_p) rows. The least T at which the linear
programme reaches the batch is a lower bound for all combinations of these shapes; rounding it loses at most one
replica per group of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import TYPE_CHECKING

from hetrun.planner.relax import Relaxed, earliest, relax

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Counts = dict[int, int]  # replicas by column

_BOUND_PRECISION = 1e-6
_PRECISION = 1e-4
_STEPS = (0.0, 1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.4, 0.8)
_MILP_STEPS = (3e-4, 2e-3)  # of those above; each solution takes a tenth of a second and more
# Bounded by nodes, so that the answer is the same everywhere. HiGHS of scipy 1.17 announces solutions of a presolved
# problem on stdout whatever disp says; the command line keeps that from its data.
_MILP_OPTIONS = {
    "disp": False,
    "node_limit": 400,
    "mip_rel_gap": 1e-4,
}
_MILP_COLUMNS = 160
_ROUNDED_COLUMNS = 600
_MILP_REPLICAS = 2000  # with more of them rounding loses next to nothing
_FEW_PRECISION = 5e-4
_PARTED = 24  # devices; up to here also some of the replicas that would fit beside others are tried
_BEAM_WIDTH = 30
_BEAM_PARTS = (1.0, 0.75, 0.5, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Replica shapes as arrays, one entry each; `need` has a row per group of devices."""

    need: Floats
    rows: Floats
    fill_s: Floats  # what a replica takes beyond its microbatches
    cycle_s: Floats  # per microbatch

    def done_by(self, deadline_s: float) -> Floats:
        """Return the rows that one replica of each shape does by a deadline."""
        import numpy as np

        turns = np.floor((deadline_s - self.fill_s) / self.cycle_s + 1e-9)
        return np.maximum(turns, 0.0) * self.rows

    def some(self, chosen: NDArray[np.intp]) -> Columns:
        """Return the columns with these numbers."""
        return Columns(
            need=self.need[:, chosen],
            rows=self.rows[chosen],
            fill_s=self.fill_s[chosen],
            cycle_s=self.cycle_s[chosen],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """The linear programme's answer: no combination of the shapes ends earlier."""

    bound_s: float
    reached_s: float  # within the precision above the bound
    relaxed: Relaxed


def relaxed_deadline(
    columns: Columns,
    capacity: Sequence[int],
    batch_rows: int,
    *,
    precision: float = _BOUND_PRECISION,
) -> Deadline | None:
    """Return the least deadline at which replicas that may be cut do the batch; None where even one is too many."""
    import numpy as np

    have = np.asarray(capacity, dtype=float)
    fitting = np.flatnonzero((columns.need <= have[:, None]).all(axis=0))
    if not len(fitting):
        return None
    kept = columns.some(fitting)
    known: dict[float, Relaxed] = {}
    basis: tuple[int, ...] = ()

    def reach(deadline_s: float) -> float:
        nonlocal basis
        known[deadline_s] = relax(kept.done_by(deadline_s), kept.need, have, start=basis)
        basis = known[deadline_s].basis
        return known[deadline_s].ceiling * (1 + 1e-12)

    start_s = float((kept.fill_s + kept.cycle_s).min())
    low, high = earliest(reach, batch_rows, start_s=start_s, precision=precision)
    best = known[high]
    counts = {int(fitting[j]): x for j, x in best.counts.items()}
    relaxed = replace(best, counts=counts)
    return Deadline(bound_s=low, reached_s=high, relaxed=relaxed)


def whole_replicas(
    columns: Columns, capacity: Sequence[int], batch_rows: int, *, exact: bool = True
) -> tuple[Counts, float] | None:
    """Return whole replicas that do the batch early, and the deadline they keep; None where none do.

    The linear programme's whole part plus what rounding adds; where that is not close and the replicas are few, HiGHS
    solves the integer programme over the shapes that are cheapest at the linear programme's prices. Only the cheaper
    ones are looked at for the rest.
    """
    import numpy as np

    deadline = relaxed_deadline(columns, capacity, batch_rows, precision=_PRECISION)
    if deadline is None:
        return None
    value = columns.done_by(deadline.reached_s)
    loss = np.asarray(deadline.relaxed.prices) @ columns.need - value
    cheap = np.sort(np.argsort(loss, kind="stable")[:_ROUNDED_COLUMNS])
    kept = columns.some(cheap)
    few = sum(deadline.relaxed.counts.values()) <= _MILP_REPLICAS
    for longer in _STEPS:
        deadline_s = deadline.reached_s * (1 + longer)
        value = kept.done_by(deadline_s)
        counts = _rounded(kept, value, capacity)
        if exact and few and longer in _MILP_STEPS and _total(value, counts) < batch_rows:
            counts = _integer(kept, value, capacity)
        if _total(value, counts) >= batch_rows:
            return {int(cheap[j]): count for j, count in counts.items()}, deadline_s
    return None


def few_shapes(
    columns: Columns, capacity: Sequence[int], batch_rows: int, *, most: int
) -> tuple[Counts, float] | None:
    """Return replicas of at most `most` shapes that do the batch early, and the deadline; None where none do.

    One shape: all are tried, so the answer is the best. More: a beam over which shape comes next and which part of
    what is left it takes.
    """
    import numpy as np

    have = np.asarray(capacity, dtype=float)
    replicas = _most_replicas(columns.need, have)
    turns = np.ceil(batch_rows / np.maximum(replicas * columns.rows, 1e-9))
    seconds = np.where(replicas >= 1, columns.fill_s + turns * columns.cycle_s, np.inf)
    first = int(seconds.argmin())
    if not np.isfinite(seconds[first]):
        return None
    best: Counts = {first: int(min(replicas[first], max(1, batch_rows // columns.rows[first])))}
    low, high = 0.0, float(seconds[first])
    while most > 1 and high - low > _FEW_PRECISION * high:
        middle = (low + high) / 2
        counts = _beam(columns, columns.done_by(middle), have, most=most)
        if _total(columns.done_by(middle), counts) >= batch_rows:
            best, high = counts, middle
        else:
            low = middle
    return best, high


def filled_up(
    columns: Columns,
    capacity: Sequence[int],
    batch_rows: int,
    sync_s: Mapping[int, Floats],
    *,
    most: int,
) -> Iterator[Counts]:
    """Yield replicas of one shape, and these with more and more of others on what is left.

    The `most` shapes that end first with as many replicas as the devices suffice for, and the `most` shapes and numbers of
    replicas that end first where so many take `sync_s` longer.
    """
    import numpy as np

    have = np.asarray(capacity, dtype=float)
    replicas = _most_replicas(columns.need, have)
    replicas = np.minimum(replicas, np.maximum(1, batch_rows // columns.rows))
    starts: dict[tuple[int, int], float] = {}
    for number in (None, *sync_s):
        count = replicas if number is None else np.full(replicas.shape, float(number))
        turns = np.ceil(batch_rows / np.maximum(count * columns.rows, 1e-9))
        more_s = 0.0 if number is None else sync_s[number]
        seconds = columns.fill_s + more_s + turns * columns.cycle_s
        seconds = np.where((replicas >= 1) & (count <= replicas), seconds, np.inf)
        for first in np.argsort(seconds, kind="stable")[:most]:
            if np.isfinite(seconds[first]):
                starts.setdefault((int(first), int(count[first])), float(seconds[first]))
    full = {key: seconds for key, seconds in starts.items() if key[1] == replicas[key[0]]}
    thin = {key: seconds for key, seconds in starts.items() if key not in full}
    few = have.sum() <= _PARTED
    for chosen in (full, thin):
        for first, number in sorted(chosen, key=chosen.__getitem__)[:most]:
            counts: Counts = {first: number}
            yield dict(counts)
            left = have - number * columns.need[:, first]
            value = columns.done_by(chosen[first, number])
            value[first] = 0.0
            while True:
                gained = _most_replicas(columns.need, left) * value
                best = int(gained.argmax())
                if gained[best] <= 0:
                    break
                added = int(_most_replicas(columns.need[:, best : best + 1], left)[0])
                parts = (1, added // 2, added - 1, added) if few else (added,)
                for some in dict.fromkeys(parts):
                    if some:
                        yield {**counts, best: counts.get(best, 0) + some}
                counts[best] = counts.get(best, 0) + added
                left = left - added * columns.need[:, best]


def _most_replicas(need: Floats, have: Floats) -> Floats:
    """Return how many replicas of each shape the devices suffice for."""
    import numpy as np

    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(need > 0, have[:, None] / need, np.inf)
    most: Floats = np.floor(ratio.min(axis=0) + 1e-9)
    return most


def _beam(columns: Columns, value: Floats, have: Floats, *, most: int) -> Counts:
    """Return the counts of at most `most` shapes that do most rows, as far as a beam finds them."""
    import numpy as np

    relaxed = relax(value, columns.need, have)
    prices = np.asarray(relaxed.prices)
    states: list[tuple[float, Floats, Counts]] = [(0.0, have, {})]
    best: tuple[float, Counts] = (-1.0, {})
    for depth in range(most):
        waiting: list[tuple[float, int, tuple[float, Floats, Counts]]] = []
        for done, left, counts in states:
            replicas = _most_replicas(columns.need, left)
            gained = replicas * value
            top = int(gained.argmax())
            if done + gained[top] > best[0]:
                best = (done + float(gained[top]), {**counts, top: int(replicas[top])})
            if depth + 1 == most:
                continue
            hope = gained + prices @ (left[:, None] - replicas * columns.need)
            for j in np.argsort(-hope, kind="stable")[:_BEAM_WIDTH]:
                for part in _BEAM_PARTS:
                    count = int(replicas[j] * part)
                    if count < 1 or int(j) in counts:
                        continue
                    rest = left - count * columns.need[:, j]
                    now = done + count * float(value[j])
                    state = (now, rest, {**counts, int(j): count})
                    waiting.append((-now - float(prices @ rest), len(waiting), state))
        states = [state for _, _, state in sorted(waiting, key=lambda w: w[:2])[:_BEAM_WIDTH]]
    return {j: count for j, count in best[1].items() if count}


def _total(value: Floats, counts: Counts) -> float:
    return float(sum(value[j] * count for j, count in counts.items()))


def _rounded(columns: Columns, value: Floats, capacity: Sequence[int]) -> Counts:
    """Return whole replicas: the relaxed optimum's whole part, again for what is left, one by one at the end."""
    import numpy as np

    left = np.asarray(capacity, dtype=float)
    counts: Counts = {}
    fitting = np.flatnonzero(value > 0)
    while True:
        fitting = fitting[(columns.need[:, fitting] <= left[:, None] + 1e-9).all(axis=0)]
        if not len(fitting):
            return counts
        relaxed = relax(value[fitting], columns.need[:, fitting], left)
        whole = {j: floor(x + 1e-6) for j, x in relaxed.counts.items()}
        if not any(whole.values()):
            best = max(relaxed.counts, key=lambda j: (relaxed.counts[j], -j), default=None)
            if best is None:
                return counts
            whole = {best: 1}
        for j, count in whole.items():
            column = int(fitting[j])
            counts[column] = counts.get(column, 0) + count
            left = left - count * columns.need[:, column]
        counts = {j: count for j, count in counts.items() if count}


def _integer(columns: Columns, value: Floats, capacity: Sequence[int]) -> Counts:
    """Solve the integer programme over the shapes that lose least at the relaxed prices; bounded by nodes, not by time."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    have = np.asarray(capacity, dtype=float)
    relaxed = relax(value, columns.need, have)
    loss = np.asarray(relaxed.prices) @ columns.need - value
    loss[value <= 0] = np.inf
    chosen = np.argsort(loss, kind="stable")[:_MILP_COLUMNS]
    chosen = chosen[np.isfinite(loss[chosen])]
    if not len(chosen):
        return {}
    found = milp(
        -value[chosen],
        constraints=LinearConstraint(columns.need[:, chosen], -np.inf, have),
        integrality=np.ones(len(chosen)),
        bounds=Bounds(0, np.inf),
        options=_MILP_OPTIONS,
    )
    if found.x is None:
        return {}
    whole = np.floor(found.x + 1e-6).astype(int)
    return {int(chosen[j]): int(count) for j, count in enumerate(whole) if count}
