"""Candidate combinations for many devices: all replica shapes as arrays, their split, and how many of each.

The number of devices enters only as a capacity, so 100,000 take as long as 100. Judging is left to `search.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from hetrun import arch
from hetrun.model import LinkKind
from hetrun.planner.batch import many_windows, split_many
from hetrun.planner.estimate import Combo
from hetrun.planner.multiply import (
    Columns,
    Counts,
    few_shapes,
    filled_up,
    relaxed_deadline,
    whole_replicas,
)
from hetrun.planner.pace import MOST_LINKED, linked_cycles, passed_share
from hetrun.planner.problem import Problem
from hetrun.planner.scale_tables import Tables
from hetrun.planner.scale_unequal import ManyCuts, cut_many_unequal
from hetrun.planner.shapes import Shape, ShapeMaker
from hetrun.planner.templates import Blocks, templates

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_FEW = 64  # devices; up to here polishing finds what rounding loses, and scipy takes half a second to load
# of one shape: fewer wait less for their gradients
_REPLICAS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48)
_NUM_FILLED = 24  # shapes that are filled up, where there are few devices
_NUM_FILLED_ELSE = 3  # of the other families
_NUM_FAMILIES_QUICK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyShapes:
    """Replica shapes as arrays; entry i of each belongs to `blocks[i]` with `rows[i]`."""

    blocks: tuple[Blocks, ...]
    rows: tuple[int, ...]
    columns: Columns  # with the fill of 1F1B, links, and the gradient sync inside a vendor
    least: Columns  # with nothing but the slowest stage: no split of these stages is quicker
    across_s: Floats  # sync across vendors on top
    sync_s: Mapping[int, Floats]  # inside the vendor, by replicas alike; of few devices only
    num_groups: Floats  # groups of devices that a shape mixes
    dropped_for_memory: int

    def __len__(self) -> int:
        return len(self.blocks)


def many_shapes(maker: ShapeMaker) -> ManyShapes:
    """Enumerate ordered blocks of kinds (one per group at most) with every microbatch size, and split the layers."""
    import numpy as np

    problem = maker.problem
    listed = list(templates(problem))
    pairs = [(blocks, rows) for rows in problem.row_choices for blocks in listed]
    kinds, sizes = _stages(listed)
    kinds = np.tile(kinds, (len(problem.row_choices), 1))
    sizes = np.tile(sizes, len(problem.row_choices))
    row_numbers = np.repeat(np.arange(len(problem.row_choices)), len(listed))
    lanes = np.asarray([*(kind.lanes for kind in problem.kinds), 0])[kinds]  # -1 takes the last
    windows = many_windows(lanes)
    tables = Tables(maker, 2 * int(windows.max()) - 1)
    if problem.layers_differ:
        many = cut_many_unequal(maker, kinds, row_numbers, windows)
    else:
        many = _cut_many(tables, kinds, row_numbers, windows)
    layers, kept = many.layers, np.flatnonzero(many.fits)
    seconds, lanes = many.seconds[kept], lanes[kept]
    need = _need(problem, kinds[kept])
    rows = np.asarray(problem.row_choices, dtype=float)[row_numbers[kept]]
    fill_s = _fill(seconds, lanes, windows[kept], _typical(problem, need, rows))
    sends = tables.sends(kinds[kept], row_numbers[kept], need)
    fill_s = fill_s + 2 * sends.sum(axis=1)
    wide = _holds_more(tables, kinds[kept], layers[kept], row_numbers[kept])
    cycle_s = linked_cycles(seconds, sends, sizes[kept], share=passed_share(problem), wide=wide)
    unlinked = (lanes.max(axis=1) > 1) | (problem.num_devices > MOST_LINKED)
    cycle_s = np.where(unlinked, seconds.max(axis=1), cycle_s)
    update_s = tables.optimizer(kinds[kept], layers[kept])
    most = np.asarray(problem.capacity, dtype=float)[:, None] / np.maximum(need, 1.0)
    held = _held_bytes(problem, kinds[kept], layers[kept])
    inside_s, across_s = _inside_s(problem, held, most), _across_s(problem, held)
    few = [n for n in _REPLICAS if n <= problem.num_devices] if problem.num_devices <= _FEW else []
    alike_s = {n: _inside_s(problem, held, np.full(need.shape, float(n))) for n in few}
    return ManyShapes(
        blocks=tuple(pairs[i][0] for i in kept),
        rows=tuple(pairs[i][1] for i in kept),
        columns=Columns(need=need, rows=rows, fill_s=fill_s + inside_s + update_s, cycle_s=cycle_s),
        least=Columns(need=need, rows=rows, fill_s=np.zeros(len(kept)), cycle_s=many.least_s[kept]),
        across_s=across_s,
        sync_s={n: seconds - inside_s for n, seconds in alike_s.items()},
        num_groups=(need > 0).sum(axis=0),
        dropped_for_memory=len(pairs) - len(kept),
    )


def _cut_many(tables: Tables, kinds: Any, row_numbers: Any, windows: Any) -> ManyCuts:
    """Split the equal layers of every shape."""
    import numpy as np

    used = kinds >= 0
    index = np.arange(kinds.shape[1])
    first = np.broadcast_to(index == 0, kinds.shape)
    last = used & (windows == 1)
    at = (kinds, row_numbers[:, None])
    unit = np.where(used, tables.layer_s[at], np.inf)
    start = tables.embedding_s[at] * first + tables.head_s[at] * last
    caps = tables.caps[(*at, windows, first.astype(int))]
    layers, fits = split_many(tables.problem.model.num_layers, unit, start, caps)
    seconds = np.where(used, start + layers * np.where(used, unit, 0.0), 0.0)
    return ManyCuts(layers=layers, fits=fits, seconds=seconds, least_s=seconds.max(axis=1))


def _holds_more(tables: Tables, kinds: Any, layers: Any, row_numbers: Any) -> Any:
    """Return whether one more microbatch on every link fits; layers that differ are taken to fit."""
    import numpy as np

    if tables.problem.layers_differ:
        return np.ones(len(kinds), dtype=bool)
    used = kinds >= 0
    later = used.sum(axis=1)[:, None] - np.arange(kinds.shape[1]) - 1
    windows = np.where(used, 2 * later + 1, 0)
    first = np.broadcast_to(np.arange(kinds.shape[1]) == 0, kinds.shape).astype(int)
    caps = tables.caps[kinds, row_numbers[:, None], np.maximum(windows, 0), first]
    return ((layers <= caps) | ~used).all(axis=1)


def bound_of(problem: Problem, shapes: ManyShapes) -> float:
    """Return seconds of computing that no combination of these shapes beats, however their layers are split."""
    deadline = relaxed_deadline(shapes.least, problem.capacity, problem.batch_rows)
    return 0.0 if deadline is None else deadline.bound_s


def scaled_combos(maker: ShapeMaker, shapes: ManyShapes, *, exact: bool = True) -> Iterator[Combo]:
    """Yield good combinations of each family (all, one group per replica, mixed, without a vendor, one shape)."""
    problem = maker.problem
    everything = shapes.columns
    made: dict[int, Shape | None] = {}
    seen: set[tuple[tuple[int, int], ...]] = set()
    families = islice(_families(problem, shapes), None if exact else _NUM_FAMILIES_QUICK)
    for family, (chosen, across) in enumerate(families):
        if not len(chosen):
            continue  # such as a vendor that cannot hold the model
        columns = everything.some(chosen)
        if across:
            columns = Columns(
                need=columns.need,
                rows=columns.rows,
                fill_s=columns.fill_s + shapes.across_s[chosen],
                cycle_s=columns.cycle_s,
            )
        alike_s = {n: seconds[chosen] for n, seconds in shapes.sync_s.items()} if exact else {}
        for counts in _answers(problem, columns, alike_s, exact=exact, first=family == 0):
            numbered = tuple(sorted((int(chosen[j]), n) for j, n in counts.items()))
            if numbered and numbered not in seen:
                seen.add(numbered)
                combo = _combo(maker, shapes, numbered, made)
                if combo is not None:
                    yield combo


def _answers(
    problem: Problem, columns: Columns, sync_s: Mapping[int, Floats], *, exact: bool, first: bool
) -> Iterator[Counts]:
    """Yield counts of replicas: the best of any number of shapes, and of one; of few devices also of fewer replicas.

    `sync_s` is what so many replicas of one shape take more for their gradients than as many as the devices suffice for.
    """
    max_shapes = problem.max_shapes
    if max_shapes is None:
        by_milp = exact and first and len(problem.groups) > 1 and problem.num_devices > _FEW
        whole = whole_replicas(columns, problem.capacity, problem.batch_rows, exact=by_milp)
        if whole is not None:
            yield whole[0]
    for most in sorted({1, max_shapes or 1}):
        few = few_shapes(columns, problem.capacity, problem.batch_rows, most=most)
        if few is not None:
            yield few[0]
    if exact and problem.num_devices <= _FEW:
        filled = _NUM_FILLED if first else _NUM_FILLED_ELSE
        yield from filled_up(columns, problem.capacity, problem.batch_rows, sync_s, most=filled)


def _families(problem: Problem, shapes: ManyShapes) -> Iterator[tuple[Any, bool]]:
    """Yield numbers of shapes, and whether gradients of a layer then cross vendors."""
    import numpy as np

    everything = np.arange(len(shapes))
    several = len(problem.vendors) > 1
    yield everything, several
    if len(problem.groups) == 1:
        return
    yield everything[shapes.num_groups == 1], several
    yield everything[shapes.num_groups > 1], False
    for vendor in problem.vendors:
        own = np.asarray([kind.vendor == vendor for kind in problem.groups])
        need = shapes.columns.need
        if several:
            yield everything[(need[~own] == 0).all(axis=0)], False
        if len(problem.vendors) > 2:
            yield everything[(need[own] == 0).all(axis=0)], True


def _combo(
    maker: ShapeMaker,
    shapes: ManyShapes,
    numbered: Sequence[tuple[int, int]],
    made: dict[int, Shape | None],
) -> Combo | None:
    """Return the combination with shapes as the rest of the planner knows them; remembered in `made`."""
    combo: list[tuple[Shape, int]] = []
    for number, count in numbered:
        if number not in made:
            stages = tuple(kind for kind, size in shapes.blocks[number] for _ in range(size))
            made[number] = maker.make(stages, shapes.rows[number])
        shape = made[number]
        if shape is None:
            return None
        combo.append((shape, count))
    return tuple(combo)


def _stages(listed: Sequence[Blocks]) -> tuple[Any, Any]:
    """Return the kind of every stage of every template (-1: no such stage) and the numbers of stages."""
    import numpy as np

    sizes = np.asarray([sum(size for _, size in blocks) for blocks in listed])
    kinds = np.full((len(listed), int(sizes.max())), -1)
    for number, blocks in enumerate(listed):
        begin = 0
        for kind, size in blocks:
            kinds[number, begin : begin + size] = kind
            begin += size
    return kinds, sizes


def _need(problem: Problem, kinds: Any) -> Floats:
    """Return devices per group and shape."""
    import numpy as np

    need = np.zeros((len(problem.groups), len(kinds)))
    for number, kind in enumerate(problem.kinds):
        need[problem.places[number]] += kind.width * (kinds == number).sum(axis=1)
    return need


def _typical(problem: Problem, need: Floats, rows: Floats) -> Floats:
    """Return about how many microbatches a replica gets: its devices' share of all speed."""
    import numpy as np

    speeds = np.asarray(problem.group_speeds)
    share = speeds @ need / float(speeds @ np.asarray(problem.capacity))
    typical: Floats = np.maximum(1.0, np.round(problem.batch_rows * share / rows))
    return typical


