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
from itertools import accumulate
from math import inf

from hetrun.model import Order
from hetrun.schedule.rules import CLOSED, Clocks, Lane, Way, one_f_one_b, zero_bubble

SAME = 1e-9  # of the mean action: arrivals that are later by less are there
CLEAR = 1e-12  # of all work and sends one after the other: what takes longer is later in spite of rounding


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


class Lanes:
    """The lanes of all stages, and when each is to be asked next."""

    def __init__(self, stages: Sequence[StageWork], order: Order) -> None:
        """Put all lanes at the start.

        Raises:
            ValueError: no stage, or stages of different numbers of microbatches.
        """
        if not stages or len({len(stage.forward_s) for stage in stages}) != 1:
            raise ValueError("pipeline: need stages with equally many microbatches")
        splits = order is Order.ZERO_BUBBLE
        self.kinds = 3 if splits else 2  # actions of a microbatch on a stage
        self.count = len(stages[0].forward_s)
        work_s = sum(sum(stage.forward_s) + sum(stage.backward_s) for stage in stages)
        slack_s = SAME * work_s / (2 * len(stages) * self.count)
        soonest_s = _soonest(stages)
        all_s = sum(sum(stage.weights_s) + 2 * self.count * stage.send_s for stage in stages)
        ahead = min(map(min, soonest_s)) > max(slack_s, CLEAR * (all_s + work_s))
        self.lanes = _joined(stages, soonest_s if ahead else [(inf, inf)] * len(stages))
        self.wake = [inf if lane.stage else 0.0 for lane in self.lanes]
        self.waits = [inf if lane.stage else -inf for lane in self.lanes]
        clocks = Clocks(wake=self.wake, waits=self.waits, slack_s=slack_s, ahead=ahead)
        rules = [(zero_bubble if splits else one_f_one_b)(lane, clocks) for lane in self.lanes]
        for rule in rules:
            next(rule)
        self.asks = [rule.send for rule in rules]

    def play(self) -> None:
        """Play to the end.

        Raises:
            ValueError: some lane never got what it waits for.
        """
        wake, asks = self.wake, self.asks
        now_s = min(wake)
        while now_s < CLOSED:
            place = wake.index(now_s)
            wake[place] = asks[place](now_s)
            now_s = min(wake)
        self.check_done()

    def check_done(self) -> None:
        """Check that all microbatches are through.

        Raises:
            ValueError: some lane never got what it waits for.
        """
        left = [
            lane.place
            for lane in self.lanes
            if len(lane.kinds) != self.kinds * len(range(lane.number, self.count, lane.step))
        ]
        if left:
            raise ValueError(f"pipeline stalls: lanes {left} wait for ever")


def _soonest(stages: Sequence[StageWork]) -> list[tuple[float, float]]:
    """Return, per stage, the shortest time from the begin of an action of a neighbour to its input or gradient here."""
    inputs = [inf, *(min(stage.forward_s) + stage.send_s for stage in stages[:-1])]
    backs = zip(stages[1:], stages, strict=False)
    gradients = [min(after.backward_s) + stage.send_s for after, stage in backs]
    return list(zip(inputs, [*gradients, inf], strict=True))


def _joined(
    stages: Sequence[StageWork], soonest_s: Sequence[tuple[float, float]]
) -> tuple[Lane, ...]:
    """Return the lanes of all stages, each with the lists in which its neighbours put what arrives."""
    count, last = len(stages[0].forward_s), len(stages) - 1
    never = [[inf] * (count + stage.lanes) for stage in stages]  # beyond the last nothing comes
    gradients = [list(own) for own in never]
    inputs = [[0.0] * count + [inf] * stages[0].lanes, *never[1:]]
    places = list(accumulate((stage.lanes for stage in stages), initial=0))
    lanes = []
    for index, work in enumerate(stages):
        below, above = min(index + 1, last), max(index - 1, 0)
        turn = gradients[index] if index == last else inputs[below]  # the last stage turns round
        home = gradients[above] if index else never[0]  # looked at by nobody
        for number in range(work.lanes):
            lane = Lane(
                stage=index,
                number=number,
                step=work.lanes,
                place=places[index] + number,
                work=(work.forward_s, work.backward_s, work.weights_s),
                window=work.window,
                most_held=work.most_held,
                inputs=inputs[index],
                gradients=gradients[index],
                down=Way(turn, places[below], stages[below].lanes, work.send_s * (index < last)),
                up=Way(
                    home, places[above], stages[above].lanes, stages[above].send_s * (index > 0)
                ),
                soonest_input_s=soonest_s[index][0],
                soonest_gradient_s=soonest_s[index][1],
            )
            lanes.append(lane)
    return tuple(lanes)
