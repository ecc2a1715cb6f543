"""Runs the static list of actions of one lane of a stage for one step. The list comes from `schedule/`.

Microbatch i passes lane i % lanes of every stage, and on each the layers that its cuts leave there. Sends never
block: they are waited for at the end of the step. What gradients become is left to `sync.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from hetrun.model import RankPlan, ReplicaPlan, Span, StagePlan
from hetrun.runtime.boundary import RECEIVE_AHEAD, Receiver, Sender
from hetrun.runtime.data import Rows
from hetrun.runtime.deferred import DeferredWeights, Product, accumulate_all
from hetrun.runtime.emulate import Clock
from hetrun.runtime.network import Stage, summed_loss
from hetrun.runtime.precision import Precision
from hetrun.schedule.pipeline import ActionKind, TimedAction
from hetrun.schedule.replica import ReplicaRun, layers_of, work_of

_Way = TypeVar("_Way")


@dataclass(frozen=True, slots=True)
class Part:
    """What one lane computes of one microbatch."""

    layers: range  # numbers in the model
    forward_s: float
    backward_s: float  # all of the backward, unless the weights' part is put off
    weights_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One lane of a stage: its actions in order, and its part of each microbatch that comes its way."""

    plan: StagePlan
    actions: tuple[TimedAction, ...]
    parts: Mapping[int, Part]  # by microbatch
    is_first: bool  # of the ranks that share the lane's layers: the one that tells of its loss

    def order(self, kind: ActionKind) -> list[int]:
        """Microbatches in the order of one kind of action."""
        return [action.microbatch for action in self.actions if action.kind is kind]


