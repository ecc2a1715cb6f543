"""Orders of work and the event simulator behind them. What the pieces cost in seconds is decided in `planner/cost.py`.

Planner and worker share this package: the actions that a rank executes are the ones that were simulated.
"""

from hetrun.schedule.bounds import lower_bound_s, steady_cycle_s, upper_bound_s
from hetrun.schedule.cuts import cut_at, even_boundaries, held_layers
from hetrun.schedule.lanes import bounded_windows, lane_windows
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
from hetrun.schedule.replica import (
    LaneRun,
    ReplicaRun,
    layers_of,
    replica_ends,
    simulate_replica,
    work_of,
)
from hetrun.schedule.step import (
    StepRun,
    simulate_step,
    stage_times,
    step_cost,
    step_seconds,
)
from hetrun.schedule.sync import (
    Bucket,
    all_reduce_s,
    find_link,
    gradient_buckets,
    lane_ranks,
    link_between,
)

__all__ = [
    "ActionKind",
    "Bucket",
    "LaneRun",
    "PipelineRun",
    "ReplicaRun",
    "StageTimes",
    "StepRun",
    "TimedAction",
    "all_reduce_s",
    "bounded_windows",
    "cut_at",
    "effective_windows",
    "even_boundaries",
    "find_link",
    "gradient_buckets",
    "held_layers",
    "lane_ranks",
    "lane_windows",
    "layers_of",
    "link_between",
    "lower_bound_s",
    "pipeline_ends",
    "plain_window",
    "replica_ends",
    "simulate_pipeline",
    "simulate_replica",
    "simulate_step",
    "stage_times",
    "steady_cycle_s",
    "step_cost",
    "step_seconds",
    "upper_bound_s",
    "work_of",
]
