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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
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


def lane_windows(lanes: Sequence[int]) -> tuple[int, ...]:
    """Return the window of each lane of each stage with which balanced stages never wait: 1F1B's where all have one lane.

    A microbatch comes back after as many cycles as there are lanes from here on, and a lane gets one of `lanes` of them.
    """
    windows = []
    left = sum(lanes)
    for own in lanes:
        windows.append(-(-left // own))
        left -= own
    return tuple(windows)


class Lane:
    """What one lane of a stage has done and what has arrived there."""

    __slots__ = (
        "backwards",
        "down",
        "end_s",
        "forwards",
        "gradients",
        "idle",
        "inputs",
        "kinds",
        "most_held",
        "number",
        "peak",
        "place",
        "seconds",
        "send_back_s",
        "send_s",
        "stage",
        "starts",
        "step",
        "up",
        "weights",
        "window",
    )

    def __init__(self, stage: int, number: int, work: StageWork) -> None:
        mine = slice(number, None, work.lanes)
        self.stage = stage
        self.number = number
        self.step = work.lanes
        self.window = work.window
        self.most_held = work.most_held
        self.send_s = work.send_s
        self.send_back_s = 0.0
        self.seconds = (work.forward_s[mine], work.backward_s[mine], work.weights_s[mine])
        count = len(self.seconds[FORWARD])
        self.inputs = [inf] * (count + 1)  # arrivals by place; one beyond the last never comes
        self.gradients = [inf] * (count + 1)
        self.forwards = self.backwards = self.weights = 0  # done
        self.idle = True
        self.peak = 0
        self.end_s = 0.0
        self.kinds: list[int] = []  # of its actions, in order
        self.starts: list[float] = []
        self.place = 0  # among all lanes
        self.down: list[Lane] = []  # lanes of the next stage
        self.up: list[Lane] = []

    def entries(self) -> Iterator[Entry]:
        """Yield its actions in order."""
        places = [0, 0, 0]
        for kind, start_s in zip(self.kinds, self.starts, strict=True):
            place = places[kind]
            places[kind] = place + 1
            yield kind, place, start_s, start_s + self.seconds[kind][place]

    @property
    def is_done(self) -> bool:
        """Whether all of its microbatches are through."""
        return min(self.forwards, self.backwards, self.weights) == len(self.inputs) - 1


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
        by_stage = [
            [Lane(index, number, work) for number in range(work.lanes)]
            for index, work in enumerate(stages)
        ]
        for before, after in pairwise(by_stage):
            for lane in before:
                lane.down = after
            for lane in after:
                lane.up, lane.send_back_s = before, before[0].send_s
        for lane in by_stage[0]:
            lane.inputs[:-1] = [0.0] * (len(lane.inputs) - 1)
        self.lanes = [lane for held in by_stage for lane in held]
        for place, lane in enumerate(self.lanes):
            lane.place = place
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
        left = [lane.place for lane in lanes if not lane.is_done]
        if left:
            raise ValueError(f"pipeline stalls: lanes {left} wait for ever")

    def act(self, lane: Lane, now_s: float) -> float:
        """Let a free lane do the first thing it can; return when it is to be asked again."""
        forwards, backwards, weights = lane.forwards, lane.backwards, lane.weights
        until_s = now_s + self.slack_s
        gradient_s = lane.gradients[backwards]
        room = forwards - backwards < lane.window and forwards - weights < lane.most_held
        input_s = lane.inputs[forwards] if room else inf
        lane.idle = False
        if gradient_s <= until_s and (self.splits or input_s > until_s):
            return self._backward(lane, backwards, gradient_s if gradient_s > now_s else now_s)
        if input_s <= until_s:
            return self._forward(lane, forwards, input_s if input_s > now_s else now_s)
        if weights < backwards:
            lane.end_s = end_s = now_s + lane.seconds[WEIGHTS][weights]
            lane.kinds.append(WEIGHTS)
            lane.starts.append(now_s)
            lane.weights = weights + 1
            return end_s
        lane.idle = True
        return gradient_s if gradient_s < input_s else input_s

    def _forward(self, lane: Lane, place: int, start_s: float) -> float:
        """Run a forward and send its output on; the last stage turns round at once."""
        lane.end_s = end_s = start_s + lane.seconds[FORWARD][place]
        lane.kinds.append(FORWARD)
        lane.starts.append(start_s)
        lane.forwards = place + 1
        if place + 1 - lane.weights > lane.peak:
            lane.peak = place + 1 - lane.weights
        if lane.down:
            there, number = divmod(place * lane.step + lane.number, len(lane.down))
            other = lane.down[number]
            other.inputs[there] = arrives_s = end_s + lane.send_s
            if other.idle and arrives_s < self.wake[other.place]:
                self.wake[other.place] = arrives_s
        else:
            lane.gradients[place] = end_s
        return end_s

    def _backward(self, lane: Lane, place: int, start_s: float) -> float:
        """Run a backward and send its gradient back."""
        lane.end_s = end_s = start_s + lane.seconds[BACKWARD][place]
        lane.kinds.append(BACKWARD)
        lane.starts.append(start_s)
        lane.backwards = place + 1
        if not self.splits:
            lane.weights = place + 1
        if lane.up:
            there, number = divmod(place * lane.step + lane.number, len(lane.up))
            other = lane.up[number]
            other.gradients[there] = arrives_s = end_s + lane.send_back_s
            if other.idle and arrives_s < self.wake[other.place]:
                self.wake[other.place] = arrives_s
        return end_s
