"""From replica shapes to ranks: which device takes which stage, and what each stage costs there. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import groupby, product
from typing import Any

from hetrun import arch
from hetrun.model import Cost, Order, RankPlan, ReplicaPlan, RowTiming, StagePlan
from hetrun.planner.cost import (
    Crossings,
    Piece,
    send_seconds,
    stage_parameters,
    stage_seconds,
    weights_seconds,
)
from hetrun.planner.kinds import UNKNOWN_MODEL, Seat
from hetrun.planner.memory import stage_bytes
from hetrun.planner.owners import Owners
from hetrun.planner.problem import Problem
from hetrun.planner.shapes import Shape, pieces, stage_load, stage_memory
from hetrun.schedule import held_layers, step_cost, step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a replica works through its microbatches; the default is plain 1F1B over whole layers."""

    order: Order = Order.ONE_F_ONE_B
    most_held: tuple[int, ...] = ()  # zero bubble: of each stage, microbatches between F and W
    cuts: tuple[float, ...] = ()  # real ones; none: at the shape's layers

    @property
    def is_plain(self) -> bool:
        """Whether strict 1F1B over whole layers is meant."""
        return self.order is Order.ONE_F_ONE_B and not self.cuts


PLAIN = Style()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One replica before it has devices: its shape, the window of each stage, its microbatches and how they run."""

    shape: Shape
    windows: tuple[int, ...]
    num_microbatches: int
    style: Style = PLAIN


Places = Sequence[Sequence[tuple[Seat, ...]]]  # devices per replica and stage


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Replicas on devices, with the simulated seconds of a step."""

    problem: Problem = field(repr=False)
    ranks: tuple[RankPlan, ...]
    replicas: tuple[ReplicaPlan, ...]
    step_s: float

    @cached_property
    def cost(self) -> Cost:
        """The seconds in parts; few layouts are asked for them."""
        return step_cost(self.ranks, self.replicas, **_world(self.problem))


def lay_out(problem: Problem, drafts: Sequence[Draft], seats: Places | None = None) -> Layout:
    """Give every stage its devices (the next free ones, blocks whole inside a host where that works) and ranks."""
    places = seats if seats is not None else place(problem, drafts)
    order = sorted(
        (seat.host_number, seat.device.index, replica, stage)
        for replica, stages in enumerate(places)
        for stage, held in enumerate(stages)
        for seat in held
    )
    seat_at = {
        (seat.host_number, seat.device.index): seat
        for stages in places
        for held in stages
        for seat in held
    }
    ranks_of: dict[tuple[int, int], list[int]] = {}
    ranks: list[RankPlan] = []
    for _, members in groupby(order, key=lambda item: item[0]):
        for local_rank, (host, index, replica, stage) in enumerate(members):
            ranks_of.setdefault((replica, stage), []).append(len(ranks))
            seat = seat_at[host, index]
            ranks.append(_rank(seat, len(ranks), local_rank, replica=replica, stage=stage))
    replicas: list[ReplicaPlan] = []
    owners = _owners(problem, drafts) if problem.shards else None
    maker = _StageMaker(problem, _crossings(problem, drafts, places), owners)
    first_row = 0
    for number, draft in enumerate(drafts):
        numbers = [ranks_of[number, stage] for stage in range(draft.shape.num_stages)]
        stages = maker.stages(draft, places[number], numbers)
        replicas.append(
            ReplicaPlan(
                first_row=first_row,
                microbatch_rows=draft.shape.rows,
                num_microbatches=draft.num_microbatches,
                stages=tuple(stages),
                order=draft.style.order,
                cuts=draft.style.cuts,
                zero=int(problem.shards > 0),
            )
        )
        first_row += replicas[-1].num_rows
    step_s = step_seconds(ranks, replicas, **_world(problem))
    return Layout(problem=problem, ranks=tuple(ranks), replicas=tuple(replicas), step_s=step_s)


def _world(problem: Problem) -> dict[str, Any]:
    """Return what a step is simulated with, as keywords."""
    return {
        "links": problem.links,
        "model": problem.model,
        "dtype": problem.dtype,
        "known": problem.known_ends,
    }


def place(problem: Problem, drafts: Sequence[Draft]) -> Places:
    """Choose devices for every stage: largest blocks first, each in the fullest host that still holds it whole."""
    places: list[list[tuple[Seat, ...]]] = [[()] * draft.shape.num_stages for draft in drafts]
    for group, members in enumerate(problem.groups):
        blocks = []
        for replica, draft in enumerate(drafts):
            stages = [i for i, k in enumerate(draft.shape.kinds) if problem.places[k] == group]
            tp = max((problem.kinds[draft.shape.kinds[i]].tp for i in stages), default=1)
            turns = [i for i in stages for _ in range(draft.shape.lanes[i])]  # a lane each
            blocks.append((replica, turns, tp))
        free = FreeSeats(_fewest_hosts(members.seats, sum(len(b[1]) * b[2] for b in blocks)))
        for replica, turns, tp in sorted(blocks, key=lambda b: (-b[2], -len(b[1]) * b[2], b[0])):
            taken = [] if tp > 1 else free.take(len(turns))
            for number, stage in enumerate(turns):
                places[replica][stage] += tuple(free.take(tp)) if tp > 1 else (taken[number],)
    return places


