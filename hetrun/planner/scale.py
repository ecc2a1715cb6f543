"""Candidate combinations for many devices: all replica shapes as arrays, their split, and how many of each.

The number of devices enters only as a capacity, so 100,000 take as long as 100. Judging is left to `search.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from hetrun import arch
from hetrun.model import Link, LinkKind
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
from hetrun.planner.pace import MOST_LINKED, likely_link, linked_cycles, passed_share, per_host
from hetrun.planner.problem import Problem
from hetrun.planner.scale_unequal import ManyCuts, cut_many_unequal
from hetrun.planner.shapes import Shape, ShapeMaker
from hetrun.planner.templates import Blocks, templates

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_FEW = 64  # devices; up to here polishing finds what rounding loses, and scipy takes half a second to load
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
    tables = _Tables(maker, 2 * int(windows.max()) - 1)
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
    inside_s, across_s = _sync(problem, kinds[kept], layers[kept], need)
    inside_s = inside_s + tables.optimizer(kinds[kept], layers[kept])
    return ManyShapes(
        blocks=tuple(pairs[i][0] for i in kept),
        rows=tuple(pairs[i][1] for i in kept),
        columns=Columns(need=need, rows=rows, fill_s=fill_s + inside_s, cycle_s=cycle_s),
        least=Columns(need=need, rows=rows, fill_s=np.zeros(len(kept)), cycle_s=many.least_s[kept]),
        across_s=across_s,
        num_groups=(need > 0).sum(axis=0),
        dropped_for_memory=len(pairs) - len(kept),
    )


def _cut_many(tables: _Tables, kinds: Any, row_numbers: Any, windows: Any) -> ManyCuts:
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


def _holds_more(tables: _Tables, kinds: Any, layers: Any, row_numbers: Any) -> Any:
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
        for counts in _answers(problem, columns, exact=exact, first=family == 0):
            numbered = tuple(sorted((int(chosen[j]), n) for j, n in counts.items()))
            if numbered and numbered not in seen:
                seen.add(numbered)
                combo = _combo(maker, shapes, numbered, made)
                if combo is not None:
                    yield combo


def _answers(problem: Problem, columns: Columns, *, exact: bool, first: bool) -> Iterator[Counts]:
    """Yield counts of replicas: the best of any number of shapes, and of one."""
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
        yield from filled_up(columns, problem.capacity, problem.batch_rows, most=filled)


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


class _Tables:
    """What a stage costs and holds by kind and microbatch size, as arrays to index with."""

    def __init__(self, maker: ShapeMaker, depth: int) -> None:
        import numpy as np

        problem = maker.problem
        self.problem = problem
        units = np.asarray(
            [
                [maker.pace[kind, rows] for rows in problem.row_choices]
                for kind in range(len(problem.kinds))
            ]
        )
        self.layer_s, self.embedding_s, self.head_s = units[..., 0], units[..., 1], units[..., 2]
        caps = [
            [
                [
                    [maker.cap(kind, rows, window=window, first=bool(first)) for first in (0, 1)]
                    for window in range(1, depth + 1)
                ]
                for rows in problem.row_choices
            ]
            for kind in range(len(problem.kinds))
        ]
        zero = np.zeros((len(problem.kinds), len(problem.row_choices), 1, 2))
        self.caps = np.concatenate([zero, np.asarray(caps, dtype=float)], axis=2)
        self.num_bytes = np.asarray(
            [
                arch.boundary_bytes(problem.model, problem.dtype, rows, problem.seq_len)
                for rows in problem.row_choices
            ]
        )
        numbers = range(len(problem.kinds))
        self.together, self.apart = (
            [[likely_link(problem, a, b, together=together) for b in numbers] for a in numbers]
            for together in (True, False)
        )
        self.per_host = np.asarray([*(per_host(problem, kind) for kind in numbers), 1])
        self.update_s = np.asarray(
            [
                kind.optimizer_s_per_parameter
                * arch.mean_layer_parameters(problem.model)
                / (kind.tp * max(1, problem.shards))
                for kind in problem.kinds
            ]
        )

    def sends(self, kinds: Any, row_numbers: Any, need: Floats) -> Floats:
        """Return seconds that one microbatch spends on each link, one way; see `pace.py`. Blocks are of one kind each."""
        import numpy as np

        places = np.asarray([*self.problem.places, -1])[kinds]
        block, place = _blocks_of(places)
        capacity = np.asarray(self.problem.capacity, dtype=float)[:, None]
        with np.errstate(divide="ignore"):
            most = np.floor((np.where(need > 0, capacity / need, np.inf)).min(axis=0))
        held = self.per_host[kinds]
        times = np.maximum(1, held // np.maximum(1, block))
        at_once = np.minimum(np.maximum(times[:, :-1], times[:, 1:]), most[:, None])
        a, b = kinds[:, :-1], kinds[:, 1:]
        inside = places[:, :-1] == places[:, 1:]
        together = inside & ((place[:, :-1] + 1) % held[:, :-1] > 0)
        at_once = np.where(inside, 1.0, at_once)
        found: Floats = np.zeros(a.shape)
        for links, chosen in ((self.together, together), (self.apart, ~together)):
            latency, rate, shared = _link_tables(links)
            bytes_at_once = self.num_bytes[row_numbers][:, None] * np.where(
                shared[a, b], at_once, 1.0
            )
            found = np.where(chosen, latency[a, b] + bytes_at_once / rate[a, b], found)
        return np.where(b >= 0, found, 0.0)

    def optimizer(self, kinds: Any, layers: Any) -> Any:
        """Return about how long the slowest stage updates its parameters."""
        return (self.update_s[kinds] * layers).max(axis=1)


def _blocks_of(places: Any) -> tuple[Any, Any]:
    """Return for every stage how many stages its block has, and how many of these stand before it."""
    import numpy as np

    index = np.broadcast_to(np.arange(places.shape[1]), places.shape)
    new = np.ones(places.shape, dtype=bool)
    new[:, 1:] = places[:, 1:] != places[:, :-1]
    begin = np.maximum.accumulate(np.where(new, index, 0), axis=1)
    last = np.ones(places.shape, dtype=bool)
    last[:, :-1] = new[:, 1:]
    ends = np.where(last, index, places.shape[1])
    end = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
    return end - begin + 1, index - begin


def _link_tables(links: Sequence[Sequence[Link]]) -> tuple[Any, Any, Any]:
    """Return latencies, rates and whether the link leaves a host, by kinds at both ends."""
    import numpy as np

    latency = np.asarray([[link.latency_s for link in row] for row in links])
    rate = np.asarray([[link.bytes_per_s for link in row] for row in links])
    leaves = np.asarray([[link.kind is not LinkKind.INSIDE_HOST for link in row] for row in links])
    return latency, rate, leaves


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


def _sync(problem: Problem, kinds: Any, layers: Any, need: Floats) -> tuple[Floats, Floats]:
    """Return about how long the busiest stage's gradients take: inside its vendor, and across vendors on top."""
    import numpy as np

    element = arch.BYTES_PER_PARAMETER[problem.dtype]
    num_bytes = layers * arch.mean_layer_parameters(problem.model) * element
    inside = np.zeros(len(kinds))
    capacity = np.asarray(problem.capacity, dtype=float)
    for number, kind in enumerate(problem.kinds):
        place = problem.places[number]
        members = kind.lanes * np.maximum(1.0, capacity[place] / np.maximum(need[place], 1.0))
        link = problem.link(problem.inside[kind.vendor], kind.vendor, kind.vendor)
        held = np.where(kinds == number, num_bytes, 0.0).max(axis=1) / kind.tp
        hop_s = link.latency_s + held / members / link.bytes_per_s
        inside = np.maximum(inside, np.where(held > 0, 2 * (members - 1) * hop_s, 0.0))
    across = np.zeros(len(kinds))
    size = len(problem.vendors)
    if size > 1:
        names = problem.vendors
        most = num_bytes.max(axis=1) / size
        for a, b in zip(names, (*names[1:], names[0]), strict=True):
            link = problem.link(LinkKind.ACROSS, a, b)
            across = np.maximum(across, 2 * (size - 1) * (link.latency_s + most / link.bytes_per_s))
    return inside, across
