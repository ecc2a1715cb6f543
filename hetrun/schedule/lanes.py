"""One event simulation of all lanes of a pipeline whose stages take microbatches in turn, differ in them, or put off W.

Every lane runs its own microbatches in ascending order, and whenever it is free it does the first of these that it can:

- 1F1B: a forward, if its input is there and fewer than `window` microbatches are between forward and backward; a
  backward, if its gradient is there. With room in the windows this evens out microbatches of different length, which
  the strict turns of `pipeline.py` do not.
- Zero bubble: B (gradient of the input, which the stage upstream waits for), if its gradient is there; a forward as
  above, if also fewer than `most_held` microbatches are between forward and W; W (gradient of the weights, which
  nobody waits for). Without that bound the same order holds every activation and looks better than it can be had for.

No pipeline stalls: of the smallest microbatch that is not done, all smaller ones are, so the lane that has it holds
nothing else before it and may run it. What ends up simultaneous but for rounding counts as simultaneous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from hetrun.model import Order

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
SAME = 1e-9  # of the mean action: arrivals that are later by less are there

Entry = tuple[int, int, float, float]  # kind, place among the lane's microbatches, start, end


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Seconds of F, B and W of each microbatch of a pipeline on one stage; `send_s` is the link to the next, one way."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weights_s: tuple[float, ...]  # zeros for 1F1B, whose backward does both
    send_s: float
    window: int  # of each lane: forwards that may run ahead of their B
    most_held: int  # of each lane: microbatches whose W is not done
    lanes: int = 1  # microbatch i runs on lane i % lanes

    def __post_init__(self) -> None:
        if not len(self.forward_s) == len(self.backward_s) == len(self.weights_s) > 0:
            raise ValueError("stage: need F, B and W of every microbatch, and one of these")
        if not 1 <= self.window <= self.most_held:
            raise ValueError(f"stage: window {self.window}, need 1 to most_held {self.most_held}")
        if self.lanes < 1:
            raise ValueError(f"stage: {self.lanes} lanes, need at least 1")


def bounded_windows(num_stages: int, stage: int, *, more: int = 2) -> tuple[int, int]:
    """Return window and most_held of zero bubble: `more` microbatches than 1F1B run ahead, and one more is held.

    Two more hide the bubble at two to three activations more than 1F1B: p-s+2, p-s+3.
    """
    return num_stages - stage + more, num_stages - stage + more + 1


class Lane:
    """What one lane of a stage has done and what has arrived there."""

    __slots__ = (
        "done",
        "end_s",
        "entries",
        "gradients",
        "idle",
        "inputs",
        "number",
        "peak",
        "seconds",
        "stage",
        "work",
    )

    def __init__(self, stage: int, number: int, work: StageWork) -> None:
        mine = slice(number, None, work.lanes)
        self.stage = stage
        self.number = number
        self.work = work
        self.seconds = (work.forward_s[mine], work.backward_s[mine], work.weights_s[mine])
        count = len(self.seconds[FORWARD])
        self.inputs = [inf] * (count + 1)  # arrivals by place; one beyond the last never comes
        self.gradients = [inf] * (count + 1)
        self.done = [0, 0, 0]  # F, B, W
        self.idle = True
        self.peak = 0
        self.end_s = 0.0
        self.entries: list[Entry] = []

    def input_s(self) -> float:
        """Return when the next forward may start, as far as is known: inf while the bounds forbid it."""
        forwards, backwards, weights = self.done
        if forwards - backwards < self.work.window and forwards - weights < self.work.most_held:
            return self.inputs[forwards]
        return inf


class Lanes:
    """The lanes of all stages, and when each wakes up next."""

    def __init__(self, stages: Sequence[StageWork], order: Order) -> None:
        """Put all lanes at the start.

        Raises:
            ValueError: no stage, or stages of different numbers of microbatches.
        """
        if not stages or len({len(stage.forward_s) for stage in stages}) != 1:
            raise ValueError("pipeline: need stages with equally many microbatches")
        self.splits = order is Order.ZERO_BUBBLE
        self.stages = stages
        self.lanes: list[Lane] = []
        self.firsts: list[int] = []  # of each stage, its first lane
        for index, work in enumerate(stages):
            self.firsts.append(len(self.lanes))
            self.lanes += [Lane(index, number, work) for number in range(work.lanes)]
        for lane in self.lanes[: stages[0].lanes]:
            lane.inputs[:-1] = [0.0] * (len(lane.inputs) - 1)
        self.wake = [0.0 if lane.stage == 0 else inf for lane in self.lanes]
        work_s = sum(sum(stage.forward_s) + sum(stage.backward_s) for stage in stages)
        self.slack_s = SAME * work_s / (2 * len(stages) * len(stages[0].forward_s))

    def play(self) -> None:
        """Play to the end.

        Raises:
            ValueError: some lane never got what it waits for.
        """
        wake, lanes, act = self.wake, self.lanes, self.act
        now_s = min(wake)
        while now_s < inf:
            place = wake.index(now_s)
            wake[place] = act(lanes[place], now_s)
            now_s = min(wake)
        left = [lane.done for lane in lanes if min(lane.done) < len(lane.inputs) - 1]
        if left:
            raise ValueError(f"pipeline stalls: lanes did {left} F, B, W")

    def act(self, lane: Lane, now_s: float) -> float:
        """Let a free lane do the first thing it can; return when it is to be asked again."""
        forwards, backwards, weights = lane.done
        until_s = now_s + self.slack_s
        gradient_s = lane.gradients[backwards]
        input_s = lane.input_s()
        lane.idle = False
        if gradient_s <= until_s and (self.splits or input_s > until_s):
            return self._backward(lane, backwards, max(now_s, gradient_s))
        if input_s <= until_s:
            return self._forward(lane, forwards, max(now_s, input_s))
        if weights < backwards:
            lane.done[WEIGHTS] += 1
            return _enter(lane, WEIGHTS, weights, now_s)
        lane.idle = True
        return min(gradient_s, input_s)

    def _forward(self, lane: Lane, place: int, start_s: float) -> float:
        """Run a forward and send its output on; the last stage turns round at once."""
        end_s = _enter(lane, FORWARD, place, start_s)
        lane.done[FORWARD] = place + 1
        held = place + 1 - lane.done[WEIGHTS]
        if held > lane.peak:
            lane.peak = held
        if lane.stage + 1 < len(self.stages):
            self._send(lane, place, lane.stage + 1, end_s + lane.work.send_s)
        else:
            lane.gradients[place] = end_s
        return end_s

    def _backward(self, lane: Lane, place: int, start_s: float) -> float:
        """Run a backward and send its gradient back."""
        end_s = _enter(lane, BACKWARD, place, start_s)
        lane.done[BACKWARD] = place + 1
        if not self.splits:
            lane.done[WEIGHTS] = place + 1
        if lane.stage:
            before = lane.stage - 1
            self._send(lane, place, before, end_s + self.stages[before].send_s)
        return end_s

    def _send(self, lane: Lane, place: int, target: int, arrives_s: float) -> None:
        """Tell the lane of a neighbouring stage that has the same microbatch; wake it if it sleeps for longer."""
        microbatch = place * lane.work.lanes + lane.number
        there, number = divmod(microbatch, self.stages[target].lanes)
        at = self.firsts[target] + number
        other = self.lanes[at]
        arrivals = other.inputs if target > lane.stage else other.gradients
        arrivals[there] = arrives_s
        if other.idle and arrives_s < self.wake[at]:
            self.wake[at] = arrives_s


def _enter(lane: Lane, kind: int, place: int, start_s: float) -> float:
    """Write down an action of a lane; return when it ends."""
    lane.end_s = end_s = start_s + lane.seconds[kind][place]
    lane.entries.append((kind, place, start_s, end_s))
    return end_s
