"""One optimizer step of all ranks on one clock: pipelines, gradient sync, optimizer. The clock of emulated runs follows it.

All ranks start at 0. After its pipeline a rank takes part in its buckets in global order: a bucket starts when
its last member is free and frees all of them when it ends. Then one small all-reduce joins all ranks (loss,
token count, gradient norm), each rank runs its optimizer, and the slowest ends the step.

Where the holders of a parameter share out its update (ZeRO stage 1), a bucket's gradients are reduce-scattered in that
place: the first half of an all-reduce. The second half, an all-gather of the new parameters, follows the optimizer,
again in global order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from hetrun import arch
from hetrun.model import Cost, Dtype, Link, ModelSpec, RankPlan, ReplicaPlan, Span, StagePlan
from hetrun.schedule.pipeline import StageTimes
from hetrun.schedule.portions import lanes_by_rank
from hetrun.schedule.replica import is_plain, layers_of, replica_ends, simulate_replica, work_of
from hetrun.schedule.sync import all_reduce_s, gradient_buckets, lane_ranks

KnownEnds = dict[tuple[object, ...], tuple[tuple[float, ...], ...]]  # of replicas played so far
_FIGURES = attrgetter(  # all that decides when a stage is done
    *("forward_s", "backward_s", "weights_s", "send_s"),
    *("layer_forward_s", "layer_backward_s", "layer_weights_s"),
    *("first_layer", "num_layers", "window", "most_held", "lanes"),
)
SCALAR_BYTES = 24  # loss, token count and squared gradient norm, fp64 each


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """A simulated step; the per-rank tuples are in order of rank."""

    cost: Cost
    rank_spans: tuple[tuple[Span, ...], ...]
    peak_activations: tuple[int, ...]


@dataclass(slots=True)
class _Record:
    """What happened to each rank so far."""

    clocks: list[float]
    spans: list[list[Span]] | None  # None: only clocks are wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marks:
    """When all ranks have summed up their gradients, updated their parameters, and have those of others too."""

    synced_s: float
    updated_s: float
    step_s: float


def stage_times(stage: StagePlan | StageTimes) -> StageTimes:
    """Return what the event simulation needs to know of a stage."""
    return StageTimes(
        forward_s=stage.forward_s,
        backward_s=stage.backward_s,
        send_s=stage.send_s,
        window=stage.window,
    )


def simulate_step(
    ranks: Sequence[RankPlan],
    replicas: Sequence[ReplicaPlan],
    links: Sequence[Link],
    model: ModelSpec,
    dtype: Dtype,
) -> StepRun:
    """Simulate a step and say what every rank does when.

    Raises:
        ConfigError: a link that the step needs has no figures.
    """
    record = _Record([0.0] * len(ranks), [[] for _ in ranks])
    peaks = [0] * len(ranks)
    ends: list[float] = []
    for replica in replicas:
        run = simulate_replica(replica)
        ends.append(run.end_s)
        for stage, lanes in zip(replica.stages, run.lanes, strict=True):
            for members, lane in zip(lane_ranks(stage), lanes, strict=True):
                spans = [
                    Span(
                        kind=a.kind.value, microbatch=a.microbatch, start_s=a.start_s, end_s=a.end_s
                    )
                    for a in lane.actions
                ]
                for rank in members:
                    record.clocks[rank] = lane.end_s
                    _spans(record, rank).extend(spans)
                    peaks[rank] = lane.peak_activations
    marks = _finish(record, ranks, replicas, links=links, model=model, dtype=dtype)
    return StepRun(
        cost=_cost(replicas, ends, marks, known={}),
        rank_spans=tuple(tuple(_spans(record, rank)) for rank in range(len(ranks))),
        peak_activations=tuple(peaks),
    )


def step_cost(
    ranks: Sequence[RankPlan],
    replicas: Sequence[ReplicaPlan],
    *,
    links: Sequence[Link],
    model: ModelSpec,
    dtype: Dtype,
    known: KnownEnds | None = None,
) -> Cost:
    """Return the cost that `simulate_step` finds, without its record; pipelines in `known` are not played again."""
    known = {} if known is None else known
    ends, marks = _played(ranks, replicas, links=links, model=model, dtype=dtype, known=known)
    return _cost(replicas, ends, marks, known=known)


def step_seconds(
    ranks: Sequence[RankPlan],
    replicas: Sequence[ReplicaPlan],
    *,
    links: Sequence[Link],
    model: ModelSpec,
    dtype: Dtype,
    known: KnownEnds,
) -> float:
    """Return the seconds that `step_cost` finds, without their parts: half as many pipelines to play."""
    played = _played(ranks, replicas, links=links, model=model, dtype=dtype, known=known)
    return played[1].step_s


def _played(
    ranks: Sequence[RankPlan],
    replicas: Sequence[ReplicaPlan],
    *,
    links: Sequence[Link],
    model: ModelSpec,
    dtype: Dtype,
    known: KnownEnds,
) -> tuple[list[float], _Marks]:
    """Return when each replica's pipeline ends, and when all have done what."""
    record = _Record([0.0] * len(ranks), None)
    ends: list[float] = []
    for replica in replicas:
        stage_ends = known_ends(replica, known)
        ends.append(max(map(max, stage_ends)))
        for stage, lane_ends in zip(replica.stages, stage_ends, strict=True):
            for members, end_s in zip(lane_ranks(stage), lane_ends, strict=True):
                for rank in members:
                    record.clocks[rank] = end_s
    return ends, _finish(record, ranks, replicas, links=links, model=model, dtype=dtype)


