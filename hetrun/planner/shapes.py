"""Replica shapes: ordered blocks of equal devices with their exact layer split. Which there are is decided in `variety.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from hetrun import arch
from hetrun.model import LayerCount
from hetrun.planner.cost import (
    Piece,
    part_seconds,
    stage_parameters,
    stage_seconds,
    unit_seconds,
)
from hetrun.planner.memory import Load, again_bytes, layer_bytes, stage_bytes
from hetrun.planner.pace import MOST_LINKED, Sends, linked_cycle_s, passed_share
from hetrun.planner.problem import Problem
from hetrun.planner.ranges import Reach, split_ranges
from hetrun.planner.split import fill_parts
from hetrun.schedule import lane_windows

_ENDLESS = 1 << 62  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One pipeline: kind and layers of each stage, rows of a microbatch, and a straight line for its seconds."""

    kinds: tuple[int, ...]  # per stage, index into Problem.kinds
    lanes: tuple[int, ...]  # per stage
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
        Piece(
            first_layer=first,
            num_layers=count,
            has_embedding=index == 0,
            has_head=index == last,
        )
        for index, (first, count) in enumerate(zip(accumulate(layers, initial=0), layers))  # noqa: B905 - the sums have one more
    )


class ShapeMaker:
    """Makes shapes of one problem and remembers what their stages can hold."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dropped_for_memory = 0
        self._caps: dict[tuple[int, int, int, bool], int] = {}
        self._rooms: dict[tuple[int, int, bool], list[tuple[int | None, int]]] = {}
        self._reaches: dict[tuple[int, int, int, bool], Reach] = {}
        self._sends = Sends(problem)
        # as `unit_seconds`, shared by the lanes, by kind and rows
        self.pace: dict[tuple[int, int], tuple[float, ...]] = {
            (number, rows): tuple(seconds / kind.lanes for seconds in unit_seconds(timing))
            for number, kind in enumerate(problem.kinds)
            for rows, timing in kind.timings.items()
        }
        self._total_speed = sum(
            n * s for n, s in zip(problem.capacity, problem.group_speeds, strict=True)
        )
        self._stage_speeds = [
            kind.width * problem.group_speeds[place]
            for kind, place in zip(problem.kinds, problem.places, strict=True)
        ]

    def lanes(self, kinds: Sequence[int]) -> tuple[int, ...]:
        """Return the lanes of stages of these kinds."""
        return tuple(self.problem.kinds[kind].lanes for kind in kinds)

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
        if problem.layers_differ:
            return self._cut_unequal(kinds, rows)
        unit_s, start_s, caps = [], [], []
        windows = lane_windows(self.lanes(kinds))
        for index, kind in enumerate(kinds):
            layer_s, embedding_s, head_s = self.pace[kind, rows]
            unit_s.append(layer_s)
            start_s.append(layer_s + embedding_s * (index == 0) + head_s * (index == size - 1))
            caps.append(self.cap(kind, rows, window=windows[index], first=index == 0) - 1)
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

    def _cut_unequal(self, kinds: Sequence[int], rows: int) -> Cut | None:
        """Return the exact split of layers that differ."""
        windows = lane_windows(self.lanes(kinds))
        stages = [
            self.reach(kind, rows, window=window, first=i == 0)
            for i, (kind, window) in enumerate(zip(kinds, windows, strict=True))
        ]
        layers = split_ranges(stages, least=1)
        if layers is None:
            self.dropped_for_memory += 1
            return None
        cuts = tuple(pairwise(accumulate(layers, initial=0)))
        seconds = [stage.seconds(*cut) for stage, cut in zip(stages, cuts, strict=True)]
        full = any(stage.is_full(*cut) for stage, cut in zip(stages, cuts, strict=True))
        return Cut(layers=layers, cycle_s=max(seconds), memory_bound=full)

    def reach(self, kind: int, rows: int, *, window: int, first: bool) -> Reach:
        """Return what any range of layers takes, shared by its lanes, and weighs on a stage; remembered.

        Window 1 is that of the last stage, here and below.
        """
        key = (kind, rows, window, first)
        if key not in self._reaches:
            problem = self.problem
            way = problem.kinds[kind]
            part_s = [seconds / way.lanes for seconds in part_seconds(way.timings[rows])]
            _, embedding_s, head_s = self.pace[kind, rows]
            spare = self.spare_bytes(kind, rows, window=window, first=first)
            runs = arch.layer_runs(problem.model)
            load = self._load(kind, rows, window)
            weights = [layer_bytes(problem.model, run, problem.dtype, load) for run in runs]
            again = [again_bytes(run, problem.dtype, load) for run in runs]
            self._reaches[key] = Reach(
                sums=_sums(runs, part_s),
                start_s=embedding_s * first + head_s * (window == 1),
                weights=_sums(runs, weights),
                cap=_ENDLESS if spare is None else spare + max(again),
                peaks=_each(runs, again) if load.recompute else (),
            )
        return self._reaches[key]

    def promise(self, kinds: Sequence[int], rows: int, cut: Cut) -> float:
        """Return the share of its devices' speed that a shape uses, by its slowest stage and its bubble."""
        speed = sum(self._stage_speeds[kind] for kind in kinds)
        count = self._typical_microbatches(kinds, rows)
        lanes = self.lanes(kinds)
        return rows / (cut.cycle_s * speed) * count / (count + sum(lanes) - max(lanes))

    def finish(
        self, kinds: Sequence[int], layers: Sequence[int], rows: int, *, memory_bound: bool
    ) -> Shape:
        """Return a shape with these layers and its straight line, whether or not it fits."""
        problem = self.problem
        sums = problem.parameter_sums
        stages = []
        lanes = self.lanes(kinds)
        optimizer_s = 0.0
        for kind, piece in zip(kinds, pieces(layers), strict=True):
            timing = problem.kinds[kind].timings[rows]
            tp = problem.kinds[kind].tp
            stages.append(stage_seconds(timing, piece))
            if piece.has_embedding or piece.has_head:
                parameters = stage_parameters(problem.model, piece, tp=tp)
            else:
                first = piece.first_layer
                parameters = -(-(sums[first + piece.num_layers] - sums[first]) // tp)
            parameters = -(-parameters // max(1, problem.shards))
            update_s = problem.kinds[kind].optimizer_s_per_parameter * parameters
            optimizer_s = max(optimizer_s, update_s)
        work_s = [sum(seconds) / own for seconds, own in zip(stages, lanes, strict=True)]
        use = self._use(kinds)
        most = min(have // n for have, n in zip(problem.capacity, use, strict=True) if n)
        sends = self._sends.of(kinds, rows, most_replicas=most)
        typical = self._typical_microbatches(kinds, rows)
        end_s = _end_without_links(stages, lanes, typical) + 2 * sum(sends)
        cycle_s = max(work_s)
        fill_s = end_s - typical * cycle_s
        if max(lanes) == 1 and problem.num_devices <= MOST_LINKED:
            wide = self._holds_more(kinds, layers, rows)
            cycle_s = linked_cycle_s(work_s, sends, share=passed_share(problem), wide=wide)
        return Shape(
            kinds=tuple(kinds),
            lanes=lanes,
            layers=tuple(layers),
            rows=rows,
            use=use,
            cycle_s=cycle_s,
            fill_s=fill_s,
            optimizer_s=optimizer_s,
            memory_bound=memory_bound,
        )

    def _holds_more(self, kinds: Sequence[int], layers: Sequence[int], rows: int) -> bool:
        """Whether one more microbatch on every link fits; layers that differ are taken to fit."""
        last = len(kinds) - 1
        return self.problem.layers_differ or all(
            count <= self.cap(kind, rows, window=2 * (last - index) + 1, first=index == 0)
            for index, (kind, count) in enumerate(zip(kinds, layers, strict=True))
        )

    def _use(self, kinds: Sequence[int]) -> tuple[int, ...]:
        """Return devices per group of stages of these kinds."""
        use = [0] * len(self.problem.groups)
        for kind in kinds:
            use[self.problem.places[kind]] += self.problem.kinds[kind].width
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
        held = self._held(kind, window, rows)
        return stage_memory(problem, kind, piece, rows=rows, window=held)

    def _load(self, kind: int, rows: int, window: int) -> Load:
        """Return what a stage of this kind works on."""
        return stage_load(self.problem, kind, rows=rows, window=self._held(kind, window, rows))

    def cap(self, kind: int, rows: int, *, window: int, first: bool) -> int:
        """Return how many layers a stage can hold, -1 where not even none; remembered."""
        key = (kind, rows, window, first)
        if key not in self._caps:
            spare, each = self._room(kind, rows, window=window, first=first)
            most = self.problem.model.num_layers
            if spare is not None:
                most = -1 if spare < 0 else min(most, spare // each)
            self._caps[key] = most
        return self._caps[key]

    def _room(self, kind: int, rows: int, *, window: int, first: bool) -> tuple[int | None, int]:
        """Return what a stage has left for layers, and what a layer takes.

        Both fall and grow by as much for every microbatch more in flight, so that of most windows neither is asked for.
        """
        held = self._held(kind, window, rows)
        if window <= 3 or held <= 3 or self.problem.layers_differ:
            spare = self.spare_bytes(kind, rows, window=window, first=first)
            return spare, self.layer_bytes(kind, rows, window=window)
        key = (kind, rows, first)
        if key not in self._rooms:
            self._rooms[key] = [
                self._room(kind, rows, window=window, first=first) for window in (2, 3)
            ]
        (spare_2, each_2), (spare_3, each_3) = self._rooms[key]
        if spare_2 is None or spare_3 is None:
            return None, each_2
        more = held - 2
        return spare_2 + more * (spare_3 - spare_2), each_2 + more * (each_3 - each_2)

    def spare_bytes(self, kind: int, rows: int, *, window: int, first: bool) -> int | None:
        """Return what a stage has left for layers; None: no limit is known."""
        limit = self.problem.kinds[kind].limit_bytes
        if limit is None:
            return None
        empty = Piece(first_layer=0, num_layers=0, has_embedding=first, has_head=window == 1)
        return limit - self._bytes(kind, empty, rows, window)

    def layer_bytes(self, kind: int, rows: int, *, window: int) -> int:
        """Return what one more layer, the heaviest where they differ, adds to a stage with this window."""
        problem = self.problem
        load = self._load(kind, rows, window)
        runs = arch.layer_runs(problem.model)
        return max(layer_bytes(problem.model, run, problem.dtype, load) for run in runs)

    def _held(self, kind: int, window: int, rows: int) -> int:
        """Return how many microbatches can be in flight on a lane: no more than it gets of the batch."""
        return min(window, -(-self.problem.batch_rows // (rows * self.problem.kinds[kind].lanes)))

    def _typical_microbatches(self, kinds: Sequence[int], rows: int) -> int:
        """Return about how many microbatches such a replica gets: its share of the summed speed."""
        share = sum(self._stage_speeds[kind] for kind in kinds) / self._total_speed
        return max(1, round(self.problem.batch_rows * share / rows))


T = TypeVar("T", int, float)


def _sums(runs: Sequence[LayerCount], values: Sequence[T]) -> tuple[T, ...]:
    """Return the sums over the first n layers of a value that each run's layers have."""
    return tuple(accumulate(_each(runs, values), initial=values[0] - values[0]))


def _each(runs: Sequence[LayerCount], values: Sequence[T]) -> tuple[T, ...]:
    """Return for every layer the value of its run."""
    pairs = zip(runs, values)  # noqa: B905 - seconds go on with embedding and head
    return tuple(value for run, value in pairs for _ in range(run.num_layers))


def stage_load(problem: Problem, kind: int, *, rows: int, window: int) -> Load:
    """Return what a stage of a kind works on, as the memory model sees it."""
    way = problem.kinds[kind]
    return Load(
        rows=rows,
        seq_len=problem.seq_len,
        window=window,
        tp=way.tp,
        recompute=way.recompute,
        shards=max(1, problem.shards),
    )


def stage_memory(problem: Problem, kind: int, piece: Piece, *, rows: int, window: int) -> int:
    """Return the bytes of a stage of a kind that updates its share of what it holds; remembered."""
    has = piece.has_embedding, piece.has_head
    key = (kind, rows, window, piece.first_layer, piece.num_layers, *has)
    if key not in problem.bytes_cache:
        load = stage_load(problem, kind, rows=rows, window=window)
        problem.bytes_cache[key] = stage_bytes(problem.model, problem.dtype, piece, load)
    return problem.bytes_cache[key]


def _end_without_links(
    stages: Sequence[tuple[float, float]], lanes: Sequence[int], num_microbatches: int
) -> float:
    """Return when plain 1F1B ends with free links: exact for balanced stages, 0.2 % off for random ones of one lane."""
    windows = lane_windows(lanes)
    rest_s = sum(forward_s + backward_s for forward_s, backward_s in stages)
    before_s = end_s = 0.0
    for index, (forward_s, backward_s) in enumerate(stages):
        rest_s -= forward_s + backward_s
        own = -(-num_microbatches // lanes[index])
        ahead = min(windows[index], own) - 1
        gap_s = max(0.0, rest_s - ahead * forward_s), max(0.0, rest_s - ahead * backward_s)
        waits_s = sum(gap_s) if own > ahead + 1 else max(gap_s)
        end_s = max(end_s, before_s + own * (forward_s + backward_s) + waits_s)
        before_s += forward_s + backward_s
    return end_s
