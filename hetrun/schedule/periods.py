"""Ends of the lanes without a record, where all microbatches of a stage are alike: what only repeats is skipped.

Once all lanes stand as they stood some microbatches ago, but for a shift of all clocks, they go on doing so until the
first stage runs out of microbatches. So it is given fewer, and what that saved is added to all ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, lcm

from hetrun.schedule.lanes import Lanes
from hetrun.schedule.rules import CLOSED

_SAME = 1e-13  # shifts that differ by less, relative to the clock, differ by rounding
_LaneState = tuple[tuple[int, ...], tuple[float, ...]]  # microbatches and times


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """All that what follows depends on, seen from the first lane's backward `done` and from `now_s`."""

    done: int
    now_s: float
    lanes: tuple[_LaneState, ...]


def play_skipping(lanes: Lanes) -> None:
    """Play to the end without a record; only `Lane.end_s` is to be read afterwards.

    What comes is compared with one state, which is renewed whenever twice as many microbatches are done (Brent's way
    to find a period), until one period is found.

    Raises:
        ValueError: microbatches differ, or some lane never got what it waits for.
    """
    if any(len(set(seconds)) > 1 for lane in lanes.lanes for seconds in lane.work):
        raise ValueError("pipeline: periods need microbatches that are alike")
    head, wake, asks = lanes.lanes[0], lanes.wake, lanes.asks
    before: _State | None = None
    renewed_at = len(lanes.lanes) * lcm(*(lane.step for lane in lanes.lanes))
    seen, skipped_s = 0, 0.0
    now_s = min(wake)
    while now_s < CLOSED:
        place = wake.index(now_s)
        wake[place] = asks[place](now_s)
        done = head.next[1]
        if done != seen:
            seen = done
            if before is not None and _repeats(lanes, done, now_s, before):
                skipped_s = _skip(lanes, done - before.done, now_s - before.now_s)
                before, renewed_at = None, lanes.count  # the rest is shorter than the period
            elif done >= renewed_at:
                before = _State(
                    done=done, now_s=now_s, lanes=tuple(_lane_states(lanes, done, now_s))
                )
                renewed_at = 2 * done
        now_s = min(wake)
    lanes.check_done()
    for lane in lanes.lanes:
        lane.end_s += skipped_s


def _lane_states(lanes: Lanes, done: int, now_s: float) -> Iterator[_LaneState]:
    for lane, wake_s, waits_s in zip(lanes.lanes, lanes.wake, lanes.waits, strict=True):
        forward, backward, weights = lane.next
        inputs = _known(lane.inputs, forward, lane.step) if lane.stage else []
        gradients = _known(lane.gradients, backward, lane.step)
        counts = (
            *(forward - done, backward - done, weights - done),
            *(waits_s > -inf, len(inputs), len(gradients)),
        )
        yield counts, tuple(time_s - now_s for time_s in (wake_s, *inputs, *gradients))


def _known(arrivals: Sequence[float], begin: int, step: int) -> list[float]:
    """Return the arrivals of a lane that are known and not used yet."""
    end = begin
    while arrivals[end] < inf:
        end += step
    return list(arrivals[begin:end:step])


def _repeats(lanes: Lanes, done: int, now_s: float, before: _State) -> bool:
    """Whether all lanes stand as they did before, but for the shift of the clock."""
    slack_s = _SAME * now_s
    return all(
        counts == old_counts
        and all(a == b or abs(a - b) <= slack_s for a, b in zip(times_s, old_s, strict=True))
        for (counts, times_s), (old_counts, old_s) in zip(
            _lane_states(lanes, done, now_s), before.lanes, strict=True
        )
    )


def _skip(lanes: Lanes, period: int, period_s: float) -> float:
    """Leave out as many whole periods as the first stage has microbatches for; return their seconds."""
    first = [lane for lane in lanes.lanes if lane.stage == 0]
    times = (lanes.count - 1 - max(lane.next[0] for lane in first)) // period
    if times <= 0:
        return 0.0
    lanes.count -= times * period
    inputs = first[0].inputs
    inputs[lanes.count :] = [inf] * (len(inputs) - lanes.count)
    return times * period_s