def known_ends(replica: ReplicaPlan, known: KnownEnds) -> tuple[tuple[float, ...], ...]:
    """Return when the lanes of a replica are done, played at most once."""
    key = (replica.order, replica.cuts, replica.num_microbatches, *map(_FIGURES, replica.stages))
    if key not in known:
        known[key] = replica_ends(replica)
    return known[key]


def end_s(replica: ReplicaPlan, known: KnownEnds) -> float:
    """Return when the last lane of a replica is done, played at most once."""
    return max(map(max, known_ends(replica, known)))


def waiting_s(replicas: Sequence[ReplicaPlan], known: KnownEnds) -> float:
    """Return how long the busiest lane of the slowest pipeline waits: `bubble_s` and `p2p_s` of its cost together."""
    ends = [end_s(replica, known) for replica in replicas]
    return max(0.0, max(ends) - busy_s(replicas[ends.index(max(ends))]))


def busy_s(replica: ReplicaPlan) -> float:
    """Return the computing seconds of the busiest lane of a replica."""
    if is_plain(replica):
        return replica.num_microbatches * max(s.forward_s + s.backward_s for s in replica.stages)
    busiest = 0.0
    for index, stage in enumerate(replica.stages):
        busy = [0.0] * stage.lanes
        known: dict[int, float] = {}
        for microbatch in range(replica.num_microbatches):
            count = len(layers_of(replica, index, microbatch))
            if count not in known:
                known[count] = sum(work_of(stage, count))
            busy[microbatch % stage.lanes] += known[count]
        busiest = max(busiest, *busy)
    return busiest


def _spans(record: _Record, rank: int) -> list[Span]:
    """Return the spans of a rank of a record that keeps them."""
    if record.spans is None:
        raise ValueError("this record keeps no spans")
    return record.spans[rank]


def update_s(
    ranks: Sequence[RankPlan],
    replicas: Sequence[ReplicaPlan],
    *,
    links: Sequence[Link],
    model: ModelSpec,
    dtype: Dtype,
) -> float:
    """Return the seconds from the exchange of scalars, which all ranks leave together, to the end of the step."""
    record = _Record([0.0] * len(ranks), None)
    updated_s = _optimize(record, replicas)
    if not shares_update(replicas):
        return updated_s
    return _gather(record, _meetings(ranks, replicas, links=links, model=model, dtype=dtype))


def shares_update(replicas: Sequence[ReplicaPlan]) -> bool:
    """Whether those that hold a parameter share out its update."""
    return replicas[0].zero > 0


_Meeting = tuple[tuple[int, ...], float]  # ranks, seconds of an all-reduce of theirs


