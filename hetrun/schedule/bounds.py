"""Closed forms around the event simulation: for pruning and for tests. The truth is `pipeline.py`."""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.schedule.pipeline import StageTimes


def steady_cycle_s(stages: Sequence[StageTimes]) -> float:
    """Seconds per microbatch once the pipeline is full.

    A microbatch travels from stage s to t and back in sum(f + b) + 2 sum(send); between them 1 + k_s - k_t
    microbatches are under way at once. The slowest such loop sets the pace (s = t: the slowest stage).
    """
    cycle = 0.0
    for first, head in enumerate(stages):
        loop_s = 0.0
        for stage in stages[first:]:
            loop_s += stage.forward_s + stage.backward_s
            in_flight = 1 + head.window - stage.window
            if in_flight >= 1:
                cycle = max(cycle, loop_s / in_flight)
            loop_s += 2 * stage.send_s
    return cycle


def fill_s(stages: Sequence[StageTimes]) -> float:
    """Seconds of a single microbatch through all stages and back."""
    compute_s = sum(stage.forward_s + stage.backward_s for stage in stages)
    return compute_s + 2 * sum(stage.send_s for stage in stages[:-1])


def upper_bound_s(stages: Sequence[StageTimes], num_microbatches: int) -> float:
    """Seconds that a step never exceeds: one microbatch alone, then one cycle for each further one.

    While it fills and drains, a pipeline moves at the pace of its slowest forward plus its slowest backward;
    that differs from the steady cycle only where stages differ in how much slower their backward is.
    """
    ends_s = max(stage.forward_s for stage in stages) + max(stage.backward_s for stage in stages)
    return fill_s(stages) + (num_microbatches - 1) * max(steady_cycle_s(stages), ends_s)


def lower_bound_s(stages: Sequence[StageTimes], num_microbatches: int) -> float:
    """Seconds that no order can beat: a stage waits for its first input, works, then its last gradient goes home."""
    bound = way_s = 0.0
    for stage in stages:
        work_s = stage.forward_s + stage.backward_s
        bound = max(bound, way_s + num_microbatches * work_s)
        way_s += work_s + 2 * stage.send_s
    return bound
