"""What all targets ask of a plan: one pipeline for all replicas, ranks in their order, sizes of the model as flags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hetrun.errors import ConfigError
from hetrun.model import Dtype, Plan, RankPlan, ReplicaPlan, StagePlan
from hetrun.planner.cost import Piece, stage_parameters
from hetrun.planner.memory import state_bytes
from hetrun.schedule import step_cost

_DTYPE_FLAG = {
    Dtype.BF16: ("--bf16",),
    Dtype.BF16_MIXED: ("--bf16",),  # Megatron's keeps fp32 masters by itself
    Dtype.FP32: (),
    Dtype.FP64: (),
}
_MANY_HOSTS = 16  # a line of a comment names so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Text for another trainer, and what of the plan it does not carry; `lost` stands in the text as comments too."""

    target: str
    text: str
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostRun:
    """`num_ranks` ranks in a row on one host, all of one device model."""

    host: str
    model: str
    num_ranks: int


def refuse(target: str, why: str, hint: str) -> ConfigError:
    """Return the error that says what a target has no words for."""
    return ConfigError(f"{target} cannot express this plan: {why}", hint=hint)


def plain_orders(plan: Plan, target: str) -> None:
    """Refuse what no target has words for: real cuts, W on its own, stages of several lanes.

    Raises:
        ConfigError: says which, and what to set.
    """
    for number, replica in enumerate(plan.split.replicas):
        if replica.way != "1F1B":
            raise refuse(
                target,
                f"replica {number} runs {replica.way}",
                "plan again with plan.orders: [1f1b] and plan.fractional: false",
            )
        if any(stage.lanes > 1 for stage in replica.stages):
            raise refuse(
                target,
                f"stages of replica {number} take microbatches in turn",
                "plan again with plan.lanes: [1]",
            )


def common_pipeline(plan: Plan, target: str) -> ReplicaPlan:
    """Return the first replica, once all have its stages: layers, device models and tensor parallelism.

    Raises:
        ConfigError: some replica is cut or placed otherwise.
    """
    replicas = plan.split.replicas
    shapes = [_shape(plan, replica) for replica in replicas]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise refuse(
                target,
                f"replica {number} is {_words(shape)}, replica 0 is {_words(shapes[0])}",
                "plan again with plan.max_shapes: 1, or with the devices of one such group only (--what-if)",
            )
    return replicas[0]


def same_layers(plan: Plan, target: str) -> ReplicaPlan:
    """Return the first replica, once all have as many layers per stage and the same tensor parallelism; devices may differ.

    Raises:
        ConfigError: some replica is cut otherwise.
    """
    replicas = plan.split.replicas
    cuts = [[(stage.num_layers, len(stage.ranks)) for stage in r.stages] for r in replicas]
    for number, cut in enumerate(cuts):
        if cut != cuts[0]:
            layers = [num_layers for num_layers, _ in cut]
            raise refuse(
                target,
                f"replica {number} has layers {layers}, replica 0 has {[n for n, _ in cuts[0]]}",
                "plan again with plan.max_shapes: 1, or pin the layers (--pin)",
            )
    return replicas[0]


def same_rows(plan: Plan, target: str) -> None:
    """Refuse replicas that differ in their microbatches."""
    rows = {(r.microbatch_rows, r.num_microbatches) for r in plan.split.replicas}
    if len(rows) > 1:
        shown = ", ".join(f"{count} x {size}" for size, count in sorted(rows))
        raise refuse(
            target,
            f"replicas take different microbatches ({shown} rows)",
            "export to synerfuse, or change train.global_batch_rows so that all replicas can take the same",
        )


def one_tp(target: str, stages: Sequence[StagePlan]) -> int:
    """Return the tensor parallelism that all stages share."""
    sizes = sorted({len(stage.ranks) for stage in stages})
    if len(sizes) > 1:
        raise refuse(
            target,
            f"stages have tensor parallelism {sizes}, it knows one for all",
            "plan with one size in plan.tp, or export to flagscale",
        )
    return sizes[0]


def no_empty_stage(target: str, stages: Iterable[StagePlan]) -> None:
    """Refuse a stage without layers."""
    if any(stage.num_layers == 0 for stage in stages):
        raise refuse(
            target, "a stage holds no layer, only embedding or head", "lower plan.max_stages"
        )


def host_runs(
    plan: Plan, target: str, order: Sequence[int], lost: list[str]
) -> tuple[HostRun, ...]:
    """Return the hosts in the order in which the target numbers its ranks, each host's ranks in a row.

    Where the plan's own places would split a host up, equal devices swap places, and `lost` says so.

    Raises:
        ConfigError: even then some host's ranks would not follow each other, so it can have no node rank.
    """
    ranks = [plan.split.ranks[rank] for rank in order]
    split = _split_host(ranks)
    if split is not None:
        ranks = _host_by_host(plan, ranks)
        lost.append(
            "places of equal devices: ranks are handed out host by host, so links may differ"
        )
        split = _split_host(ranks)
    if split is not None:
        raise refuse(
            target,
            f"its order of ranks would split host {split} up",
            "pin the order of vendors, or give each stage whole hosts",
        )
    return tuple(
        HostRun(host, printable_name(model), len(list(members)))
        for (host, model), members in groupby(ranks, key=lambda rank: (rank.host, rank.model))
    )