def _fewest_hosts(seats: Sequence[Seat], needed: int) -> list[Seat]:
    """Return the seats of as few hosts as hold `needed` of them: links inside a host are the quick ones."""
    sizes = Counter(seat.host_number for seat in seats)
    chosen: set[int] = set()
    for host in sorted(sizes, key=lambda host: (-sizes[host], host)):
        if needed <= 0:
            break
        chosen.add(host)
        needed -= sizes[host]
    return [seat for seat in seats if seat.host_number in chosen]


class FreeSeats:
    """Free devices of one group, by host; taking some costs the same however many hosts there are."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self._free: dict[int, list[Seat]] = {}
        for seat in reversed(seats):
            self._free.setdefault(seat.host_number, []).append(seat)  # the next one is the last
        self._hosts: dict[int, list[int]] = {}  # by number of free devices: a heap, with stale ones
        for host, held in self._free.items():
            self._hosts.setdefault(len(held), []).append(host)
        for hosts in self._hosts.values():
            heapify(hosts)
        self._any = sorted(self._free)  # hosts that may have free devices, a heap
        self._most = max(self._hosts, default=0)

    def take(self, count: int) -> list[Seat]:
        """Take `count` seats out of one host, the one with the fewest to spare, else from the first ones on."""
        if count == 0:
            return []
        for size in range(count, self._most + 1):
            host = self._first(size)
            if host is not None:
                return self._from(host, count)
        taken: list[Seat] = []
        while len(taken) < count and self._any:
            if not self._free[self._any[0]]:
                heappop(self._any)
                continue
            host = self._any[0]
            taken += self._from(host, min(count - len(taken), len(self._free[host])))
        return taken

    def _first(self, size: int) -> int | None:
        """Return the first host with exactly `size` free devices."""
        hosts = self._hosts.get(size, [])
        while hosts and len(self._free[hosts[0]]) != size:
            heappop(hosts)
        return hosts[0] if hosts else None

    def _from(self, host: int, count: int) -> list[Seat]:
        held = self._free[host]
        taken = [held.pop() for _ in range(count)]
        if held:
            heappush(self._hosts.setdefault(len(held), []), host)
        return taken


def _rank(seat: Seat, rank: int, local_rank: int, *, replica: int, stage: int) -> RankPlan:
    """Return the process that drives one device."""
    device, target = seat.device, seat.target
    visible_id = None
    if target.visible_env is not None:
        number = device.index if device.vendor_index is None else device.vendor_index
        by_uuid = target.visible_by == "uuid" and device.uuid is not None
        visible_id = device.visible_id or (device.uuid if by_uuid else str(number))
    memory = device.memory.value
    return RankPlan(
        rank=rank,
        host=seat.host,
        local_rank=local_rank,
        device_index=device.index,
        vendor=device.vendor,
        model=device.model or UNKNOWN_MODEL,
        replica=replica,
        stage=stage,
        torch_device=target.torch_device,
        torch_plugin=target.torch_plugin,
        visible_env=target.visible_env,
        visible_id=visible_id,
        emulated=device.emulated is not None,
        memory_bytes=None if memory is None else int(memory),
        num_threads=device.num_threads,
        env=dict(target.env),
    )


class _StageMaker:
    """Makes the stages of all replicas; what replicas of one shape share is computed once."""

    def __init__(self, problem: Problem, crossings: Crossings, owners: Owners | None) -> None:
        self._problem = problem
        self._crossings = crossings
        self._owners = owners
        self._shared: dict[tuple[int, tuple[int, ...], Style], list[dict[str, Any]]] = {}
        self._kept: list[Shape] = []  # so that their ids stay theirs

    def stages(
        self, draft: Draft, seats: Sequence[tuple[Seat, ...]], ranks: Sequence[Sequence[int]]
    ) -> Iterator[StagePlan]:
        """Yield the stages of one replica with their seconds and bytes."""
        problem, shape = self._problem, draft.shape
        key = (id(shape), draft.windows, draft.style)
        if key not in self._shared:
            self._kept.append(shape)
            self._shared[key] = list(_shared(problem, draft, self._owners))
        sent = arch.boundary_bytes(problem.model, problem.dtype, shape.rows, problem.seq_len)
        for index, fields in enumerate(self._shared[key]):
            send_s = 0.0
            if not fields["has_head"]:
                pairs = _pairs(problem, shape, index, seats)
                send_s = max(self._send_s(a, b, sent) for a, b in pairs)
            yield StagePlan(ranks=tuple(ranks[index]), send_s=send_s, **fields)

    def _send_s(self, a: Seat, b: Seat, num_bytes: int) -> float:
        at_once = self._crossings.at_once(a.host_number, b.host_number)
        return send_seconds(self._problem.seat_link(a, b), num_bytes, at_once=at_once)


def _crossings(problem: Problem, drafts: Sequence[Draft], places: Places) -> Crossings:
    """Return how many lanes of all replicas share each host's interface."""
    return Crossings(
        [
            [seat.host_number for seat in seats[:: problem.kinds[kind].tp]]
            for kind, seats in zip(draft.shape.kinds, stages, strict=True)
        ]
        for draft, stages in zip(drafts, places, strict=True)
    )


