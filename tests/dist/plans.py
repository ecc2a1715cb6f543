"""Small plans written by hand, with odd times so that no two events of a step coincide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetrun.model import (
    Cost,
    DataSpec,
    Dtype,
    Efficiency,
    HostSpec,
    Link,
    LinkKind,
    ModelSpec,
    Order,
    Plan,
    RankPlan,
    Recipe,
    ReplicaPlan,
    Share,
    Source,
    Split,
    StagePlan,
    TrainSpec,
)
from hetrun.schedule.lanes import lane_windows

MODEL = ModelSpec(
    num_layers=8, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_size=24, vocab_size=257
)
SEQ_LEN = 12
UNKNOWN = Share(value=None, kind=Source.MODELLED)
LINKS = (
    Link(kind=LinkKind.INSIDE_HOST, latency_s=1e-5, bytes_per_s=1.1e9),
    Link(kind=LinkKind.INSIDE_ISLAND, latency_s=3e-5, bytes_per_s=0.7e9),
    Link(kind=LinkKind.ACROSS, latency_s=7e-5, bytes_per_s=0.3e9),
)
VENDORS = ("red", "green", "blue")


@dataclass(frozen=True)
class Pipeline:
    """Layers per stage, and the rows and number of microbatches of one replica."""

    layers: tuple[int, ...]  # held, so with the layer of a real cut on both sides
    microbatch_rows: int
    num_microbatches: int
    order: Order = Order.ONE_F_ONE_B
    cuts: tuple[float, ...] = ()
    lanes: tuple[int, ...] = ()  # none: one for each stage
    tp: tuple[int, ...] = ()  # ranks of each lane, by stage; none: one each
    more_window: int = 0  # than 1F1B needs


def make_plan(
    pipelines: Sequence[Pipeline],
    *,
    model: ModelSpec = MODEL,
    steps: int = 20,
    dtype: Dtype = Dtype.FP64,
    emulated: bool = True,
) -> Plan:
    """A plan on consecutive ranks; vendors change along the ranks."""
    ranks: list[RankPlan] = []
    replicas: list[ReplicaPlan] = []
    first_row = 0
    for number, pipeline in enumerate(pipelines):
        stages = []
        for index in range(len(pipeline.layers)):
            lanes = pipeline.lanes[index] if pipeline.lanes else 1
            tp = pipeline.tp[index] if pipeline.tp else 1
            members = range(len(ranks), len(ranks) + lanes * tp)
            stages.append(_stage(pipeline, index, tuple(members), lanes))
            for rank in members:
                ranks.append(_rank(rank, replica=number, stage=index, emulated=emulated))
        replicas.append(
            ReplicaPlan(
                first_row=first_row,
                microbatch_rows=pipeline.microbatch_rows,
                num_microbatches=pipeline.num_microbatches,
                stages=tuple(stages),
                order=pipeline.order,
                cuts=pipeline.cuts,
            )
        )
        first_row += replicas[-1].num_rows
    recipe = Recipe(
        name="test",
        model=model,
        data=DataSpec(seq_len=SEQ_LEN),
        train=TrainSpec(
            steps=steps,
            global_batch_rows=first_row,
            learning_rate=1e-2,
            warmup_steps=3,
            weight_decay=0.1,
            clip_norm=0.5,
            seed=7,
            dtype=dtype,
        ),
    )
    split = Split(
        ranks=tuple(ranks),
        replicas=tuple(replicas),
        cost=Cost(step_s=1.0, compute_s=1.0, bubble_s=0.0, p2p_s=0.0, sync_s=0.0, optimizer_s=0.0),
        efficiency=Efficiency(e1=UNKNOWN, e2=UNKNOWN, u=UNKNOWN),
    )
    return Plan(
        created="",
        recipe=recipe,
        hosts=(HostSpec(name="here"),),
        links=LINKS,
        emulated=emulated,
        split=split,
        even_split=None,
        bound_s=1.0,
        gap=0.0,
        gap_reason="",
    )


def with_data(plan: Plan, **changes: object) -> Plan:
    """The same plan on other data."""
    data = replace(plan.recipe.data, **changes)  # type: ignore[arg-type]
    return replace(plan, recipe=replace(plan.recipe, data=data))


def with_train(plan: Plan, **changes: object) -> Plan:
    """The same plan with other training settings."""
    train = replace(plan.recipe.train, **changes)  # type: ignore[arg-type]
    return replace(plan, recipe=replace(plan.recipe, train=train))


def _stage(pipeline: Pipeline, index: int, ranks: tuple[int, ...], lanes: int) -> StagePlan:
    last = len(pipeline.layers) - 1
    layer_s = 0.01 * (1.0 + 0.13 * ranks[0])
    forward_s = layer_s * pipeline.layers[index] + 0.003
    splits = pipeline.order is Order.ZERO_BUBBLE
    windows = lane_windows(pipeline.lanes or [1] * len(pipeline.layers))
    window = windows[index] + pipeline.more_window
    first_layer = sum(pipeline.layers[:index])
    if pipeline.cuts:
        first_layer = int(pipeline.cuts[index - 1]) if index else 0
    return StagePlan(
        ranks=ranks,
        first_layer=first_layer,
        num_layers=pipeline.layers[index],
        has_embedding=index == 0,
        has_head=index == last,
        window=window,
        forward_s=forward_s,
        backward_s=2.1 * forward_s,
        send_s=0.0 if index == last else 0.0017 * (ranks[0] + 1),
        optimizer_s=0.002 + 0.0003 * ranks[0],
        memory_bytes=1000,
        memory_limit_bytes=2000,
        lanes=lanes,
        weights_s=0.93 * forward_s if splits else 0.0,
        most_held=window + 1 if splits else None,
        layer_forward_s=layer_s,
        layer_backward_s=2.1 * layer_s,
        layer_weights_s=0.93 * layer_s if splits else 0.0,
    )


def _rank(rank: int, *, replica: int, stage: int, emulated: bool) -> RankPlan:
    return RankPlan(
        rank=rank,
        host="here",
        local_rank=rank,
        device_index=rank,
        vendor=VENDORS[rank % len(VENDORS)],
        model="chip",
        replica=replica,
        stage=stage,
        torch_device="cpu",
        emulated=emulated,
        memory_bytes=2000,
    )
