"""FlagScale: process meshes [tp, cp, ep, dp, pp] of one device type each, chained along the pipeline, as its hetero YAML.

Its rules: pp of all meshes add up to the pipeline size, layers to all layers; dp of the first mesh x microbatch
rows is divisible by every mesh's dp; cp and ep are equal; tied embeddings need equal tp at both ends; no virtual
pipeline and no stage without layers.
"""

from __future__ import annotations

from hetrun.model import Dtype, Plan, StagePlan
from hetrun.planner.export.common import (
    Export,
    HostRun,
    blocks,
    common_pipeline,
    host_lines,
    host_runs,
    no_empty_stage,
    plain_losses,
    printable_name,
    refuse,
    same_rows,
    stage_major,
)

TARGET = "flagscale"


def to_flagscale(plan: Plan) -> Export:
    """Return the part of FlagScale's train YAML that a plan decides, and a host file below it as comments.

    Raises:
        ConfigError: replicas differ, a stage has no layers, or tied embeddings meet different tp.
    """
    replica = common_pipeline(plan, TARGET)
    same_rows(plan, TARGET)
    no_empty_stage(TARGET, replica.stages)
    first, last = len(replica.stages[0].ranks), len(replica.stages[-1].ranks)
    if plan.recipe.model.tied_embeddings and first != last:
        raise refuse(
            TARGET,
            f"tied embeddings with tensor parallelism {first} at one end and {last} at the other",
            "plan with one size in plan.tp",
        )
    meshes = blocks(plan, replica)
    lost = plain_losses(plan)
    runs = host_runs(plan, TARGET, _order(plan, meshes), lost)
    model = plan.recipe.model
    if model.counts is not None:
        lost.append(f"model keys beyond sizes: take those of a {model.family} from its config")
    lost.append("data, tokenizer and optimizer keys beyond those here: give FlagScale's own")
    head = [f"# hetrun plan {plan.recipe.name} for FlagScale (train YAML)"]
    head += [f"# lost: {line}" for line in lost]
    body = [*_system(plan, meshes), *_recompute(plan), *_model(plan)]
    text = "\n".join([*head, *host_lines(runs), *_hostfile(runs), *body, ""])
    return Export(target=TARGET, text=text, lost=tuple(lost))


def _order(plan: Plan, meshes: list[list[StagePlan]]) -> list[int]:
    """Ranks mesh by mesh; inside a mesh tp, then dp, then pp."""
    order: list[int] = []
    done = 0
    for mesh in meshes:
        order += stage_major(plan, range(done, done + len(mesh)))
        done += len(mesh)
    return order


def _system(plan: Plan, meshes: list[list[StagePlan]]) -> list[str]:
    dp = len(plan.split.replicas)
    flat = [n for mesh in meshes for n in (len(mesh[0].ranks), 1, 1, dp, len(mesh))]
    layers = [stage.num_layers for mesh in meshes for stage in mesh]
    types = [printable_name(plan.split.ranks[mesh[0].ranks[0]].model) for mesh in meshes]
    return [
        "system:",
        f"  tensor_model_parallel_size: {len(meshes[0][0].ranks)}",
        f"  pipeline_model_parallel_size: {len(layers)}",
        *(["  use_distributed_optimizer: true"] if plan.split.replicas[0].zero else []),
        *(
            ["  precision:", "    bf16: true"]
            if plan.recipe.train.dtype in (Dtype.BF16, Dtype.BF16_MIXED)
            else []
        ),
        "  hetero:",
        "    enable_hetero: true",
        f"    hetero_device_types: [{', '.join(_quoted(name) for name in types)}]",
        f"    hetero_current_device_type: {_quoted(types[0])}  # the type of the node that reads this",
        f"    hetero_process_meshes: {flat}  # tp, cp, ep, dp, pp of each",
        f"    hetero_pipeline_layer_split: {layers}",
    ]


def _recompute(plan: Plan) -> list[str]:
    """Return full recomputation per stage, as "[stages, microbatches, 1 or 0]" each, where some stage recomputes."""
    replica = plan.split.replicas[0]
    if not any(stage.recompute for stage in replica.stages):
        return []
    each = [f"[1, {replica.num_microbatches}, {int(s.recompute)}]" for s in replica.stages]
    ones = [f"[1, {replica.num_microbatches}, 1]" for _ in replica.stages]
    return [
        "  recompute:",
        "    recompute_granularity: full",
        "    recompute_method: uniform",
        "    recompute_num_layers: 1",
        f"    recompute_granularity_per_stage_micro_batch: [{_all_quoted(each)}]",
        f"    recompute_method_per_stage_micro_batch: [{_all_quoted(each)}]",
        f"    recompute_num_layers_per_stage_micro_batch: [{_all_quoted(ones)}]",
    ]


def _all_quoted(texts: list[str]) -> str:
    return ", ".join(_quoted(text) for text in texts)


def _model(plan: Plan) -> list[str]:
    model, train = plan.recipe.model, plan.recipe.train
    lines = [
        "model:",
        f"  num_layers: {model.num_layers}",
        f"  hidden_size: {model.hidden_size}",
        f"  num_attention_heads: {model.num_heads}",
        f"  seq_length: {plan.recipe.data.seq_len}",
        f"  max_position_embeddings: {plan.recipe.data.seq_len}",
        f"  micro_batch_size: {plan.split.replicas[0].microbatch_rows}",
        f"  global_batch_size: {train.global_batch_rows}",
        f"  train_iters: {train.steps}",
        f"  seed: {train.seed}",
        f"  clip_grad: {train.clip_norm or 0:g}",
    ]
    if model.counts is None:
        if model.num_kv_heads not in (None, model.num_heads):
            lines += ["  group_query_attention: true", f"  num_query_groups: {model.num_kv_heads}"]
        lines += [
            f"  ffn_hidden_size: {model.ffn_size}",
            "  swiglu: true",
            "  normalization: RMSNorm",
            f"  norm_epsilon: {model.norm_eps:g}",
            f"  rotary_base: {model.rope_theta:.0f}",
            "  use_rotary_position_embeddings: true",
            "  disable_bias_linear: true",
            "  attention_dropout: 0.0",
            "  hidden_dropout: 0.0",
            f"  untie_embeddings_and_output_weights: {_yes(not model.tied_embeddings)}",
        ]
    return lines


def _hostfile(runs: tuple[HostRun, ...]) -> list[str]:
    """Return FlagScale's host file as comments; addresses are left to its reader, since they are private."""
    return ["# hostfile:", *(f"#   {r.host} slots={r.num_ranks} type={r.model}" for r in runs)]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _yes(value: bool) -> str:
    return "true" if value else "false"
