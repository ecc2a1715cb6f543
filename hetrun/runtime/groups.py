"""Process groups of one rank, created in one order on all ranks, and the objects that talk over them.

All of it is gloo over host memory, which every device can reach. What is said over it is left to
`engine.py` and `sync.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hetrun.arch import BYTES_PER_ELEMENT
from hetrun.model import Plan, RankPlan
from hetrun.runtime.boundary import Receiver, Route, Sender
from hetrun.runtime.device import TORCH_DTYPE
from hetrun.runtime.engine import Neighbours
from hetrun.runtime.network import Stage
from hetrun.runtime.sync import BucketGroup, GradientSync, counted_units
from hetrun.schedule.step import SCALAR_BYTES
from hetrun.schedule.sync import Bucket, all_reduce_s, gradient_buckets

_MIN_TIMEOUT_S = 60.0
_STEPS_OF_PATIENCE = 20


def collective_timeout(plan: Plan) -> timedelta:
    """How long a rank waits for another one in training; never torch's 30 minutes.

    Twenty planned steps where the plan's seconds are real; the recipe's own limit where they are modelled.
    """
    if plan.emulated:
        return timedelta(seconds=max(_MIN_TIMEOUT_S, plan.recipe.launch.step_timeout_s))
    return timedelta(seconds=max(_MIN_TIMEOUT_S, _STEPS_OF_PATIENCE * plan.split.cost.step_s))


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The process groups of one rank."""

    forward: dist.ProcessGroup | None  # None in a replica of one stage
    backward: dist.ProcessGroup | None
    buckets: tuple[tuple[Bucket, dist.ProcessGroup], ...]  # those that this rank is part of
    all_buckets: tuple[Bucket, ...]


def create_groups(plan: Plan, rank: RankPlan) -> Groups:
    """Create all groups of the plan, in the same order on every rank.

    Every rank walks through all groups, its own or not, since torch numbers them. The option that spares this
    (`use_local_synchronization`) names a group after the number of groups that a rank is in, which differs
    between the members here: they wait for each other under different names until the timeout.
    """
    split = plan.split
    pipelines: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
    for number, replica in enumerate(split.replicas):
        members = [stage.ranks[0] for stage in replica.stages]
        if len(members) > 1:
            pipelines[number] = (_new_group(plan, members), _new_group(plan, members))
    all_buckets = gradient_buckets(
        split.ranks,
        split.replicas,
        plan.recipe.model,
        BYTES_PER_ELEMENT[plan.recipe.train.dtype],
    )
    buckets = [(bucket, _new_group(plan, bucket.ranks)) for bucket in all_buckets]
    forward, backward = pipelines.get(rank.replica, (None, None))
    return Groups(
        forward=forward,
        backward=backward,
        buckets=tuple(item for item in buckets if rank.rank in item[0].ranks),
        all_buckets=all_buckets,
    )


def connect_neighbours(
    plan: Plan, rank: RankPlan, groups: Groups, *, device: torch.device
) -> Neighbours:
    """Routes to the stages before and after: activations in one group, gradients in another."""
    forward, backward = groups.forward, groups.backward
    if forward is None or backward is None:
        return Neighbours()
    replica = plan.split.replicas[rank.replica]
    members = [stage.ranks[0] for stage in replica.stages]
    recipe = plan.recipe
    shape = (replica.microbatch_rows, recipe.data.seq_len, recipe.model.hidden_size)

    def route(group: dist.ProcessGroup, stage: int, what: str) -> Route:
        dtype = TORCH_DTYPE[recipe.train.dtype]
        return Route(group, members[stage], what, shape, dtype, device)

    before, after = rank.stage - 1, rank.stage + 1
    has_before, has_after = before >= 0, after < len(members)
    return Neighbours(
        activations_in=Receiver(route(forward, before, "activation")) if has_before else None,
        activations_out=Sender(route(forward, after, "activation")) if has_after else None,
        gradients_in=Receiver(route(backward, after, "gradient")) if has_after else None,
        gradients_out=Sender(route(backward, before, "gradient")) if has_before else None,
        window_before=replica.stages[before].window if has_before else 0,
        send_before_s=replica.stages[before].send_s if has_before else 0.0,
    )


def connect_sync(plan: Plan, rank: RankPlan, groups: Groups, *, stage: Stage) -> GradientSync:
    """Gradient sums of the buckets that this rank is part of, with their planned seconds."""
    ranks, links = plan.split.ranks, plan.links
    units = stage.units()

    def planned_s(bucket: Bucket) -> float:
        return all_reduce_s(bucket.num_bytes, [ranks[member] for member in bucket.ranks], links)

    return GradientSync(
        units,
        buckets=[BucketGroup(bucket, group, planned_s(bucket)) for bucket, group in groups.buckets],
        counted=counted_units(units, groups.all_buckets, rank.rank),
        scalar_planned_s=all_reduce_s(SCALAR_BYTES, ranks, links),
    )


def _new_group(plan: Plan, ranks: Sequence[int]) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks), backend="gloo", timeout=collective_timeout(plan))
    return group