def lane_of(run: ReplicaRun, replica: ReplicaPlan, rank: RankPlan) -> Lane:
    """Return what a rank has to do in a step of its replica."""
    stage = replica.stages[rank.stage]
    tp = len(stage.ranks) // stage.lanes
    number, place = divmod(stage.ranks.index(rank.rank), tp)
    parts = {}
    for microbatch in range(number, replica.num_microbatches, stage.lanes):
        layers = layers_of(replica, rank.stage, microbatch)
        parts[microbatch] = Part(layers, *work_of(stage, len(layers)))
    actions = run.lanes[rank.stage][number].actions
    return Lane(plan=stage, actions=actions, parts=parts, is_first=place == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """The routes to all lanes of the stages before and after, each by lane; empty where there is no stage."""

    activations_in: tuple[Receiver, ...] = ()
    activations_out: tuple[Sender, ...] = ()
    gradients_in: tuple[Receiver, ...] = ()
    gradients_out: tuple[Sender, ...] = ()
    gradients_had: Mapping[int, int] = field(
        default_factory=dict
    )  # by microbatch: the last whose gradient its sender took from here before it ran its forward
    send_before_s: float = 0.0  # of the link to the previous stage

    @property
    def senders(self) -> tuple[Sender, ...]:
        """All that may have messages under way."""
        return self.activations_out + self.gradients_out


@dataclass(slots=True)
class Timeline:
    """What one rank did in a step, on the run's clock."""

    clock: Clock
    spans: list[Span] = field(default_factory=list)
    tick: Callable[[], None] = lambda: None  # told whenever an action ends

    def close_span(self, kind: str, microbatch: int | None, start_s: float) -> None:
        """Record an action that ends now."""
        end_s = self.clock.now_s()
        self.spans.append(Span(kind=kind, microbatch=microbatch, start_s=start_s, end_s=end_s))
        self.tick()

    def seconds(self, *kinds: str) -> float:
        """Time spent in actions of these kinds."""
        return sum(span.end_s - span.start_s for span in self.spans if span.kind in kinds)


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Rows of one microbatch with the factor of its loss; rows are None on stages that need none."""

    rows: Rows | None
    scale: float


class PipelineEngine:
    """Executes the action list of one lane of one stage of one replica."""

    def __init__(
        self,
        stage: Stage,
        lane: Lane,
        *,
        neighbours: Neighbours,
        device: torch.device,
        precision: Precision,
    ) -> None:
        """Linear maps of `stage` put off the gradients of their weights from here on, if the lane has W at all."""
        self._stage = stage
        self._lane = lane
        self._neighbours = neighbours
        self._device = device
        self._precision = precision
        splits = bool(lane.order(ActionKind.WEIGHTS))
        self._deferred = DeferredWeights(stage, precision.arithmetic) if splits else None
        self._held: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # input and output of microbatches between F and B
        self._put_off: dict[int, list[Product]] = {}  # of microbatches between B and W
        self._loss = 0.0

    def run(self, microbatches: Mapping[int, Microbatch], timeline: Timeline) -> float:
        """Compute all gradients of this lane; return the summed, scaled loss (0 but on the last stage).

        `microbatches` are those of this lane, by number.
        """
        self._loss = 0.0
        _start(self._neighbours.activations_in, self._lane.order(ActionKind.FORWARD))
        _start(self._neighbours.gradients_in, self._lane.order(ActionKind.BACKWARD))
        with self._precision.step():
            for action in self._lane.actions:
                match action.kind:
                    case ActionKind.FORWARD:
                        self._forward(action.microbatch, microbatches[action.microbatch], timeline)
                    case ActionKind.BACKWARD:
                        self._backward(action.microbatch, timeline)
                    case ActionKind.WEIGHTS:
                        self._weights(action.microbatch, timeline)
        self._finish_sending()
        return self._loss

    def evaluate(self, microbatches: Mapping[int, Microbatch], timeline: Timeline) -> float:
        """Forward some microbatches of a step without gradients; return the summed, scaled loss as `run` does.

        All ranks of the replica must be given the same of its microbatches, each those of its lane.
        """
        self._loss = 0.0
        order = [index for index in self._lane.order(ActionKind.FORWARD) if index in microbatches]
        _start(self._neighbours.activations_in, order)
        self._stage.eval()
        with torch.no_grad(), self._precision.step():
            for index in order:
                self._forward(index, microbatches[index], timeline)
                del self._held[index]
                if self._neighbours.activations_out:  # no gradient comes to tell what arrived
                    _at(self._neighbours.activations_out, index).keep(RECEIVE_AHEAD)
        self._stage.train()
        self._finish_sending()
        return self._loss

    def _finish_sending(self) -> None:
        for sender in self._neighbours.senders:
            sender.finish()

    def _forward(self, index: int, microbatch: Microbatch, timeline: Timeline) -> None:
        clock = timeline.clock
        part = self._lane.parts[index]
        x = self._input(index, microbatch, clock)
        start_s = clock.now_s()
        with self._precision.arithmetic():
            y = self._stage(x, part.layers)
        if self._lane.plan.has_head:
            y = self._scaled_loss(y, microbatch)
            self._loss += y.item() if self._lane.is_first else 0.0
        else:
            y = y.to(self._precision.activations)  # what messages are of
        self._held[index] = (x, y)
        clock.spend(part.forward_s)
        timeline.close_span(ActionKind.FORWARD.value, index, start_s)
        if self._neighbours.activations_out:
            when_s = clock.now_s() + self._lane.plan.send_s
            _at(self._neighbours.activations_out, index).send(index, y, when_s=when_s)

    def _backward(self, index: int, timeline: Timeline) -> None:
        clock = timeline.clock
        neighbours = self._neighbours
        gradient = None
        if neighbours.gradients_in:
            gradient, when_s = _at(neighbours.gradients_in, index).receive(index)
            clock.wait_until(when_s)
            _at(neighbours.activations_out, index).release(index)
        start_s = clock.now_s()
        x, y = self._held.pop(index)
        y.backward(gradient)
        if self._deferred is not None:
            self._put_off[index] = self._deferred.take()
        clock.spend(self._lane.parts[index].backward_s)
        timeline.close_span(ActionKind.BACKWARD.value, index, start_s)
        if neighbours.gradients_out and x.grad is not None:
            when_s = clock.now_s() + neighbours.send_before_s
            _at(neighbours.gradients_out, index).send(index, x.grad, when_s=when_s)

    def _weights(self, index: int, timeline: Timeline) -> None:
        clock = timeline.clock
        start_s = clock.now_s()
        accumulate_all(self._put_off.pop(index))
        clock.spend(self._lane.parts[index].weights_s)
        timeline.close_span(ActionKind.WEIGHTS.value, index, start_s)

    def _input(self, index: int, microbatch: Microbatch, clock: Clock) -> Tensor:
        """Tokens on the first stage, else the activation of the previous one once it is there."""
        neighbours = self._neighbours
        if not neighbours.activations_in:
            if microbatch.rows is None:
                raise ValueError(f"first stage got no rows for microbatch {index}")
            return microbatch.rows.inputs.to(self._device)
        x, when_s = _at(neighbours.activations_in, index).receive(index)
        clock.wait_until(when_s)
        if index in neighbours.gradients_had:
            _at(neighbours.gradients_out, index).release(neighbours.gradients_had[index])
        return x.requires_grad_()

    def _scaled_loss(self, logits_BTV: Tensor, microbatch: Microbatch) -> Tensor:
        if microbatch.rows is None:
            raise ValueError("last stage got no targets")
        targets_BT = microbatch.rows.targets.to(self._device)
        valid_BT = microbatch.rows.valid.to(self._device)
        return summed_loss(logits_BTV, targets_BT, valid_BT) * microbatch.scale


def _start(receivers: Sequence[Receiver], order: Sequence[int]) -> None:
    """Tell the receiver of each lane which of these microbatches come from there."""
    for number, receiver in enumerate(receivers):
        receiver.start_step([index for index in order if index % len(receivers) == number])


def _at(routes: Sequence[_Way], microbatch: int) -> _Way:
    """The route to the lane that a microbatch passes."""
    return routes[microbatch % len(routes)]
