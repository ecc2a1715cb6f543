"""Ends of the lanes without a record, where all microbatches of a stage are alike: what only repeats is skipped.

Once all lanes stand as they stood some microbatches ago, but for a shift of all clocks, they go on doing so until the
first stage runs out of microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from hetrun.schedule.lanes import Lane, Lanes

_SAME = 1e-13  # shifts that differ by less, relative to the clock, differ by rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """All that what follows depends on, seen from microbatch `done` of the first stage and from `now_s`."""

    done: int
    now_s: float
    counts: tuple[int, ...]
    times_s: tuple[float, ...]


def play_skipping(lanes: Lanes) -> None:
    """Play to the end without a record; only `Lane.end_s` is to be read afterwards.

    Raises:
        ValueError: a stage has several lanes, or microbatches that differ.
    """
    if any(lane.step > 1 for lane in lanes.lanes) or not all(map(_is_uniform, lanes.lanes)):
        raise ValueError(
            "pipeline: periods need one lane per stage and microbatches that are alike"
        )
    head, size = lanes.lanes[0], len(lanes.lanes)
    states: list[_State] = []
    next_check = 2 * size
    seen = 0
    now_s = min(lanes.wake)
    while now_s < inf:
        place = lanes.wake.index(now_s)
        lane = lanes.lanes[place]
        lanes.wake[place] = lanes.act(lane, now_s)
        done = head.backwards
        if done != seen:
            seen = done
            if done >= next_check - size:
                states.append(_state(lanes, done, now_s))
            if done >= next_check:
                _skip(lanes, states)
                states = []
                seen = head.backwards
                next_check = seen + 2 * size
        now_s = min(lanes.wake)


def _is_uniform(lane: Lane) -> bool:
    return all(len(set(seconds)) == 1 for seconds in lane.seconds)


def _state(lanes: Lanes, done: int, now_s: float) -> _State:
    counts: list[int] = []
    times: list[float] = []
    for lane, wake_s in zip(lanes.lanes, lanes.wake, strict=True):
        counts += [lane.forwards - done, lane.backwards - done, lane.weights - done, lane.idle]
        times.append(wake_s - now_s)
        for arrivals in _waiting(lane):
            counts.append(len(arrivals))
            times += [time_s - now_s for time_s in arrivals]
    return _State(done=done, now_s=now_s, counts=tuple(counts), times_s=tuple(times))


def _waiting(lane: Lane) -> tuple[list[float], list[float]]:
    """Return the inputs and gradients that have come, or are on their way, and are not used yet."""
    inputs = [] if lane.stage == 0 else _known(lane.inputs, lane.forwards)
    return inputs, _known(lane.gradients, lane.backwards)


def _known(arrivals: Sequence[float], place: int) -> list[float]:
    end = place
    while arrivals[end] < inf:
        end += 1
    return list(arrivals[place:end])


def _skip(lanes: Lanes, states: Sequence[_State]) -> None:
    """Move all lanes on by as many whole periods as the first stage has microbatches for, if there is a period."""
    now = states[-1]
    for before in reversed(states[:-1]):
        slack_s = _SAME * now.now_s
        if now.counts == before.counts and all(
            a == b or abs(a - b) <= slack_s
            for a, b in zip(now.times_s, before.times_s, strict=True)
        ):
            period = now.done - before.done
            head = lanes.lanes[0]
            times = (len(head.inputs) - 2 - head.forwards) // period
            if times > 0:
                _move(lanes, times * period, times * (now.now_s - before.now_s))
            return


def _move(lanes: Lanes, microbatches: int, shift_s: float) -> None:
    """Let so many microbatches be done and so much time be past."""
    for place, lane in enumerate(lanes.lanes):
        inputs, gradients = _waiting(lane)
        lane.forwards += microbatches
        lane.backwards += microbatches
        lane.weights += microbatches
        lanes.wake[place] += shift_s
        begin = lane.forwards
        if lane.stage:
            lane.inputs[begin : begin + len(inputs)] = [s + shift_s for s in inputs]
        begin = lane.backwards
        lane.gradients[begin : begin + len(gradients)] = [s + shift_s for s in gradients]