def printable_name(name: str) -> str:
    """Return a device model's name on one line, without what could end a comment."""
    return "".join(char for char in name if char.isprintable())


def _split_host(ranks: Sequence[RankPlan]) -> str | None:
    """Return a host whose ranks do not follow each other; None where there is none."""
    done: set[str] = set()
    previous = ""
    for rank in ranks:
        if rank.host != previous and rank.host in done:
            return rank.host
        done.add(rank.host)
        previous = rank.host
    return None


def _host_by_host(plan: Plan, ranks: Sequence[RankPlan]) -> list[RankPlan]:
    """Return a rank of the same device model for each place, taken in the plan's order of hosts."""
    waiting: dict[tuple[str, str], list[RankPlan]] = {}
    for rank in reversed(plan.split.ranks):
        waiting.setdefault((rank.vendor, rank.model), []).append(rank)
    return [waiting[rank.vendor, rank.model].pop() for rank in ranks]


def stage_major(plan: Plan, stages: Iterable[int] | None = None) -> list[int]:
    """Ranks in Megatron's order tp, then dp, then pp: all replicas' first stages, then all second ones."""
    replicas = plan.split.replicas
    numbers = range(len(replicas[0].stages)) if stages is None else stages
    return [r for index in numbers for replica in replicas for r in replica.stages[index].ranks]


def replica_major(plan: Plan) -> list[int]:
    """Ranks in the order tp, then pp, then dp: all stages of the first replica, then those of the second."""
    return [r for replica in plan.split.replicas for stage in replica.stages for r in stage.ranks]


def plain_step_s(plan: Plan) -> float:
    """Return the seconds of a step of the target, which runs plain 1F1B whatever the plan's windows."""
    replicas = []
    for replica in plan.split.replicas:
        depth, most = len(replica.stages), replica.num_microbatches
        stages = [
            replace(stage, window=min(depth - index, most))
            for index, stage in enumerate(replica.stages)
        ]
        replicas.append(replace(replica, stages=tuple(stages)))
    recipe = plan.recipe
    return step_cost(
        plan.split.ranks,
        replicas,
        links=plan.links,
        model=recipe.model,
        dtype=recipe.train.dtype,
    ).step_s


def plain_losses(plan: Plan) -> list[str]:
    """Return what no target carries."""
    lost = []
    for replica in plan.split.replicas[:1]:
        depth = len(replica.stages)
        windows = [stage.window for stage in replica.stages]
        plain = [min(depth - index, replica.num_microbatches) for index in range(depth)]
        if windows != plain:
            more = plain_step_s(plan) / plan.split.cost.step_s - 1
            lost.append(
                f"windows {windows}: the target runs plain 1F1B, {plain}, {more:.2%} slower (modelled)"
            )
    if plan.idle_devices:
        lost.append(f"idle devices are left out of the ranks: {', '.join(plan.idle_devices[:8])}")
    if plan.recipe.train.dtype is Dtype.BF16:
        lost.append(_masters(plan))
    first = plan.split.replicas[0]
    if first.zero and plan.recipe.model.tied_embeddings and len(first.stages) > 1:
        lost.append(
            "optimizer states of the tied matrix: the target shares them among replicas,"
            " not between first and last stage, which take more memory than planned"
        )
    groups, tp = plan.recipe.model.num_kv_heads, max(map(_tp, plan.split.replicas[0].stages))
    if groups is not None and groups % tp:
        lost.append(
            f"{groups} groups of queries over {tp} devices: Megatron-core refuses that before 0.16"
        )
    lost.append(
        f"predicted step {plan.split.cost.step_s:.6g} s (modelled) is of hetrun's own engine"
    )
    return lost


def _tp(stage: StagePlan) -> int:
    return len(stage.ranks) // stage.lanes


def _masters(plan: Plan) -> str:
    """Say what the target's bf16 takes, which trains fp32 masters, and how many devices are too small for that."""
    own, theirs = state_bytes(Dtype.BF16).of(1, 1), state_bytes(Dtype.BF16_MIXED).of(1, 1)
    small = sum(
        len(stage.ranks)
        for replica in plan.split.replicas
        for stage in replica.stages
        if stage.memory_limit_bytes is not None
        and stage.memory_bytes + (theirs - own) * _parameters(plan, stage)
        > stage.memory_limit_bytes
    )
    few = f"on {small} of {len(plan.split.ranks)} devices that is too much" if small else "it fits"
    return (
        f"dtype bf16: the target trains fp32 masters, {theirs} bytes per parameter instead of {own} without a"
        f" distributed optimizer; {few} (dtype: bf16-mixed plans with it)"
    )


def _parameters(plan: Plan, stage: StagePlan) -> int:
    piece = Piece(
        first_layer=stage.first_layer,
        num_layers=stage.num_layers,
        has_embedding=stage.has_embedding,
        has_head=stage.has_head,
    )
    return stage_parameters(plan.recipe.model, piece, tp=_tp(stage))


