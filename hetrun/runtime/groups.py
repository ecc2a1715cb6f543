"""Process groups of one rank, created in one order on all ranks, and the objects that talk over them.

It is gloo over host memory, which every device can reach, but for the ranks that share layers: these have one vendor. What is said over it is left to
`engine.py` and `sync.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hetrun.arch import BYTES_PER_PARAMETER
from hetrun.model import UNHURRIED_S, Plan, RankPlan, StagePlan
from hetrun.runtime.addition import LevelGroups
from hetrun.runtime.boundary import Receiver, Route, Sender
from hetrun.runtime.engine import Neighbours
from hetrun.runtime.network import Stage
from hetrun.runtime.precision import ACTIVATION_DTYPE
from hetrun.runtime.segments import (
    BucketGroup,
    Holding,
    SegmentGroup,
    counted_parameters,
    segments_of,
)
from hetrun.runtime.sharded import ShardedSync
from hetrun.runtime.sums import GLOO, backend_of
from hetrun.runtime.sync import GradientSync
from hetrun.runtime.tensor_parallel import Share, shared_dims
from hetrun.schedule.islands import two_levels
from hetrun.schedule.pipeline import ActionKind
from hetrun.schedule.portions import Lane, Portion, lanes_by_rank, portions
from hetrun.schedule.replica import ReplicaRun
from hetrun.schedule.step import SCALAR_BYTES, shares_update
from hetrun.schedule.sync import Bucket, Part, all_reduce_s, gradient_buckets, lane_ranks

log = logging.getLogger(__name__)

_MIN_TIMEOUT_S = 60.0
_STEPS_OF_PATIENCE = 20


def collective_timeout(plan: Plan) -> timedelta:
    """How long a rank waits for another one in training; never torch's 30 minutes.

    Twenty planned steps where the plan's seconds are real; the recipe's own limit where they are modelled.
    """
    if plan.emulated:
        limit_s = plan.recipe.launch.step_timeout_s or UNHURRIED_S
        return timedelta(seconds=max(_MIN_TIMEOUT_S, limit_s))
    return timedelta(seconds=max(_MIN_TIMEOUT_S, _STEPS_OF_PATIENCE * plan.split.cost.step_s))


PortionGroup = tuple[Portion, dist.ProcessGroup, LevelGroups | None]


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The process groups of one rank."""

    forward: dist.ProcessGroup | None  # None in a replica of one stage
    backward: dist.ProcessGroup | None
    buckets: tuple[tuple[Bucket, tuple[PortionGroup, ...]], ...]  # those that this rank is part of
    all_buckets: tuple[Bucket, ...]
    lane: tuple[int, ...]  # ranks that share layers with this one, itself among them
    share: Share  # of the layers


def create_groups(plan: Plan, rank: RankPlan) -> Groups:
    """Create all groups of the plan, in the same order on every rank.

    Every rank walks through all groups, its own or not, since torch numbers them. The option that spares this
    (`use_local_synchronization`) names a group after the number of groups that a rank is in, which differs
    between the members here: they wait for each other under different names until the timeout.
    """
    split = plan.split
    pipelines: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
    for number, replica in enumerate(split.replicas):
        members = [rank for stage in replica.stages for rank in stage.ranks]
        if len(replica.stages) > 1:
            pipelines[number] = (_new_group(plan, members), _new_group(plan, members))
    shares: dict[Lane, dist.ProcessGroup] = {}
    lanes = lanes_by_rank(split.replicas)
    for lane in sorted(set(lanes.values())):
        if len(lane) > 1:
            backend = backend_of(split.ranks[lane[0]])
            shares[lane] = _new_group(plan, lane, backend=backend)
            if rank.rank in lane:
                log.info("ranks %s share layers over %s", lane, backend)
    all_buckets = gradient_buckets(
        split.ranks,
        split.replicas,
        plan.recipe.model,
        BYTES_PER_PARAMETER[plan.recipe.train.dtype],
    )
    buckets: list[tuple[Bucket, tuple[PortionGroup, ...]]] = []
    levels = _Levels(plan, rank)
    for bucket in all_buckets:
        groups = [(p, _new_group(plan, p.ranks), levels.of(p)) for p in portions(bucket, lanes)]
        mine = tuple(item for item in groups if rank.rank in item[0].ranks)
        if mine:
            buckets.append((bucket, mine))
    forward, backward = pipelines.get(rank.replica, (None, None))
    lane = lanes[rank.rank]
    return Groups(
        forward=forward,
        backward=backward,
        buckets=tuple(buckets),
        all_buckets=all_buckets,
        lane=lane,
        share=Share(lane.index(rank.rank), len(lane), shares.get(lane)),
    )


class _Levels:
    """Creates the groups inside and between vendors of one rank's sums; equal ones once, in one order on all ranks."""

    def __init__(self, plan: Plan, rank: RankPlan) -> None:
        self._plan = plan
        self._rank = rank.rank
        self._vendors = {other.rank: other.vendor for other in plan.split.ranks}
        self._known: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, portion: Portion) -> LevelGroups | None:
        """The groups of a portion; None where it needs one level alone, or its updates are shared out."""
        levels = two_levels(portion.ranks, self._vendors)
        if levels is None or shares_update(self._plan.split.replicas):
            return None
        inside = {island: self._group(island) for island in levels.islands if len(island) > 1}
        between = [(item, self._group(item.ranks)) for item in levels.exchanges]
        if self._rank not in portion.ranks:
            return None
        island = next(island for island in levels.islands if self._rank in island)
        return LevelGroups(
            inside=inside.get(island),
            size=len(island),
            between=tuple(
                (item.start, item.end, group) for item, group in between if self._rank in item.ranks
            ),
            start=island.index(self._rank) * levels.of // len(island),
            of=levels.of,
        )

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if ranks not in self._known:
            self._known[ranks] = _new_group(self._plan, ranks)
        return self._known[ranks]