def _finish(
    record: _Record,
    ranks: Sequence[RankPlan],
    replicas: Sequence[ReplicaPlan],
    *,
    links: Sequence[Link],
    model: ModelSpec,
    dtype: Dtype,
) -> _Marks:
    """Let all ranks sum up their gradients and update their parameters; say when all were done with what."""
    meetings = _meetings(ranks, replicas, links=links, model=model, dtype=dtype)
    if record.spans is not None:
        meetings = _with_mates(meetings, replicas)
    shares = shares_update(replicas)
    for members, seconds in meetings:
        _meet(record, members, seconds / 2 if shares else seconds)
    _meet(record, tuple(range(len(ranks))), all_reduce_s(SCALAR_BYTES, ranks, links))
    synced_s = max(record.clocks)
    updated_s = _optimize(record, replicas)
    step_s = _gather(record, meetings) if shares else updated_s
    return _Marks(synced_s=synced_s, updated_s=updated_s, step_s=step_s)


def _meetings(
    ranks: Sequence[RankPlan],
    replicas: Sequence[ReplicaPlan],
    *,
    links: Sequence[Link],
    model: ModelSpec,
    dtype: Dtype,
) -> list[_Meeting]:
    """Return who all-reduces for how long, in global order."""
    buckets = gradient_buckets(ranks, replicas, model, arch.BYTES_PER_PARAMETER[dtype])
    return [
        (
            bucket.ranks,
            all_reduce_s(
                bucket.num_bytes, [ranks[r] for r in bucket.ranks], links, at_once=bucket.tp
            ),
        )
        for bucket in buckets
    ]


def _with_mates(meetings: Sequence[_Meeting], replicas: Sequence[ReplicaPlan]) -> list[_Meeting]:
    """Name all ranks of the lanes that meet: one of those that share layers stands for all, who do alike at the same time."""
    lanes = lanes_by_rank(replicas)
    return [
        (tuple(sorted({mate for rank in members for mate in lanes[rank]})), seconds)
        for members, seconds in meetings
    ]


def _meet(record: _Record, members: Sequence[int], seconds: float) -> None:
    """Let ranks talk together, from when the last of them is there."""
    start_s = max(record.clocks[rank] for rank in members)
    end_s = start_s + seconds
    for rank in members:
        record.clocks[rank] = end_s
        if record.spans is not None and len(members) > 1:
            span = Span(kind="sync", microbatch=None, start_s=start_s, end_s=end_s)
            record.spans[rank].append(span)


def _gather(record: _Record, meetings: Sequence[_Meeting]) -> float:
    """Let all ranks tell each other what they updated; return when all are done."""
    for members, seconds in meetings:
        _meet(record, members, seconds / 2)
    return max(record.clocks)


def _optimize(record: _Record, replicas: Sequence[ReplicaPlan]) -> float:
    """Let every rank update its parameters; return when the slowest is done."""
    for replica in replicas:
        for stage in replica.stages:
            for rank in stage.ranks:
                start_s = record.clocks[rank]
                record.clocks[rank] = start_s + stage.optimizer_s
                if record.spans is not None:
                    end_s = record.clocks[rank]
                    span = Span(kind="optimizer", microbatch=None, start_s=start_s, end_s=end_s)
                    record.spans[rank].append(span)
    return max(record.clocks)


def _cost(
    replicas: Sequence[ReplicaPlan], ends: Sequence[float], marks: _Marks, *, known: KnownEnds
) -> Cost:
    """Split the step of the slowest replica into parts.

    Compute is the busy time of its busiest lane; p2p is what the same pipeline would save with free links
    (greedy orders can be a hair slower with faster links: then it is 0); bubble is the rest of its pipeline.
    """
    pipeline_s = max(ends)
    slowest = replicas[list(ends).index(pipeline_s)]
    compute_s = busy_s(slowest)
    p2p_s = 0.0
    if any(stage.send_s > 0 for stage in slowest.stages[:-1]):
        free = replace(
            slowest, stages=tuple(replace(stage, send_s=0.0) for stage in slowest.stages)
        )
        p2p_s = max(0.0, pipeline_s - end_s(free, known))
    return Cost(
        step_s=marks.step_s,
        compute_s=compute_s,
        bubble_s=max(0.0, pipeline_s - compute_s - p2p_s),
        p2p_s=p2p_s,
        sync_s=marks.synced_s - pipeline_s + (marks.step_s - marks.updated_s),
        optimizer_s=marks.updated_s - marks.synced_s,
    )
