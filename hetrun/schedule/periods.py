"""Ends of the lanes without a record, where all microbatches of a stage are alike: what only repeats is skipped.

Once all lanes stand as they stood some microbatches ago, but for a shift of all clocks, they go on doing so until the
first stage runs out of microbatches. So it is given fewer, and what that saved is added to all ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, lcm

from hetrun.schedule.lanes import Lanes
from hetrun.schedule.rules import CLOSED

_SAME = 1e-13  # shifts that differ by less, relative to the clock, differ by rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """All that what follows depends on, seen from the first lane's backward `done` and from `now_s`."""

    done: int
    now_s: float
    counts: tuple[int, ...]
    times_s: tuple[float, ...]


def play_skipping(lanes: Lanes) -> None:
    """Play to the end without a record; only `Lane.end_s` is to be read afterwards.

    Raises:
        ValueError: microbatches differ, or some lane never got what it waits for.
    """
    if any(len(set(seconds)) > 1 for lane in lanes.lanes for seconds in lane.work):
        raise ValueError("pipeline: periods need microbatches that are alike")
    longest = len(lanes.lanes) * lcm(*(lane.step for lane in lanes.lanes))
    head, wake, asks = lanes.lanes[0], lanes.wake, lanes.asks
    states: list[_State] = []
    next_check = 2 * longest
    seen, skipped_s = 0, 0.0
    now_s = min(wake)
    while now_s < CLOSED:
        place = wake.index(now_s)
        wake[place] = asks[place](now_s)
        done = head.next[1]
        if done != seen:
            seen = done
            if done >= next_check - longest:
                states.append(_state(lanes, done, now_s))
            if done >= next_check:
                skipped_s += _skip(lanes, states)
                states = []
                next_check = done + 2 * longest
        now_s = min(wake)
    lanes.check_done()
    for lane in lanes.lanes:
        lane.end_s += skipped_s


def _state(lanes: Lanes, done: int, now_s: float) -> _State:
    counts: list[int] = []
    times: list[float] = []
    for lane, wake_s, waits_s in zip(lanes.lanes, lanes.wake, lanes.waits, strict=True):
        counts += [*(microbatch - done for microbatch in lane.next), waits_s > -inf]
        times.append(wake_s - now_s)
        forward, backward, _ = lane.next
        inputs = _known(lane.inputs, forward, lane.step) if lane.stage else []
        for arrivals in (inputs, _known(lane.gradients, backward, lane.step)):
            counts.append(len(arrivals))
            times += [time_s - now_s for time_s in arrivals]
    return _State(done=done, now_s=now_s, counts=tuple(counts), times_s=tuple(times))


def _known(arrivals: Sequence[float], begin: int, step: int) -> list[float]:
    """Return the arrivals of a lane that are known and not used yet."""
    end = begin
    while arrivals[end] < inf:
        end += step
    return list(arrivals[begin:end:step])


def _skip(lanes: Lanes, states: Sequence[_State]) -> float:
    """Leave out as many whole periods as the first stage has microbatches for, if there is one; return their seconds."""
    now = states[-1]
    slack_s = _SAME * now.now_s
    for before in reversed(states[:-1]):
        if now.counts == before.counts and all(
            a == b or abs(a - b) <= slack_s
            for a, b in zip(now.times_s, before.times_s, strict=True)
        ):
            period = now.done - before.done
            first = [lane for lane in lanes.lanes if lane.stage == 0]
            times = (lanes.count - 1 - max(lane.next[0] for lane in first)) // period
            if times > 0:
                lanes.count -= times * period
                inputs = first[0].inputs
                inputs[lanes.count :] = [inf] * (len(inputs) - lanes.count)
                return times * (now.now_s - before.now_s)
            break
    return 0.0
