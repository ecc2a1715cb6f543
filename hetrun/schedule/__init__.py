"""Orders of work and the event simulator behind them. What the pieces cost in seconds is decided in `planner/cost.py`.

Planner and worker share this package: the actions that a rank executes are the ones that were simulated.
"""

from hetrun.schedule.bounds import lower_bound_s, steady_cycle_s, upper_bound_s
from hetrun.schedule.pipeline import (
    ActionKind,
    PipelineRun,
    StageTimes,
    TimedAction,
    effective_windows,
    pipeline_ends,
    plain_window,
    simulate_pipeline,
)
from hetrun.schedule.step import StepRun, simulate_step, stage_times, step_cost
from hetrun.schedule.sync import Bucket, all_reduce_s, find_link, gradient_buckets, link_between

__all__ = [
    "ActionKind",
    "Bucket",
    "PipelineRun",
    "StageTimes",
    "StepRun",
    "TimedAction",
    "all_reduce_s",
    "effective_windows",
    "find_link",
    "gradient_buckets",
    "link_between",
    "lower_bound_s",
    "pipeline_ends",
    "plain_window",
    "simulate_pipeline",
    "simulate_step",
    "stage_times",
    "steady_cycle_s",
    "step_cost",
    "upper_bound_s",
]
