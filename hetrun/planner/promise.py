"""What a combination's step could get down to in another order or with real cuts: to choose which ones to try these on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from hetrun.model import Order, ReplicaPlan
from hetrun.planner.cost import weights_seconds
from hetrun.planner.drafts import Candidate, Group, first_replicas, narrow_windows
from hetrun.planner.orders import can_split, even_cuts, passed_s
from hetrun.planner.problem import Problem
from hetrun.planner.shapes import pieces
from hetrun.schedule.step import end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Seconds of a microbatch on one lane of a stage, and one way to the next."""

    forward_s: float
    backward_s: float  # of inputs and weights
    weights_s: float  # of this what can be put off
    send_s: float
    lanes: int


def promise_s(problem: Problem, candidate: Candidate) -> float:
    """Return what a candidate's step takes at least in the orders and with the cuts that a problem allows.

    The batch may be handed out anew among its replicas; what follows the pipelines stays as it is.
    """
    ways = [partial(_as_planned, problem)]
    if problem.fractional:
        ways.append(partial(_levelled, problem))
    replicas = list(first_replicas(candidate))
    could_s = min(
        _level_s(problem, candidate, [*map(way, candidate.groups, replicas)]) for way in ways
    )
    everyone = candidate.layout.replicas  # of equal ones some sit worse and wait longer for sends
    pipeline_s = max(end_s(replica, problem.known_ends) for replica in everyone)
    return candidate.step_s - max(0.0, pipeline_s - could_s)


def _level_s(problem: Problem, candidate: Candidate, stages: list[list[_Stage]]) -> float:
    """Return when all replicas end at least, if they may end together: fill_s + rows * pace_s of each add up to the batch."""
    speed = lost = 0.0
    for group, held in zip(candidate.groups, stages, strict=True):
        count = group.counts[0]
        cycle_s = max((stage.forward_s + stage.backward_s) / stage.lanes for stage in held)
        fill_s = max(_ends_s(held, count)) - count * cycle_s
        rows_per_s = len(group.counts) * group.shape.rows / cycle_s
        speed += rows_per_s
        lost += rows_per_s * fill_s
    return (problem.batch_rows + lost) / speed


def _ends_s(stages: list[_Stage], count: int) -> Iterator[float]:
    """Yield what each stage makes a replica of `count` microbatches take at least, whatever its windows.

    A stage begins when the first input can be there. It has then to do all its work, and all but what it can put off
    before the last gradient goes back to the first stage.
    """
    before_s = back_s = 0.0
    for stage in stages:
        own = -(-count // stage.lanes)
        busy_s = before_s + own * (stage.forward_s + stage.backward_s)
        yield busy_s
        yield busy_s - own * stage.weights_s + back_s + stages[0].weights_s
        before_s += stage.forward_s + stage.send_s
        back_s += stage.backward_s - stage.weights_s + stage.send_s


def _as_planned(problem: Problem, group: Group, replica: ReplicaPlan) -> list[_Stage]:
    """Return the stages of a replica over whole layers, in the order that puts off most."""
    shape = group.shape
    splits = Order.ZERO_BUBBLE in problem.orders and can_split(problem, shape)
    timings = [problem.kinds[kind].timings[shape.rows] for kind in shape.kinds]
    return [
        _Stage(
            forward_s=stage.forward_s,
            backward_s=stage.backward_s,
            weights_s=weights_seconds(timing, piece) if splits else 0.0,
            send_s=stage.send_s,
            lanes=stage.lanes,
        )
        for stage, timing, piece in zip(replica.stages, timings, pieces(shape.layers), strict=True)
    ]


def _levelled(problem: Problem, group: Group, replica: ReplicaPlan) -> list[_Stage]:
    """Return the stages of a replica at even cuts, on average; over whole layers where there are none."""
    stages = _as_planned(problem, group, replica)
    cuts = even_cuts(problem, group.shape, narrow_windows(group.shape))
    if not cuts:
        return stages
    pairs = zip(
        passed_s(problem, group.shape, cuts), passed_s(problem, group.shape, ()), strict=True
    )
    shares = [then / now for then, now in pairs]
    return [
        _Stage(
            forward_s=stage.forward_s * share,
            backward_s=stage.backward_s * share,
            weights_s=stage.weights_s * share,
            send_s=stage.send_s,
            lanes=stage.lanes,
        )
        for stage, share in zip(stages, shares, strict=True)
    ]
