"""Bounded zero bubble and fractional cuts, simulated. Not offered by the planner: the runtime executes 1F1B only.

The backward of a microbatch falls into B (gradient of the input, which the stage upstream waits for) and W (gradient
of the weights, which nobody waits for). A stage does a B when one is ready, else a forward while fewer than `window`
of these run ahead of their B, else a W; W may be put off only until `most_held` microbatches are held. Without that
bound the same order holds every activation and looks a little better than it can be had for.

Fractional cuts: with a real boundary X between two stages, microbatch i cuts at floor(X + frac(0.618 i)), so that a
stage's average share of the layers matches its speed; the boundary layer lives on both neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import floor

GOLDEN = 0.618  # spreads the fractions of consecutive microbatches evenly

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStage:
    """Seconds of F, B and W of each microbatch on one stage; `send_s` is the link to the next one, one way."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weights_s: tuple[float, ...]
    send_s: float
    window: int  # forwards that may run ahead of their B
    most_held: int  # microbatches whose W is not done

    def __post_init__(self) -> None:
        if not len(self.forward_s) == len(self.backward_s) == len(self.weights_s) > 0:
            raise ValueError("stage: need F, B and W of every microbatch, and one of these")
        if not 1 <= self.window <= self.most_held:
            raise ValueError(f"stage: window {self.window}, need 1 to most_held {self.most_held}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRun:
    """When each stage is done, the most microbatches that each held at once, and its order as (kind, microbatch)."""

    stage_end_s: tuple[float, ...]
    peak_activations: tuple[int, ...]
    orders: tuple[tuple[tuple[int, int], ...], ...]
    num_events: int

    @property
    def end_s(self) -> float:
        """When the last stage is done."""
        return max(self.stage_end_s)


def bounded_windows(num_stages: int, stage: int) -> tuple[int, int]:
    """Return window and most_held that hide the bubble at two to three activations more than 1F1B: p-s+2, p-s+3."""
    return num_stages - stage + 2, num_stages - stage + 3


def cut_at(boundary: float, microbatch: int) -> int:
    """Return the first layer behind a real boundary, for one microbatch."""
    return floor(boundary + (GOLDEN * microbatch) % 1.0)


def layers_at(boundaries: Sequence[float], num_layers: int, microbatch: int) -> tuple[int, ...]:
    """Return layers per stage of one microbatch; `boundaries` are the real cuts between stages, ascending."""
    cuts = [0, *(min(cut_at(x, microbatch), num_layers) for x in boundaries), num_layers]
    return tuple(end - begin for begin, end in pairwise(cuts))


def held_layers(boundaries: Sequence[float], num_layers: int) -> tuple[tuple[int, int], ...]:
    """Return [first, end) of the layers that each stage has to hold: boundary layers live on both sides."""
    firsts = [0, *(floor(x) for x in boundaries)]
    ends = [*(floor(x) + (x != floor(x)) for x in boundaries), num_layers]
    return tuple(zip(firsts, ends, strict=True))


def even_boundaries(
    num_layers: int, speeds: Sequence[float], *, first_extra: float = 0.0, last_extra: float = 0.0
) -> tuple[float, ...]:
    """Return real cuts at which all stages take equally long; extras (embedding, head) in layers.

    Raises:
        ValueError: an end does more than its share already.
    """
    total = num_layers + first_extra + last_extra
    cuts: list[float] = []
    done = -first_extra
    for speed in speeds[:-1]:
        done += total * speed / sum(speeds)
        cuts.append(done)
    if any(
        end < begin for begin, end in zip([0.0, *cuts], [*cuts, float(num_layers)], strict=True)
    ):
        raise ValueError(f"cuts {cuts} of {num_layers} layers are not in order")
    return tuple(cuts)


class _Stage:
    """What one stage has done and what it waits for."""

    __slots__ = ("busy", "done", "end_s", "inputs", "order", "peak", "plan")

    def __init__(self, plan: SplitStage) -> None:
        self.plan = plan
        self.inputs: tuple[list[float], list[float]] = ([], [])  # arrivals of F and B inputs
        self.done = [0, 0, 0]  # F, B, W
        self.order: list[tuple[int, int]] = []
        self.peak = 0
        self.busy = False
        self.end_s = 0.0

    def next_kind(self, now_s: float) -> int | None:
        """Return what to do now, None if there is nothing to do yet."""
        forwards, backwards, weights = self.done
        arrived_f, arrived_b = self.inputs
        if backwards < len(arrived_b) and arrived_b[backwards] <= now_s and backwards < forwards:
            return BACKWARD
        held = forwards - weights
        room = forwards - backwards < self.plan.window and held < self.plan.most_held
        if room and forwards < len(arrived_f) and arrived_f[forwards] <= now_s:
            return FORWARD
        return WEIGHTS if weights < backwards else None


def simulate_split(stages: Sequence[SplitStage]) -> SplitRun:
    """Simulate one step of a pipeline with B and W apart, as a queue of events.

    Raises:
        ValueError: no stage, or stages of different numbers of microbatches.
    """
    if not stages or len({len(stage.forward_s) for stage in stages}) != 1:
        raise ValueError("pipeline: need stages with equally many microbatches")
    count = len(stages[0].forward_s)
    states = [_Stage(stage) for stage in stages]
    states[0].inputs[0].extend([0.0] * count)
    queue: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # time, ends before arrivals, stage
    num_events = 0
    while queue:
        now_s, is_arrival, index = heappop(queue)
        state = states[index]
        if not is_arrival:
            state.busy = False
        if state.busy:
            continue
        kind = state.next_kind(now_s)
        if kind is None:
            continue
        num_events += 1
        _start(states, queue, index, kind, now_s)
    if any(state.done != [count] * 3 for state in states):
        raise ValueError(f"pipeline stalls after {[state.done for state in states]} of {count}")
    return SplitRun(
        stage_end_s=tuple(state.end_s for state in states),
        peak_activations=tuple(state.peak for state in states),
        orders=tuple(tuple(state.order) for state in states),
        num_events=num_events,
    )


def _start(
    states: Sequence[_Stage],
    queue: list[tuple[float, int, int]],
    index: int,
    kind: int,
    now_s: float,
) -> None:
    """Let a stage do one thing, and tell the neighbour that waits for it when it arrives."""
    state, last = states[index], len(states) - 1
    number = state.done[kind]
    plan = state.plan
    seconds = (plan.forward_s, plan.backward_s, plan.weights_s)[kind][number]
    state.end_s = end_s = now_s + seconds
    state.done[kind] += 1
    state.order.append((kind, number))
    state.busy = True
    heappush(queue, (end_s, 0, index))
    if kind == FORWARD:
        state.peak = max(state.peak, state.done[FORWARD] - state.done[WEIGHTS])
        target, arrives_s = (index + 1, end_s + plan.send_s) if index < last else (index, end_s)
        kind_there = FORWARD if index < last else BACKWARD
    elif kind == BACKWARD and index:
        target, arrives_s = index - 1, end_s + states[index - 1].plan.send_s
        kind_there = BACKWARD
    else:
        return
    states[target].inputs[kind_there].append(arrives_s)
    heappush(queue, (arrives_s, 1, target))


def split_stages(
    layers: Callable[[int], Sequence[int]],
    speeds: Sequence[float],
    num_microbatches: int,
    *,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
) -> tuple[SplitStage, ...]:
    """Return bounded stages of a pipeline without link times whose B and W take as long as F.

    `layers(i)` is layers per stage of microbatch i, extras (embedding, head) are in layers, `speeds` in layers per
    second of one pass.
    """
    size = len(speeds)
    work = [list(layers(i)) for i in range(num_microbatches)]
    stages = []
    for s, speed in enumerate(speeds):
        extra = first_extra * (s == 0) + last_extra * (s == size - 1)
        seconds = tuple((work[i][s] + extra) / speed for i in range(num_microbatches))
        window, most_held = bounded_windows(size, s)
        stages.append(
            SplitStage(
                forward_s=seconds,
                backward_s=seconds,
                weights_s=seconds,
                send_s=0.0,
                window=window,
                most_held=most_held,
            )
        )
    return tuple(stages)
