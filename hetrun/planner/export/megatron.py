"""Megatron-LM: one layout of stages for all replicas, equal microbatches. Flags and the layout string of its custom pipeline layout.

In the layout `E` is the embedding, `t` a decoder layer, `L` the loss with the head, `|` a border of stages, `t*3` three layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.model import Plan, StagePlan
from hetrun.planner.export.common import (
    Export,
    common_pipeline,
    host_runs,
    model_flags,
    one_tp,
    plain_losses,
    recompute_flags,
    refuse,
    same_rows,
    shell_text,
    stage_major,
)

TARGET = "megatron"


def to_megatron(plan: Plan) -> Export:
    """Return Megatron-LM's flags.

    Raises:
        ConfigError: replicas differ in stages, devices or microbatches, or stages in tensor parallelism.
    """
    vendors = {rank.vendor for rank in plan.split.ranks}
    replica = common_pipeline(plan, TARGET)
    same_rows(plan, TARGET)
    tp = one_tp(TARGET, replica.stages)
    lost = plain_losses(plan)
    runs = host_runs(plan, TARGET, stage_major(plan), lost)
    if len(vendors) > 1:
        lost.append("joining vendors: it runs one communication library, so all devices need one")
    depth = len(replica.stages)
    flags = [
        f"--tensor-model-parallel-size {tp}",
        f"--pipeline-model-parallel-size {depth}",
        f"--micro-batch-size {replica.microbatch_rows}",
        f"--global-batch-size {plan.recipe.train.global_batch_rows}",
    ]
    if depth > 1:
        flags.append(f"--pipeline-model-parallel-layout '{layout_of(replica.stages)}'")
    flags += recompute_flags(plan.split.replicas, lost)
    flags += model_flags(plan, lost)
    text = shell_text(plan, "Megatron-LM (custom pipeline layout)", flags, runs=runs, lost=lost)
    return Export(target=TARGET, text=text, lost=tuple(lost))


def layout_of(stages: Sequence[StagePlan]) -> str:
    """Return the layout string, such as "Et*3|t*5|t*4,L"; commas are for the eye."""
    parts = []
    for index, stage in enumerate(stages):
        layers = "t" * stage.num_layers if stage.num_layers < 2 else f"t*{stage.num_layers}"
        first, last = index == 0, index == len(stages) - 1
        if not layers and not first and not last:
            raise refuse(TARGET, "a stage between others holds no layer", "lower plan.max_stages")
        tail = (",L" if layers or first else "L") if last else ""
        parts.append(("E" if first else "") + layers + tail)
    return "|".join(parts)