def _owners(problem: Problem, drafts: Sequence[Draft]) -> Owners:
    """Return on how many lanes of all replicas each parameter lives."""
    alike: Counter[tuple[int, tuple[float, ...]]] = Counter()
    shapes = {id(draft.shape): draft.shape for draft in drafts}
    for draft in drafts:
        alike[id(draft.shape), draft.style.cuts] += 1
    lanes: Counter[Piece] = Counter()
    for (number, cuts), count in alike.items():
        shape = shapes[number]
        for piece, own in zip(held_pieces(shape, cuts), shape.lanes, strict=True):
            lanes[piece] += count * own
    return Owners(problem.model, lanes)


def _pairs(
    problem: Problem, shape: Shape, index: int, seats: Sequence[tuple[Seat, ...]]
) -> Iterable[tuple[Seat, Seat]]:
    """Return devices that lanes of a stage send from and those of the next receive on, one of each host."""
    if shape.lanes[index] == shape.lanes[index + 1] == 1:
        return [(seats[index][0], seats[index + 1][0])]
    firsts = [
        {seat.host_number: seat for seat in seats[at][:: problem.kinds[shape.kinds[at]].tp]}
        for at in (index, index + 1)
    ]
    return product(firsts[0].values(), firsts[1].values())


def restyled(problem: Problem, replica: ReplicaPlan, draft: Draft) -> ReplicaPlan:
    """Return what a replica would be on its own devices, were it drafted like this."""
    stages = [
        StagePlan(ranks=stage.ranks, send_s=stage.send_s, **fields)
        for stage, fields in zip(replica.stages, _shared(problem, draft), strict=True)
    ]
    return replace(
        replica,
        num_microbatches=draft.num_microbatches,
        stages=tuple(stages),
        order=draft.style.order,
        cuts=draft.style.cuts,
    )


def held_pieces(shape: Shape, cuts: Sequence[float]) -> tuple[Piece, ...]:
    """Return what each stage holds: its layers, and where cuts are real the boundary layers on both sides."""
    whole = pieces(shape.layers)
    if not cuts:
        return whole
    held = held_layers(cuts, sum(shape.layers))
    return tuple(
        replace(piece, first_layer=first, num_layers=end - first)
        for piece, (first, end) in zip(whole, held, strict=True)
    )


def _shared(
    problem: Problem, draft: Draft, owners: Owners | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the fields of each stage that do not depend on the devices it sits on.

    Where `owners` share out the optimizer's states, memory and update are those of a stage's true part.
    """
    shape, style = draft.shape, draft.style
    for index, piece in enumerate(held_pieces(shape, style.cuts)):
        kind = problem.kinds[shape.kinds[index]]
        timing = kind.timings[shape.rows]
        forward_s, backward_s = stage_seconds(timing, piece)
        held = style.most_held[index] if style.most_held else draft.windows[index]
        if owners is None:
            updated = stage_parameters(problem.model, piece, tp=kind.tp)
            num_bytes = stage_memory(
                problem, shape.kinds[index], piece, rows=shape.rows, window=held
            )
        else:
            updated = owners.updated(piece, tp=kind.tp)
            load = stage_load(problem, shape.kinds[index], rows=shape.rows, window=held)
            num_bytes = stage_bytes(problem.model, problem.dtype, piece, load, updated=updated)
        yield {
            "first_layer": piece.first_layer,
            "num_layers": piece.num_layers,
            "has_embedding": piece.has_embedding,
            "has_head": piece.has_head,
            "window": draft.windows[index],
            "most_held": held if style.most_held else None,
            "forward_s": forward_s,
            "backward_s": backward_s,
            "optimizer_s": kind.optimizer_s_per_parameter * updated,
            "memory_bytes": num_bytes,
            "memory_limit_bytes": kind.limit_bytes,
            "recompute": kind.recompute,
            "lanes": kind.lanes,
            **_apart(timing, piece, style),
        }


def _apart(timing: RowTiming, piece: Piece, style: Style) -> dict[str, float]:
    """Return the seconds of W where it is on its own, and those of one layer where microbatches differ in layers."""
    fields = {}
    splits = style.order is Order.ZERO_BUBBLE
    if splits:
        fields["weights_s"] = weights_seconds(timing, piece)
    if style.cuts:
        fields["layer_forward_s"] = timing.layer_forward_s
        fields["layer_backward_s"] = timing.layer_backward_s
    if style.cuts and splits:
        fields["layer_weights_s"] = timing.layer_weights_s or 0.0
    return fields