def _fill(pace: Floats, lanes: Any, windows: Any, count: Floats) -> Floats:
    """Return what plain 1F1B with free links takes beyond its cycles; see `shapes.py` for the formula (f = b / 2 here)."""
    import numpy as np

    seconds = pace * lanes
    total = seconds.sum(axis=1)
    before = np.cumsum(seconds, axis=1) - seconds
    rest = total[:, None] - before - seconds
    own = np.ceil(count[:, None] / np.maximum(1, lanes))
    ahead = np.minimum(windows, own) - 1
    waits_f = np.maximum(0.0, rest - ahead * seconds / 3)
    waits_b = np.maximum(0.0, rest - ahead * seconds * 2 / 3)
    waits = np.where(own > ahead + 1, waits_f + waits_b, np.maximum(waits_f, waits_b))
    end = (before + own * seconds + waits).max(axis=1)
    fill: Floats = end - count * pace.max(axis=1)
    return fill


def _held_bytes(problem: Problem, kinds: Any, layers: Any) -> Floats:
    """Return about how many bytes of gradients the fullest stage of each kind holds, by kind and shape."""
    import numpy as np

    element = arch.BYTES_PER_PARAMETER[problem.dtype]
    num_bytes = layers * arch.mean_layer_parameters(problem.model) * element
    of_kinds = [np.where(kinds == n, num_bytes, 0.0).max(axis=1) for n in range(len(problem.kinds))]
    return np.asarray(of_kinds)


def _inside_s(problem: Problem, held: Floats, replicas: Floats) -> Floats:
    """Return about how long the busiest stage's gradients take inside its vendor; replicas by group and shape."""
    import numpy as np

    inside = np.zeros(held.shape[1])
    for number, kind in enumerate(problem.kinds):
        members = kind.lanes * np.maximum(1.0, replicas[problem.places[number]])
        link = problem.link(problem.inside[kind.vendor], kind.vendor, kind.vendor)
        hop_s = link.latency_s + held[number] / kind.tp / members / link.bytes_per_s
        inside = np.maximum(inside, np.where(held[number] > 0, 2 * (members - 1) * hop_s, 0.0))
    return inside


def _across_s(problem: Problem, held: Floats) -> Floats:
    """Return about how long the fullest stage's gradients take across all vendors."""
    import numpy as np

    across = np.zeros(held.shape[1])
    size = len(problem.vendors)
    if size > 1:
        names = problem.vendors
        most = held.max(axis=0) / size
        for a, b in zip(names, (*names[1:], names[0]), strict=True):
            link = problem.link(LinkKind.ACROSS, a, b)
            across = np.maximum(across, 2 * (size - 1) * (link.latency_s + most / link.bytes_per_s))
    return across
