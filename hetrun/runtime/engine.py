"""Runs one rank's static list of forwards and backwards for one step. The list comes from `schedule/`.

Sends never block: they are waited for at the end of the step. What gradients become is left to `sync.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hetrun.model import Span, StagePlan
from hetrun.runtime.boundary import RECEIVE_AHEAD, Receiver, Sender
from hetrun.runtime.data import Rows
from hetrun.runtime.emulate import Clock
from hetrun.runtime.network import Stage, summed_loss
from hetrun.schedule.pipeline import ActionKind, TimedAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """The four routes of a stage; None where there is no stage."""

    activations_in: Receiver | None = None
    activations_out: Sender | None = None
    gradients_in: Receiver | None = None
    gradients_out: Sender | None = None
    window_before: int = 0  # of the previous stage: tells which gradients it must have by now
    send_before_s: float = 0.0  # of the link to the previous stage


@dataclass(slots=True)
class Timeline:
    """What one rank did in a step, on the run's clock."""

    clock: Clock
    spans: list[Span] = field(default_factory=list)

    def close_span(self, kind: str, microbatch: int | None, start_s: float) -> None:
        """Record an action that ends now."""
        end_s = self.clock.now_s()
        self.spans.append(Span(kind=kind, microbatch=microbatch, start_s=start_s, end_s=end_s))

    def seconds(self, *kinds: str) -> float:
        """Time spent in actions of these kinds."""
        return sum(span.end_s - span.start_s for span in self.spans if span.kind in kinds)


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Rows of one microbatch with the factor of its loss; rows are None on stages that need none."""

    rows: Rows | None
    scale: float


class PipelineEngine:
    """Executes the action list of one stage of one replica."""

    def __init__(
        self,
        stage: Stage,
        plan: StagePlan,
        *,
        actions: Sequence[TimedAction],
        neighbours: Neighbours,
        device: torch.device,
    ) -> None:
        self._stage = stage
        self._plan = plan
        self._actions = actions
        self._neighbours = neighbours
        self._device = device
        self._held: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # input and output of microbatches in flight
        self._loss = 0.0

    def run(self, microbatches: Sequence[Microbatch], timeline: Timeline) -> float:
        """Compute all gradients of this stage; return the summed, scaled loss (0 but on the last stage)."""
        self._loss = 0.0
        self._start_receiving()
        for action in self._actions:
            microbatch = microbatches[action.microbatch]
            match action.kind:
                case ActionKind.FORWARD:
                    self._forward(action.microbatch, microbatch, timeline)
                case ActionKind.BACKWARD:
                    self._backward(action.microbatch, timeline)
                case ActionKind.WEIGHTS:
                    raise ValueError("this engine does not put off the gradients of the weights")
        for sender in (self._neighbours.activations_out, self._neighbours.gradients_out):
            if sender is not None:
                sender.finish()
        return self._loss

    def evaluate(self, microbatches: Sequence[Microbatch], timeline: Timeline) -> float:
        """Forward the first microbatches of a step without gradients; return the summed, scaled loss as `run` does."""
        self._loss = 0.0
        before, after = self._neighbours.activations_in, self._neighbours.activations_out
        order = [
            action.microbatch
            for action in self._actions
            if action.kind is ActionKind.FORWARD and action.microbatch < len(microbatches)
        ]
        if before is not None:
            before.start_step(order)
        self._stage.eval()
        with torch.no_grad():
            for index in order:
                self._forward(index, microbatches[index], timeline)
                del self._held[index]
                if after is not None:
                    after.release(
                        index - RECEIVE_AHEAD
                    )  # no gradient comes to tell that it arrived
        self._stage.train()
        if after is not None:
            after.finish()
        return self._loss

    def _start_receiving(self) -> None:
        order = [a.microbatch for a in self._actions if a.kind is ActionKind.FORWARD]
        if self._neighbours.activations_in is not None:
            self._neighbours.activations_in.start_step(order)
        if self._neighbours.gradients_in is not None:
            order = [a.microbatch for a in self._actions if a.kind is ActionKind.BACKWARD]
            self._neighbours.gradients_in.start_step(order)

    def _forward(self, index: int, microbatch: Microbatch, timeline: Timeline) -> None:
        clock = timeline.clock
        x = self._input(index, microbatch, clock)
        start_s = clock.now_s()
        y = self._stage(x)
        if self._plan.has_head:
            y = self._scaled_loss(y, microbatch)
            self._loss += y.item()
        self._held[index] = (x, y)
        clock.spend(self._plan.forward_s)
        timeline.close_span(ActionKind.FORWARD.value, index, start_s)
        if self._neighbours.activations_out is not None:
            when_s = clock.now_s() + self._plan.send_s
            self._neighbours.activations_out.send(index, y, when_s=when_s)

    def _backward(self, index: int, timeline: Timeline) -> None:
        clock = timeline.clock
        neighbours = self._neighbours
        gradient = None
        if neighbours.gradients_in is not None:
            gradient, when_s = neighbours.gradients_in.receive(index)
            clock.wait_until(when_s)
            if neighbours.activations_out is not None:
                neighbours.activations_out.release(index)
        start_s = clock.now_s()
        x, y = self._held.pop(index)
        y.backward(gradient)
        clock.spend(self._plan.backward_s)
        timeline.close_span(ActionKind.BACKWARD.value, index, start_s)
        if neighbours.gradients_out is not None and x.grad is not None:
            when_s = clock.now_s() + neighbours.send_before_s
            neighbours.gradients_out.send(index, x.grad, when_s=when_s)

    def _input(self, index: int, microbatch: Microbatch, clock: Clock) -> Tensor:
        """Tokens on the first stage, else the activation of the previous one once it is there."""
        neighbours = self._neighbours
        if neighbours.activations_in is None:
            if microbatch.rows is None:
                raise ValueError(f"first stage got no rows for microbatch {index}")
            return microbatch.rows.inputs.to(self._device)
        x, when_s = neighbours.activations_in.receive(index)
        clock.wait_until(when_s)
        if neighbours.gradients_out is not None:
            neighbours.gradients_out.release(index - neighbours.window_before)
        return x.requires_grad_()

    def _scaled_loss(self, logits_BTV: Tensor, microbatch: Microbatch) -> Tensor:
        if microbatch.rows is None:
            raise ValueError("last stage got no targets")
        targets_BT = microbatch.rows.targets.to(self._device)
        valid_BT = microbatch.rows.valid.to(self._device)
        return summed_loss(logits_BTV, targets_BT, valid_BT) * microbatch.scale
