"""Order and times of forwards and backwards on the stages of one pipeline. Gradient sync is left to `sync.py`.

1F1B with a window k per stage: k forwards, then one backward and one forward in turn, at last the backwards
that are left. (Doing a backward whenever one is ready sounds better and is not: two in a row starve the stages
downstream; over random pipelines it was 4 to 6 % slower and broke the bounds of `bounds.py`.)
The order is static and the same on planner and worker, so the lists can be executed as they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

_SAME = 1e-13  # shifts that differ by less, relative to the clock, differ by rounding


class ActionKind(str, Enum):
    """What a stage does with one microbatch."""

    FORWARD = "F"
    BACKWARD = "B"  # where W is apart: the gradient of the input alone
    WEIGHTS = "W"  # the gradient of the weights, where the order is zero bubble


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one microbatch on one stage; `send_s` is the link to the next stage, one way."""

    forward_s: float
    backward_s: float
    send_s: float  # not looked at on the last stage
    window: int  # forwards that may run ahead of their backwards; plain 1F1B: stages - index

    def __post_init__(self) -> None:
        if min(self.forward_s, self.backward_s, self.send_s) < 0:
            raise ValueError(f"{self}: times need 0 or more")
        if self.window < 1:
            raise ValueError(f"{self}: window needs at least 1")


class TimedAction(NamedTuple):
    """One action on one microbatch, in seconds from the start of the step."""

    kind: ActionKind
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """All actions of a pipeline, per stage in the order in which they run, and how many activations pile up."""

    actions: tuple[tuple[TimedAction, ...], ...]
    end_s: float
    stage_end_s: tuple[float, ...]
    peak_activations: tuple[int, ...]


@dataclass(slots=True)
class _StageLog:
    """When each forward and backward of one stage started and ended, by microbatch."""

    window: int
    forward_starts: list[float] = field(default_factory=list)
    forward_ends: list[float] = field(default_factory=list)
    backward_starts: list[float] = field(default_factory=list)
    backward_ends: list[float] = field(default_factory=list)


def plain_window(num_stages: int, stage: int) -> int:
    """Window of plain 1F1B: the stages from here to the end."""
    return num_stages - stage


def effective_windows(stages: Sequence[StageTimes], num_microbatches: int) -> tuple[int, ...]:
    """Return how many forwards each stage does before its first backward, its peak of activations.

    A stage cannot run further ahead than the one that feeds it, nor than there are microbatches.
    """
    windows: list[int] = []
    limit = num_microbatches
    for stage in stages:
        limit = min(limit, stage.window)
        windows.append(limit)
    return tuple(windows)


def stage_order(window: int, num_microbatches: int) -> tuple[tuple[ActionKind, int], ...]:
    """Return the actions of a stage with this effective window, in order."""
    order = [(ActionKind.FORWARD, microbatch) for microbatch in range(window)]
    for microbatch in range(num_microbatches):
        order.append((ActionKind.BACKWARD, microbatch))
        if microbatch + window < num_microbatches:
            order.append((ActionKind.FORWARD, microbatch + window))
    return tuple(order)


def simulate_pipeline(stages: Sequence[StageTimes], num_microbatches: int) -> PipelineRun:
    """Simulate one step of a pipeline.

    The activation of a microbatch leaves a stage when its forward ends and arrives `send_s` later; its
    gradient comes back over the same link in the same time. Sends cost the stages nothing.

    Raises:
        ValueError: no stage or no microbatch.
    """
    logs = _play(stages, num_microbatches)
    return PipelineRun(
        actions=tuple(_actions(log, num_microbatches) for log in logs),
        end_s=max(log.backward_ends[-1] for log in logs),
        stage_end_s=tuple(log.backward_ends[-1] for log in logs),
        peak_activations=tuple(log.window for log in logs),
    )


def pipeline_ends(stages: Sequence[StageTimes], num_microbatches: int) -> tuple[float, ...]:
    """Return when each stage is done, as `simulate_pipeline` does (to rounding) but without a record.

    Once a round repeats an earlier one but for a shift of all clocks, all later rounds do, so they are skipped.
    """
    _check(stages, num_microbatches)
    return _Rounds(stages, num_microbatches).play()


