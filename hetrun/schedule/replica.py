"""When each lane of a replica does what: the one door for planner, step simulation and runtime.

Strict 1F1B over whole layers is played by `pipeline.py`, all other orders by `lanes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import sub

from hetrun.model import Order, ReplicaPlan, StagePlan
from hetrun.schedule.cuts import cut_at, cuts_at
from hetrun.schedule.lanes import Lanes, StageWork
from hetrun.schedule.periods import play_skipping
from hetrun.schedule.pipeline import (
    ActionKind,
    StageTimes,
    TimedAction,
    pipeline_ends,
    simulate_pipeline,
)
from hetrun.schedule.rules import Lane

_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHTS)  # as `rules.py` numbers them


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRun:
    """What one lane of a stage does, in order, and the most microbatches whose activations it holds at once."""

    actions: tuple[TimedAction, ...]
    end_s: float
    peak_activations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRun:
    """All lanes of a replica: `lanes[stage][lane]`."""

    lanes: tuple[tuple[LaneRun, ...], ...]
    end_s: float


def simulate_replica(replica: ReplicaPlan) -> ReplicaRun:
    """Simulate one step of a replica, without its gradient sync.

    Raises:
        ValueError: it stalls, or its figures are no pipeline.
    """
    lanes = _plain_lanes(replica) if is_plain(replica) else _event_lanes(replica)
    return ReplicaRun(lanes=lanes, end_s=max(lane.end_s for stage in lanes for lane in stage))


def replica_ends(replica: ReplicaPlan) -> tuple[tuple[float, ...], ...]:
    """Return when each lane of each stage is done, as `simulate_replica` does (to rounding) but without a record."""
    if is_plain(replica):
        ends = pipeline_ends(_stage_times(replica), replica.num_microbatches)
        return tuple((end_s,) for end_s in ends)
    lanes = Lanes(stage_works(replica), replica.order)
    if replica.cuts:
        lanes.play()
    else:
        play_skipping(lanes)
    return tuple(tuple(lane.end_s for lane in stage) for stage in _by_stage(lanes))


def is_plain(replica: ReplicaPlan) -> bool:
    """Whether a replica runs strict 1F1B: one lane per stage, whole layers, no W on its own."""
    whole = not replica.cuts and all(stage.lanes == 1 for stage in replica.stages)
    return whole and replica.order is Order.ONE_F_ONE_B


def layers_of(replica: ReplicaPlan, stage: int, microbatch: int) -> range:
    """Return the layers (numbers in the model) that a microbatch passes on a stage."""
    held = replica.stages[stage]
    first, end = held.first_layer, held.first_layer + held.num_layers
    if replica.cuts and stage:
        first = cut_at(replica.cuts[stage - 1], microbatch)
    if replica.cuts and stage < len(replica.cuts):
        end = cut_at(replica.cuts[stage], microbatch)
    return range(first, end)


def work_of(stage: StagePlan, num_layers: int) -> tuple[float, float, float]:
    """Return seconds of F, B and W of a microbatch that passes so many of a stage's layers.

    Where the plan does not split the backward (`weights_s` 0), B is all of it and W is 0.
    """
    less = stage.num_layers - num_layers
    forward_s = stage.forward_s - less * stage.layer_forward_s
    backward_s = stage.backward_s - less * stage.layer_backward_s
    weights_s = stage.weights_s - less * stage.layer_weights_s
    return forward_s, backward_s - weights_s, weights_s


def stage_works(replica: ReplicaPlan) -> tuple[StageWork, ...]:
    """Return what the event simulation needs to know of each stage."""
    works = []
    for stage, passes in zip(replica.stages, _passes(replica), strict=True):
        table = {count: work_of(stage, count) for count in set(passes)}
        forward = {count: seconds[0] for count, seconds in table.items()}
        backward = {count: seconds[1] for count, seconds in table.items()}
        weights = {count: seconds[2] for count, seconds in table.items()}
        works.append(
            StageWork(
                forward_s=tuple(map(forward.__getitem__, passes)),
                backward_s=tuple(map(backward.__getitem__, passes)),
                weights_s=tuple(map(weights.__getitem__, passes)),
                send_s=stage.send_s,
                window=stage.window,
                most_held=max(stage.window, stage.most_held or 0),
                lanes=stage.lanes,
            )
        )
    return tuple(works)


def _passes(replica: ReplicaPlan) -> list[list[int]]:
    """Return how many layers each microbatch passes, per stage: `layers_of` for all of them."""
    count = replica.num_microbatches
    if not replica.cuts:
        return [[stage.num_layers] * count for stage in replica.stages]
    last = replica.stages[-1]
    edges = [[0] * count]
    edges += [cuts_at(cut, count) for cut in replica.cuts]
    edges.append([last.first_layer + last.num_layers] * count)
    return [list(map(sub, ends, firsts)) for firsts, ends in pairwise(edges)]


def _by_stage(lanes: Lanes) -> tuple[tuple[Lane, ...], ...]:
    return tuple(tuple(held) for _, held in groupby(lanes.lanes, key=lambda lane: lane.stage))


def _event_lanes(replica: ReplicaPlan) -> tuple[tuple[LaneRun, ...], ...]:
    lanes = Lanes(stage_works(replica), replica.order)
    lanes.play()
    return tuple(tuple(_lane_run(lane) for lane in stage) for stage in _by_stage(lanes))


def _lane_run(lane: Lane) -> LaneRun:
    """Return the record of a lane."""
    return LaneRun(
        actions=tuple(
            TimedAction(_KINDS[kind], microbatch, start_s, end_s)
            for kind, microbatch, start_s, end_s in lane.entries()
        ),
        end_s=lane.end_s,
        peak_activations=lane.peak,
    )


def _plain_lanes(replica: ReplicaPlan) -> tuple[tuple[LaneRun, ...], ...]:
    run = simulate_pipeline(_stage_times(replica), replica.num_microbatches)
    stages = zip(run.actions, run.stage_end_s, run.peak_activations, strict=True)
    return tuple(
        (LaneRun(actions=actions, end_s=end_s, peak_activations=peak),)
        for actions, end_s, peak in stages
    )


def _stage_times(replica: ReplicaPlan) -> Sequence[StageTimes]:
    return [
        StageTimes(
            forward_s=stage.forward_s,
            backward_s=stage.backward_s,
            send_s=stage.send_s,
            window=stage.window,
        )
        for stage in replica.stages
    ]