def model_flags(plan: Plan, lost: list[str]) -> list[str]:
    """Return Megatron's flags of model, optimizer and data sizes; says what is not there."""
    recipe, model = plan.recipe, plan.recipe.model
    train = recipe.train
    flags = [f"--num-layers {model.num_layers}", f"--hidden-size {model.hidden_size}"]
    flags += [f"--num-attention-heads {model.num_heads}", f"--seq-length {recipe.data.seq_len}"]
    flags += [f"--max-position-embeddings {recipe.data.seq_len}"]
    if model.counts is None:
        flags.append(f"--ffn-hidden-size {model.ffn_size}")
        if model.num_kv_heads not in (None, model.num_heads):
            flags += ["--group-query-attention", f"--num-query-groups {model.num_kv_heads}"]
        flags += ["--swiglu", "--normalization RMSNorm", f"--norm-epsilon {model.norm_eps:g}"]
        flags += ["--position-embedding-type rope", f"--rotary-base {model.rope_theta:.0f}"]
        flags += ["--disable-bias-linear", "--attention-dropout 0", "--hidden-dropout 0"]
        if not model.tied_embeddings:
            flags.append("--untie-embeddings-and-output-weights")
    else:
        lost.append(f"model flags beyond sizes: take those of a {model.family} from its config")
    flags += [f"--train-iters {train.steps}", f"--lr {train.learning_rate:g}"]
    flags += [f"--lr-decay-style {train.decay.value}"]
    flags += [f"--min-lr {train.learning_rate * train.final_fraction:g}"] * (
        train.decay != "constant"
    )
    flags += [f"--lr-warmup-iters {train.warmup_steps}", f"--weight-decay {train.weight_decay:g}"]
    flags += [f"--adam-beta1 {train.beta1:g}", f"--adam-beta2 {train.beta2:g}"]
    flags += [f"--adam-eps {train.eps:g}", f"--clip-grad {train.clip_norm or 0:g}"]
    flags += [f"--seed {train.seed}", *_DTYPE_FLAG[train.dtype]]
    flags += ["--use-distributed-optimizer"] * (plan.split.replicas[0].zero > 0)
    if train.dtype is Dtype.FP64:
        lost.append("dtype fp64: the target trains in fp32 at most")
    lost.append("data and tokenizer: give the target's own flags")
    return flags


def recompute_flags(replicas: Sequence[ReplicaPlan], lost: list[str]) -> list[str]:
    """Return Megatron's flags of full recomputation, which hold for all stages."""
    stages = [(index, stage) for replica in replicas for index, stage in enumerate(replica.stages)]
    which = sorted({index for index, stage in stages if stage.recompute})
    if not which:
        return []
    if not all(stage.recompute for _, stage in stages):
        lost.append(f"recomputation on stages {which} only: the target recomputes on all")
    return [
        "--recompute-granularity full",
        "--recompute-method uniform",
        "--recompute-num-layers 1",
    ]


def shell_text(
    plan: Plan, title: str, flags: Sequence[str], *, runs: Sequence[HostRun], lost: Sequence[str]
) -> str:
    """Return flags as a shell array, a flag a line, with what is lost and the order of hosts as comments."""
    head = [f"# hetrun plan {plan.recipe.name} for {title}"]
    head += [f"# lost: {line}" for line in lost]
    body = "\n".join(f"  {flag}" for flag in flags)
    return "\n".join([*head, *host_lines(runs), "FLAGS=(", body, ")", ""])


def host_lines(runs: Sequence[HostRun]) -> list[str]:
    """Return the order of hosts as comments: node rank by node rank."""
    merged: dict[str, int] = {}
    for run in runs:
        merged[run.host] = merged.get(run.host, 0) + run.num_ranks
    lines = [f"# node {node}: {host}, {n} ranks" for node, (host, n) in enumerate(merged.items())]
    if len(lines) > _MANY_HOSTS:
        lines = [*lines[:_MANY_HOSTS], f"# and {len(merged) - _MANY_HOSTS} more nodes in plan.json"]
    return lines


def blocks(plan: Plan, replica: ReplicaPlan) -> list[list[StagePlan]]:
    """Return the stages of a replica by runs of one device model and tensor parallelism."""

    def key(stage: StagePlan) -> tuple[str, str, int]:
        rank = plan.split.ranks[stage.ranks[0]]
        return rank.vendor, rank.model, len(stage.ranks)

    return [list(members) for _, members in groupby(replica.stages, key=key)]


def _shape(plan: Plan, replica: ReplicaPlan) -> tuple[tuple[str, int, int, bool], ...]:
    return tuple(
        (plan.split.ranks[s.ranks[0]].model, s.num_layers, len(s.ranks), s.recompute)
        for s in replica.stages
    )


def _words(shape: tuple[tuple[str, int, int, bool], ...]) -> str:
    return ", ".join(
        f"{layers} layers on {tp} x {model}{' recomputed' if again else ''}"
        for model, layers, tp, again in shape
    )
