"""SynerFuse: uneven layers per stage, or uneven microbatches per replica, as flags on top of Megatron-LM's.

Its rules: the stage counts of `--hetero-pipeline-stages` add up to the pipeline size and the layers to all
layers; n of the `-per-dp` lists add up to the data-parallel size, and n x size x count to the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.model import Plan, ReplicaPlan
from hetrun.planner.export.common import (
    Export,
    blocks,
    common_pipeline,
    host_runs,
    model_flags,
    no_empty_stage,
    one_tp,
    plain_losses,
    recompute_flags,
    replica_major,
    same_layers,
    shell_text,
    stage_major,
)

TARGET = "synerfuse"


def to_synerfuse(plan: Plan) -> Export:
    """Return SynerFuse's flags.

    Raises:
        ConfigError: replicas are cut otherwise, or stages differ in tensor parallelism.
    """
    replicas = plan.split.replicas
    rows = [(r.microbatch_rows, r.num_microbatches) for r in replicas]
    uneven_rows = len(set(rows)) > 1
    replica = same_layers(plan, TARGET) if uneven_rows else common_pipeline(plan, TARGET)
    no_empty_stage(TARGET, replica.stages)
    tp = one_tp(TARGET, replica.stages)
    layers = [stage.num_layers for stage in replica.stages]
    lost = plain_losses(plan)
    flags = [
        f"--tensor-model-parallel-size {tp}",
        f"--pipeline-model-parallel-size {len(layers)}",
        f"--global-batch-size {plan.recipe.train.global_batch_rows}",
    ]
    order = stage_major(plan)
    if uneven_rows:
        order = replica_major(plan)
        flags += _row_flags(replicas)
    else:
        flags.append(f"--micro-batch-size {replica.microbatch_rows}")
    if len(layers) > 1 and (len(set(layers)) > 1 or len(blocks(plan, replica)) > 1):
        flags.append("--hetero-pipeline-stages " + _numbers(_stage_list(plan, replica)))
        if uneven_rows:
            lost.append("SynerFuse documents uneven layers and uneven rows apart, not together")
    runs = host_runs(plan, TARGET, order, lost)
    flags += recompute_flags(replicas, lost)
    flags += model_flags(plan, lost)
    text = shell_text(plan, "SynerFuse", flags, runs=runs, lost=lost)
    return Export(target=TARGET, text=text, lost=tuple(lost))


def _row_flags(replicas: Sequence[ReplicaPlan]) -> list[str]:
    """Return the flags of uneven rows; runs of replicas must agree in both lists, so they are cut where either changes."""
    sizes, counts = [], []
    runs: list[tuple[int, int, int]] = []
    for replica in replicas:
        size, count = replica.microbatch_rows, replica.num_microbatches
        if runs and runs[-1][1:] == (size, count):
            runs[-1] = (runs[-1][0] + 1, size, count)
        else:
            runs.append((1, size, count))
    for number, size, count in runs:
        sizes += [number, size]
        counts += [number, count]
    return [
        "--use-tp-pp-dp-mapping",
        f"--micro-batch-size-per-dp {_numbers(sizes)}",
        f"--num-micro-batches-per-dp {_numbers(counts)}",
    ]


def _stage_list(plan: Plan, replica: ReplicaPlan) -> list[int]:
    """Return per block of one device model: how many stages, then the layers of each."""
    return [
        n for block in blocks(plan, replica) for n in (len(block), *(s.num_layers for s in block))
    ]


def _numbers(values: Sequence[int]) -> str:
    return " ".join(str(value) for value in values)