class _Rounds:
    """The rounds of `_play` for their end alone, with what is left of earlier rounds kept short."""

    def __init__(self, stages: Sequence[StageTimes], num_microbatches: int) -> None:
        self.windows = effective_windows(stages, num_microbatches)
        self.forward = [stage.forward_s for stage in stages]
        self.backward = [stage.backward_s for stage in stages]
        self.send = [stage.send_s for stage in stages[:-1]]
        self.num_microbatches = num_microbatches
        self.clocks = [0.0] * len(stages)
        self.arrivals: list[list[float]] = [[] for _ in stages]  # at each stage, not yet used

    def play(self) -> tuple[float, ...]:
        """Play all rounds, skipping those that only repeat."""
        size = len(self.clocks)
        states: list[list[float]] = []  # of the last rounds before a check
        next_check = 2 * size
        number = 0
        full = (
            self.num_microbatches - self.windows[0]
        )  # rounds after the first that still start a forward
        while number < self.num_microbatches:
            self._round(number)
            number += 1
            if number > full - size:
                continue
            if number >= next_check - size:
                states.append(self._state())
            if number == next_check:
                number += self._skip(states, full - number)
                states = []
                next_check = number + 2 * size
        return tuple(self.clocks)

    def _round(self, number: int) -> None:
        """Forwards that precede backward `number`, then that backward, on all stages."""
        clocks, windows, last = self.clocks, self.windows, len(self.clocks) - 1
        for index, forward_s in enumerate(self.forward):
            if number:
                count = 1 if number + windows[index] <= self.num_microbatches else 0
            else:
                count = windows[index]
            clock = clocks[index]
            arrived = self.arrivals[index]
            for place in range(count):
                if index and arrived[place] > clock:
                    clock = arrived[place]
                clock += forward_s
                if index < last:
                    self.arrivals[index + 1].append(clock + self.send[index])
            if index and count:
                del arrived[:count]
            clocks[index] = clock
        ready = 0.0
        for index in range(last, -1, -1):
            if index < last:
                ready += self.send[index]
            if clocks[index] > ready:
                ready = clocks[index]
            ready += self.backward[index]
            clocks[index] = ready

    def _state(self) -> list[float]:
        """Return all that later rounds depend on."""
        return self.clocks + [time_s for arrived in self.arrivals for time_s in arrived]

    def _skip(self, states: Sequence[Sequence[float]], most: int) -> int:
        """Move all clocks on by as many whole periods as `most` rounds hold; return the rounds skipped."""
        now = states[-1]
        for period in range(1, len(states)):
            before = states[-1 - period]
            shift = now[0] - before[0]
            slack = _SAME * now[0]
            if all(abs(b - a - shift) <= slack for a, b in zip(before, now, strict=True)):
                times = max(0, most // period)
                self.clocks = [clock + times * shift for clock in self.clocks]
                self.arrivals = [[a + times * shift for a in arrived] for arrived in self.arrivals]
                return times * period
        return 0


def _check(stages: Sequence[StageTimes], num_microbatches: int) -> None:
    if not stages or num_microbatches < 1:
        raise ValueError(
            f"pipeline of {len(stages)} stages, {num_microbatches} microbatches: need 1 of each"
        )


def _play(stages: Sequence[StageTimes], num_microbatches: int) -> list[_StageLog]:
    """Play the pipeline in rounds: round i does what is left of the forwards before backward i, then backward i.

    So every action comes after all that it waits for, and one pass is exact.
    """
    _check(stages, num_microbatches)
    logs = [_StageLog(window) for window in effective_windows(stages, num_microbatches)]
    clocks = [0.0] * len(stages)
    for number in range(num_microbatches):
        _forwards(stages, logs, clocks, number=number, num_microbatches=num_microbatches)
        _backwards(stages, logs, clocks)
    return logs


def _forwards(
    stages: Sequence[StageTimes],
    logs: Sequence[_StageLog],
    clocks: list[float],
    *,
    number: int,
    num_microbatches: int,
) -> None:
    """Run the forwards that precede backward `number`: the whole warm-up in round 0, then one per stage."""
    arrivals: list[float] = []  # when forwards of the stage before end
    send_s = 0.0
    for index, stage in enumerate(stages):
        log = logs[index]
        clock = clocks[index]
        for microbatch in range(len(log.forward_ends), min(number + log.window, num_microbatches)):
            if index and arrivals[microbatch] + send_s > clock:
                clock = arrivals[microbatch] + send_s
            log.forward_starts.append(clock)
            clock += stage.forward_s
            log.forward_ends.append(clock)
        clocks[index] = clock
        arrivals = log.forward_ends
        send_s = stage.send_s


def _backwards(
    stages: Sequence[StageTimes], logs: Sequence[_StageLog], clocks: list[float]
) -> None:
    """Run the next backward of every stage, last stage first."""
    ready = clocks[-1]
    for index in range(len(stages) - 1, -1, -1):
        stage = stages[index]
        log = logs[index]
        if index < len(stages) - 1:
            ready += stage.send_s
        start = max(clocks[index], ready)
        log.backward_starts.append(start)
        clocks[index] = ready = start + stage.backward_s
        log.backward_ends.append(ready)


def _actions(log: _StageLog, num_microbatches: int) -> tuple[TimedAction, ...]:
    """Return the record of a stage as a list of actions in the order in which they ran."""
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    return tuple(
        TimedAction(kind, i, log.forward_starts[i], log.forward_ends[i])
        if kind is forward
        else TimedAction(backward, i, log.backward_starts[i], log.backward_ends[i])
        for kind, i in stage_order(log.window, num_microbatches)
    )