def connect_neighbours(
    plan: Plan, rank: RankPlan, groups: Groups, *, run: ReplicaRun, device: torch.device
) -> Neighbours:
    """Routes to all lanes of the stages before and after: activations in one group, gradients in another.

    Ranks that share layers all have the whole of both. Where a lane gives something to another, place k of the other gets
    it from place k modulo the number of givers.
    """
    forward, backward = groups.forward, groups.backward
    if forward is None or backward is None:
        return Neighbours()
    stages = plan.split.replicas[rank.replica].stages
    before = stages[rank.stage - 1] if rank.stage else None
    after = stages[rank.stage + 1] if rank.stage + 1 < len(stages) else None
    dtype = ACTIVATION_DTYPE[plan.recipe.train.dtype]
    place, tp = groups.share.place, groups.share.size

    def route(group: dist.ProcessGroup, peer: int, what: str) -> Route:
        return Route(group, peer, what, _shape(plan, rank), dtype, device)

    def receivers(group: dist.ProcessGroup, end: StagePlan | None, what: str) -> list[Receiver]:
        lanes = lane_ranks(end) if end else ()
        return [Receiver(route(group, lane[place % len(lane)], what)) for lane in lanes]

    def senders(group: dist.ProcessGroup, end: StagePlan | None, what: str) -> list[Sender]:
        lanes = lane_ranks(end) if end else ()
        return [Sender(*(route(group, peer, what) for peer in lane[place::tp])) for lane in lanes]

    return Neighbours(
        activations_in=tuple(receivers(forward, before, "activation")),
        activations_out=tuple(senders(forward, after, "activation")),
        gradients_in=tuple(receivers(backward, after, "gradient")),
        gradients_out=tuple(senders(backward, before, "gradient")),
        gradients_had=_gradients_had(run, rank, stages[rank.stage]) if before else {},
        send_before_s=before.send_s if before else 0.0,
    )


def connect_sync(plan: Plan, rank: RankPlan, groups: Groups, *, stage: Stage) -> GradientSync:
    """Gradient sums of the buckets that this rank is part of, with their planned seconds."""
    ranks, links = plan.split.ranks, plan.links
    lane = groups.lane
    holding = Holding(stage.units(), shared_dims(stage), stage.boxes)

    def planned_s(bucket: Bucket) -> float:
        members = [ranks[member] for member in bucket.ranks]
        return all_reduce_s(bucket.num_bytes, members, links, at_once=bucket.tp)

    def segment_group(
        bucket: Bucket, portion: Portion, group: dist.ProcessGroup, levels: LevelGroups | None
    ) -> SegmentGroup:
        segments = tuple(segments_of(bucket, portion, holding))
        copies = len(lane) // bucket.tp if bucket.part is Part.COPIES else 1
        return SegmentGroup(group, portion.ranks, segments, copies, levels)

    buckets = [
        BucketGroup(
            bucket, tuple(segment_group(bucket, *item) for item in items), planned_s(bucket)
        )
        for bucket, items in groups.buckets
    ]
    for bucket in buckets:
        bucket.check_bytes(len(lane))
    counted = counted_parameters(holding, buckets=groups.all_buckets, lane=lane, rank=rank.rank)
    scalar_planned_s = all_reduce_s(SCALAR_BYTES, ranks, links)
    if shares_update(plan.split.replicas):
        return ShardedSync(
            holding,
            buckets=buckets,
            lane=lane,
            rank=rank.rank,
            counted=counted,
            scalar_planned_s=scalar_planned_s,
        )
    return GradientSync(
        stage.parameters(), buckets=buckets, counted=counted, scalar_planned_s=scalar_planned_s
    )


def _shape(plan: Plan, rank: RankPlan) -> tuple[int, int, int]:
    """Of what one microbatch of the rank's replica sends over a cut."""
    rows = plan.split.replicas[rank.replica].microbatch_rows
    return rows, plan.recipe.data.seq_len, plan.recipe.model.hidden_size


def _gradients_had(run: ReplicaRun, rank: RankPlan, stage: StagePlan) -> dict[int, int]:
    """Return for each microbatch of a rank the last whose gradient its sender had from the rank by that forward.

    Those that had none by then are left out. A lane takes its microbatches in ascending order, so the last stands
    for all before it.
    """
    number = stage.ranks.index(rank.rank) * stage.lanes // len(stage.ranks)
    had: dict[int, int] = {}
    for sender in run.lanes[rank.stage - 1]:
        last: int | None = None
        for action in sender.actions:
            if action.microbatch % stage.lanes != number:
                continue
            if action.kind is ActionKind.BACKWARD:
                last = action.microbatch
            elif action.kind is ActionKind.FORWARD and last is not None:
                had[action.microbatch] = last
    return had


def _new_group(plan: Plan, ranks: Sequence[int], *, backend: str = GLOO) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks), backend=backend, timeout=collective_timeout(plan))
    return group
