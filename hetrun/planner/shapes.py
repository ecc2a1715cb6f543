"""Replica shapes: ordered blocks of equal devices with their exact layer split. How many of each is left to `compose.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations, product
from math import inf

from hetrun import arch
from hetrun.model import Link, LinkKind
from hetrun.planner.cost import Piece, send_seconds, stage_parameters, stage_seconds, unit_seconds
from hetrun.planner.memory import Load, layer_bytes, stage_bytes
from hetrun.planner.problem import Problem
from hetrun.planner.split import fill_parts
from hetrun.schedule import plain_window

_FULL_GRID = 12  # block sizes up to here are all tried, larger ones on a grid
_COARSE_GRID = 4  # the same with three kinds and more
_FEW_USES = 600  # above, only two orders of the kinds are tried
_MOST_SHAPES = 1500
_SHORT_BLOCK = 4  # stages; recomputation on any number of them is tried up to here


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One pipeline: kind and layers of each stage, rows of a microbatch, and a straight line for its seconds."""

    kinds: tuple[int, ...]  # per stage, index into Problem.kinds
    layers: tuple[int, ...]
    rows: int
    use: tuple[int, ...]  # devices per kind
    cycle_s: float  # one more microbatch
    fill_s: float  # what m microbatches take beyond m cycles
    optimizer_s: float
    memory_bound: bool  # some stage holds fewer layers than its speed deserves

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.kinds)

    def seconds(self, num_microbatches: int) -> float:
        """Return about how long so many microbatches take."""
        return self.fill_s + num_microbatches * self.cycle_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Layers per stage and the seconds of the slowest."""

    layers: tuple[int, ...]
    cycle_s: float
    memory_bound: bool


def pieces(layers: Sequence[int]) -> tuple[Piece, ...]:
    """Say what each stage of a pipeline holds."""
    last = len(layers) - 1
    return tuple(
        Piece(num_layers=count, has_embedding=index == 0, has_head=index == last)
        for index, count in enumerate(layers)
    )


class ShapeMaker:
    """Makes shapes of one problem and remembers what their stages can hold."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dropped_for_memory = 0
        self._caps: dict[tuple[int, int, int, bool, bool], int] = {}
        self._hops: dict[tuple[int, int, bool, int], float] = {}
        self._unit_seconds = {
            (number, rows): unit_seconds(timing)
            for number, kind in enumerate(problem.kinds)
            for rows, timing in kind.timings.items()
        }
        self._layer_parameters = arch.layer_parameters(problem.model)
        self._total_speed = sum(
            n * s for n, s in zip(problem.capacity, problem.group_speeds, strict=True)
        )
        self._stage_speeds = [
            kind.tp * problem.group_speeds[place]
            for kind, place in zip(problem.kinds, problem.places, strict=True)
        ]

    def make(self, kinds: Sequence[int], rows: int) -> Shape | None:
        """Split the layers over stages of these kinds, at least one each; None where they do not fit."""
        cut = self.cut(kinds, rows)
        if cut is None:
            return None
        return self.finish(kinds, cut.layers, rows, memory_bound=cut.memory_bound)

    def cut(self, kinds: Sequence[int], rows: int) -> Cut | None:
        """Return the exact split of the layers over stages of these kinds, None where they do not fit."""
        problem = self.problem
        size = len(kinds)
        spare = problem.model.num_layers - size
        if spare < 0:
            return None
        unit_s, start_s, caps = [], [], []
        for index, kind in enumerate(kinds):
            layer_s, embedding_s, head_s = self._unit_seconds[kind, rows]
            unit_s.append(layer_s)
            start_s.append(layer_s + embedding_s * (index == 0) + head_s * (index == size - 1))
            caps.append(self.cap(kind, rows, size=size, index=index) - 1)
        if min(caps) < 0 or sum(caps) < spare:
            self.dropped_for_memory += 1
            return None
        more = fill_parts(spare, unit_s, start_s=start_s, caps=caps)
        cycle_s = max(s + n * u for s, n, u in zip(start_s, more, unit_s, strict=True))
        return Cut(
            layers=tuple(count + 1 for count in more),
            cycle_s=cycle_s,
            memory_bound=any(count == cap < spare for count, cap in zip(more, caps, strict=True)),
        )

    def promise(self, kinds: Sequence[int], rows: int, cut: Cut) -> float:
        """Return the share of its devices' speed that a shape uses, by its slowest stage and its bubble."""
        speed = sum(self._stage_speeds[kind] for kind in kinds)
        count = self._typical_microbatches(kinds, rows)
        return rows / (cut.cycle_s * speed) * count / (count + len(kinds) - 1)

    def finish(
        self, kinds: Sequence[int], layers: Sequence[int], rows: int, *, memory_bound: bool
    ) -> Shape:
        """Return a shape with these layers and its straight line, whether or not it fits."""
        problem = self.problem
        last = len(kinds) - 1
        stages = []
        optimizer_s = 0.0
        for index, (kind, count) in enumerate(zip(kinds, layers, strict=True)):
            timing = problem.kinds[kind].timings[rows]
            forward_s = count * timing.layer_forward_s
            backward_s = count * timing.layer_backward_s
            tp = problem.kinds[kind].tp
            parameters = -(-count * self._layer_parameters // tp)
            if index in (0, last):
                piece = Piece(num_layers=count, has_embedding=index == 0, has_head=index == last)
                forward_s, backward_s = stage_seconds(timing, piece)
                parameters = stage_parameters(problem.model, piece, tp=tp)
            stages.append((forward_s, backward_s))
            update_s = problem.kinds[kind].optimizer_s_per_parameter * parameters
            optimizer_s = max(optimizer_s, update_s)
        cycle_s = max(forward_s + backward_s for forward_s, backward_s in stages)
        typical = self._typical_microbatches(kinds, rows)
        end_s = _end_without_links(stages, typical) + 2 * self._links_s(kinds, rows)
        return Shape(
            kinds=tuple(kinds),
            layers=tuple(layers),
            rows=rows,
            use=self._use(kinds),
            cycle_s=cycle_s,
            fill_s=end_s - typical * cycle_s,
            optimizer_s=optimizer_s,
            memory_bound=memory_bound,
        )

    def _use(self, kinds: Sequence[int]) -> tuple[int, ...]:
        """Return devices per group of stages of these kinds."""
        use = [0] * len(self.problem.groups)
        for kind in kinds:
            use[self.problem.places[kind]] += self.problem.kinds[kind].tp
        return tuple(use)

    def fits(self, shape: Shape, windows: Sequence[int]) -> bool:
        """Whether every stage stays within its device's memory with these windows."""
        problem = self.problem
        for kind, piece, window in zip(shape.kinds, pieces(shape.layers), windows, strict=True):
            limit = problem.kinds[kind].limit_bytes
            if limit is not None and limit < self._bytes(kind, piece, shape.rows, window):
                return False
        return True

    def _bytes(self, kind: int, piece: Piece, rows: int, window: int) -> int:
        problem = self.problem
        return stage_bytes(problem.model, problem.dtype, piece, self._load(kind, rows, window))

    def _load(self, kind: int, rows: int, window: int) -> Load:
        """Return what a stage of this kind works on."""
        return stage_load(self.problem, kind, rows=rows, window=self._held(window, rows))

    def cap(self, kind: int, rows: int, *, size: int, index: int) -> int:
        """Return how many layers stage `index` of `size` can hold, -1 where not even none; remembered."""
        window = plain_window(size, index)
        key = (kind, rows, window, index == 0, index == size - 1)
        if key not in self._caps:
            spare = self.spare_bytes(kind, rows, size=size, index=index)
            if spare is None:
                self._caps[key] = self.problem.model.num_layers
            elif spare < 0:
                self._caps[key] = -1
            else:
                most = spare // self.layer_bytes(kind, rows, window=window)
                self._caps[key] = min(self.problem.model.num_layers, most)
        return self._caps[key]

    def spare_bytes(self, kind: int, rows: int, *, size: int, index: int) -> int | None:
        """Return what stage `index` of `size` has left for layers; None: no limit is known."""
        limit = self.problem.kinds[kind].limit_bytes
        if limit is None:
            return None
        empty = Piece(num_layers=0, has_embedding=index == 0, has_head=index == size - 1)
        return limit - self._bytes(kind, empty, rows, plain_window(size, index))

    def layer_bytes(self, kind: int, rows: int, *, window: int) -> int:
        """Return what one more layer adds to a stage with this window."""
        problem = self.problem
        return layer_bytes(problem.model, problem.dtype, self._load(kind, rows, window))

    def _held(self, window: int, rows: int) -> int:
        """Return how many microbatches can be in flight: no more than the batch has."""
        return min(window, -(-self.problem.batch_rows // rows))

    def _typical_microbatches(self, kinds: Sequence[int], rows: int) -> int:
        """Return about how many microbatches such a replica gets: its share of the summed speed."""
        share = sum(self._stage_speeds[kind] for kind in kinds) / self._total_speed
        return max(1, round(self.problem.batch_rows * share / rows))

    def _links_s(self, kinds: Sequence[int], rows: int) -> float:
        """Return the seconds that one microbatch spends on links, one way, on likely seats."""
        return sum(self._hop_s(a, b, kinds.count(a), rows) for a, b in pairwise(kinds))

    def _hop_s(self, a: int, b: int, block: int, rows: int) -> float:
        """Return the seconds of one send from a block of kind `a` to kind `b`; remembered."""
        problem = self.problem
        whole = problem.kinds[a].most_on_one_host >= block * problem.kinds[a].tp
        key = (a, b, whole, rows)
        if key not in self._hops:
            num_bytes = arch.boundary_bytes(problem.model, problem.dtype, rows, problem.seq_len)
            self._hops[key] = send_seconds(likely_link(problem, a, b, together=key[2]), num_bytes)
        return self._hops[key]


def stage_load(problem: Problem, kind: int, *, rows: int, window: int) -> Load:
    """Return what a stage of a kind works on, as the memory model sees it."""
    way = problem.kinds[kind]
    return Load(
        rows=rows, seq_len=problem.seq_len, window=window, tp=way.tp, recompute=way.recompute
    )


def likely_link(problem: Problem, a: int, b: int, *, together: bool) -> Link:
    """Return the link between two kinds, inside a host if the block sits together in one."""
    first, second = problem.kinds[a], problem.kinds[b]
    if first.vendor != second.vendor:
        kind = LinkKind.ACROSS
    elif (problem.places[a] == problem.places[b] and together) or _same_single_host(problem, a, b):
        kind = LinkKind.INSIDE_HOST
    else:
        kind = LinkKind.INSIDE_ISLAND
    return problem.link(kind, first.vendor, second.vendor)


def _same_single_host(problem: Problem, a: int, b: int) -> bool:
    hosts = {seat.host_number for kind in (a, b) for seat in problem.kinds[kind].seats}
    return len(hosts) == 1


def _end_without_links(stages: Sequence[tuple[float, float]], num_microbatches: int) -> float:
    """Return when plain 1F1B ends with free links: exact for balanced stages, 0.2 % off for random ones."""
    size = len(stages)
    rest_s = sum(forward_s + backward_s for forward_s, backward_s in stages)
    before_s = end_s = 0.0
    for index, (forward_s, backward_s) in enumerate(stages):
        rest_s -= forward_s + backward_s
        ahead = min(plain_window(size, index), num_microbatches) - 1
        gap_s = max(0.0, rest_s - ahead * forward_s), max(0.0, rest_s - ahead * backward_s)
        waits_s = sum(gap_s) if num_microbatches > ahead + 1 else max(gap_s)
        end_s = max(end_s, before_s + num_microbatches * (forward_s + backward_s) + waits_s)
        before_s += forward_s + backward_s
    return end_s


def enumerate_shapes(maker: ShapeMaker, *, quick: bool = False) -> list[Shape]:
    """Return the shapes that fit, the most promising ones if there are very many.

    At most one block per kind, any order of the kinds, any microbatch size.
    """
    problem = maker.problem
    uses = list(_uses(problem, quick=quick))
    few = len(uses) * len(problem.row_choices) <= _FEW_USES
    found: list[tuple[float, tuple[int, ...], int, Cut]] = []
    for use in uses:
        for order in _orders(problem, use, few=few):
            for stages, rows in product(stage_lists(problem, order, use), problem.row_choices):
                cut = maker.cut(stages, rows)
                if cut is not None:
                    found.append((-maker.promise(stages, rows, cut), stages, rows, cut))
    found.sort(key=lambda item: item[:3])
    return [
        maker.finish(stages, cut.layers, rows, memory_bound=cut.memory_bound)
        for _, stages, rows, cut in found[:_MOST_SHAPES]
    ]


def stage_lists(
    problem: Problem, order: Sequence[int], use: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield kinds per stage of blocks of groups: every tp, and recomputation on the first so many stages of a block.

    A block's first stages hold most microbatches, so these are where recomputation can pay.
    """
    blocks = [
        [
            block
            for block in _block_lists(problem, place, use[place])
            if sum(problem.kinds[kind].tp for kind in block) <= problem.capacity[place]
        ]
        for place in order
    ]
    for chosen in product(*blocks):
        yield tuple(kind for block in chosen for kind in block)


def _block_lists(problem: Problem, place: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yield kinds per stage of one block; long blocks recompute everywhere or nowhere."""
    ways = {
        (kind.tp, kind.recompute): number
        for number, kind in enumerate(problem.kinds)
        if problem.places[number] == place
    }
    for tp in sorted({tp for tp, _ in ways}):
        for again in range(size + 1) if size <= _SHORT_BLOCK else (0, size):
            plain, anew = ways.get((tp, False)), ways.get((tp, True))
            if (plain is None and again < size) or (anew is None and again):
                continue
            yield tuple(
                number
                for number in (anew,) * again + (plain,) * (size - again)
                if number is not None
            )


def block_sizes(count: int, most: int, *, full: int) -> tuple[int, ...]:
    """Return the block sizes to try for `count` devices: all up to `full`, even shares, then ever larger steps."""
    largest = min(count, most)
    sizes = set(range(1, min(largest, full) + 1))
    sizes |= {count // parts for parts in range(1, 9) if 1 <= count // parts <= largest}
    size = full
    while size <= largest:
        sizes.add(size)
        size += max(1, size // 3)
    return tuple(sorted(sizes))


def _uses(problem: Problem, *, quick: bool) -> Iterator[tuple[int, ...]]:
    """Yield devices per kind for one replica: with up to three kinds any mix, else at most two."""
    many = len(problem.groups) > 2 and problem.num_devices > _FULL_GRID
    full = _COARSE_GRID if many or quick else _FULL_GRID
    sizes = [
        (0, *block_sizes(len(kind.seats), problem.max_stages, full=full)) for kind in problem.groups
    ]
    most_kinds = 3 if len(sizes) <= 3 else 2
    for use in product(*sizes):
        mixed = sum(count > 0 for count in use)
        if 1 <= mixed <= most_kinds and sum(use) <= problem.max_stages:
            yield use


def _orders(problem: Problem, use: Sequence[int], *, few: bool) -> Iterator[tuple[int, ...]]:
    """Yield the orders of the kinds in a replica: all, or slow first and large memory first."""
    present = [kind for kind, count in enumerate(use) if count]
    if few or len(present) <= 2:
        yield from permutations(present)
        return
    rows = problem.row_choices[0]
    slow_first = sorted(present, key=lambda k: -problem.groups[k].timings[rows].layer_forward_s)
    limits = [inf if kind.limit_bytes is None else kind.limit_bytes for kind in problem.groups]
    large_first = sorted(present, key=lambda kind: -limits[kind])
    yield from dict.fromkeys((tuple(slow_first), tuple(large_first)))
