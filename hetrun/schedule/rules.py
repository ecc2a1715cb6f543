"""What a lane does next, in each order. Which lanes there are, and when each is asked, is decided in `lanes.py`.

A rule is a generator that keeps the state of one lane in local variables; it is sent the time at which it is asked and
yields when it wants to be asked again. One loop does it all because a call per action would cost more than the action.

Asked at `asked_s`, a lane acts on for as long as it knows all that decides. An arrival that is not known yet cannot be
earlier than `asked_s` and the shortest action, with its send, of a neighbour (`soonest_*`). Beyond that, a lane waits
until all others have come that far.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from sys import float_info
from typing import NamedTuple

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
# instead of an arrival, where there is no room: known, and later than all others
CLOSED = float_info.max

Entry = tuple[int, int, float, float]  # kind, microbatch, start, end
Rule = Generator[float, float, None]


class Way(NamedTuple):
    """Where the outputs of a lane arrive: by microbatch, at lanes that take them in turn."""

    arrivals: list[float]
    place: int  # of the first of these lanes, among all
    width: int  # lanes
    send_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """When each lane is to be asked, and what wakes it before."""

    wake: list[float]  # when a lane is to be asked next
    waits: list[float]  # an arrival before this wakes a lane; never while it works
    slack_s: float  # what is later by no more is there
    ahead: (
        bool  # whether lanes may act on; not where messages take no time: their order decides then
    )


@dataclass(slots=True, kw_only=True)
class Lane:
    """One lane of a stage: what it is given, what arrives, and what it did. Lists go by microbatch of the pipeline."""

    stage: int
    number: int  # among the lanes of the stage, and its first microbatch
    step: int  # from one of its microbatches to the next
    place: int  # among all lanes
    work: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]  # seconds of F, B and W
    window: int
    most_held: int
    inputs: list[float]  # arrivals
    gradients: list[float]
    down: Way
    up: Way
    soonest_input_s: float  # after all clocks, of an input whose forward is not begun
    soonest_gradient_s: float
    kinds: list[int] = field(default_factory=list)  # of its actions, in order
    next: tuple[int, int, int] = (0, 0, 0)  # microbatches of its F, B and W to come
    end_s: float = 0.0

    @property
    def peak(self) -> int:
        """The most microbatches between F and the last action of the lane's order on them."""
        last = WEIGHTS if WEIGHTS in self.kinds else BACKWARD
        held = accumulate((kind == FORWARD) - (kind == last) for kind in self.kinds)
        return max(held, default=0)

    def entries(self) -> Iterator[Entry]:
        """Yield its actions in order."""
        microbatches = [self.number] * 3
        arrivals = (self.inputs, self.gradients)
        free_s = 0.0
        for kind in self.kinds:
            i = microbatches[kind]
            microbatches[kind] = i + self.step
            start_s = free_s if kind == WEIGHTS else max(free_s, arrivals[kind][i])
            free_s = start_s + self.work[kind][i]
            yield kind, i, start_s, free_s


def one_f_one_b(lane: Lane, clocks: Clocks) -> Rule:  # noqa: PLR0915 - see above: one loop
    """Do a forward, if its input is there and there is room; else a backward, if its gradient is there."""
    step, place, note, room = lane.step, lane.place, lane.kinds.append, lane.window
    inputs, gradients, (forward_s, backward_s, _) = lane.inputs, lane.gradients, lane.work
    down, down_place, down_width, send_s = lane.down
    up, up_place, up_width, send_back_s = lane.up
    wake, waits, slack_s, ahead = clocks.wake, clocks.waits, clocks.slack_s, clocks.ahead
    forward = backward = lane.number
    asked_s = now_s = yield inf
    while True:
        until_s = now_s + slack_s
        input_s = inputs[forward] if room else CLOSED
        if input_s <= until_s:
            note(FORWARD)
            now_s = (input_s if input_s > now_s else now_s) + forward_s[forward]
            down[forward] = arrives_s = now_s + send_s
            other = down_place + forward % down_width
            forward, room = forward + step, room - 1
        elif input_s == inf and until_s >= asked_s + lane.soonest_input_s:
            lane.next = forward, backward, backward
            asked_s = now_s = yield now_s
            continue
        else:
            gradient_s = gradients[backward]
            if gradient_s <= until_s:
                note(BACKWARD)
                now_s = (gradient_s if gradient_s > now_s else now_s) + backward_s[backward]
                up[backward] = arrives_s = now_s + send_back_s
                other = up_place + backward % up_width
                backward, room = backward + step, room + 1
            elif gradient_s < inf and input_s < inf and ahead:
                now_s = gradient_s if gradient_s < input_s else input_s
                continue
            elif gradient_s == inf and until_s >= asked_s + lane.soonest_gradient_s:
                lane.next = forward, backward, backward
                asked_s = now_s = yield now_s
                continue
            else:
                lane.next, lane.end_s = (forward, backward, backward), now_s
                waits[place] = gradient_s if gradient_s < input_s else input_s
                asked_s = now_s = yield waits[place]
                waits[place] = -inf
                continue
        if arrives_s < waits[other]:
            waits[other] = wake[other] = arrives_s
        if not ahead:
            lane.next = forward, backward, backward
            asked_s = now_s = yield now_s


def zero_bubble(lane: Lane, clocks: Clocks) -> Rule:  # noqa: PLR0915 - see above: one loop
    """Do B, if its gradient is there; else a forward, if its input is there and there is room; else W."""
    step, note, room, space = lane.step, lane.kinds.append, lane.window, lane.most_held
    inputs, gradients, (forward_s, backward_s, weights_s) = lane.inputs, lane.gradients, lane.work
    down, down_place, down_width, send_s = lane.down
    up, up_place, up_width, send_back_s = lane.up
    wake, waits, slack_s, ahead = clocks.wake, clocks.waits, clocks.slack_s, clocks.ahead
    forward = backward = weights = lane.number
    asked_s = now_s = yield inf
    while True:
        until_s = now_s + slack_s
        gradient_s, input_s = gradients[backward], inputs[forward] if room and space else CLOSED
        if gradient_s <= until_s:
            note(BACKWARD)
            now_s = (gradient_s if gradient_s > now_s else now_s) + backward_s[backward]
            up[backward] = arrives_s = now_s + send_back_s
            other = up_place + backward % up_width
            backward, room = backward + step, room + 1
        else:
            sure = gradient_s < inf or until_s < asked_s + lane.soonest_gradient_s
            if input_s <= until_s and sure:
                note(FORWARD)
                now_s = (input_s if input_s > now_s else now_s) + forward_s[forward]
                down[forward] = arrives_s = now_s + send_s
                other = down_place + forward % down_width
                forward, room, space = forward + step, room - 1, space - 1
            elif not sure or (input_s == inf and until_s >= asked_s + lane.soonest_input_s):
                lane.next = forward, backward, weights
                asked_s = now_s = yield now_s
                continue
            elif weights < backward:
                note(WEIGHTS)
                now_s, arrives_s = now_s + weights_s[weights], inf
                weights, space = weights + step, space + 1
            elif gradient_s < inf and input_s < inf and ahead:
                now_s = gradient_s if gradient_s < input_s else input_s
                continue
            else:
                lane.next, lane.end_s = (forward, backward, weights), now_s
                waits[lane.place] = gradient_s if gradient_s < input_s else input_s
                asked_s = now_s = yield waits[lane.place]
                waits[lane.place] = -inf
                continue
        if arrives_s < waits[other]:
            waits[other] = wake[other] = arrives_s
        if not ahead:
            lane.next = forward, backward, weights
            asked_s = now_s = yield now_s
