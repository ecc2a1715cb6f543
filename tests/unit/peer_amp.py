"""Forty-three plans that AMP predicted and ran: GPT-2 of 24 layers on three hosts of four V100 and one of four T4.

Facts from github.com/DachengLi1/AMP (commit 72eeea4): plans, predicted and real seconds of a step, milliseconds of a
layer, bandwidths. What a plan costs is left to our own model; nothing here is fitted to the real seconds.
Devices of one host that send at once share its NIC, counted by the planner's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetrun.model import (
    Dtype,
    LayerCount,
    Link,
    LinkKind,
    ModelCount,
    ModelSpec,
    RankPlan,
    ReplicaPlan,
    StagePlan,
)
from hetrun.planner.cost import Crossings, send_seconds
from hetrun.schedule import plain_window, step_cost

Pair = tuple[int, int, int, tuple[int, ...], float, float]

BATCH = 32
SEQ_LEN = HIDDEN = 1024
PER_HOST = 4
CHIPS = ("v100", "v100", "v100", "t4")  # of each host
# milliseconds of embedding, a layer (mean of 24), head: forwards of one row, collectives of tp inside
MILLISECONDS = {
    ("v100", 1): (0.541, 3.919, 3.511),
    ("v100", 2): (1.405, 5.243, 1.935),
    ("v100", 4): (1.393, 4.519, 1.139),
    ("t4", 1): (0.354, 5.470, 4.650),
    ("t4", 2): (1.577, 5.962, 2.131),
    ("t4", 4): (1.852, 5.577, 1.166),
}
PEAK_TFLOPS = {"v100": 125.0, "t4": 65.0}  # fp16, by NVIDIA's data sheets
INSIDE_BYTES_PER_S = {"v100": 170e9 / 8, "t4": 50e9 / 8}
NIC_BYTES_PER_S = 10e9 / 8
BYTES_PER_ACTIVATION = 2
# tp, dp, rows of a microbatch, layers of each stage, seconds that AMP predicts, real seconds
PAIRS: tuple[Pair, ...] = (
    (1, 2, 1, (3, 4, 3, 3, 3, 3, 3, 2), 1.1402, 1.28),
    (1, 4, 1, (5, 7, 6, 6), 1.0859, 1.47),
    (1, 1, 1, (1, 2, 2, 2, 2, 2, 2, 1, 1, 2, 1, 1, 1, 1, 2, 1), 1.1465, 1.52),
    (1, 4, 2, (5, 7, 6, 6), 1.3291, 1.53),
    (1, 2, 2, (3, 4, 3, 2, 3, 3, 3, 3), 1.4332, 1.54),
    (1, 1, 2, (1, 2, 2, 2, 2, 2, 1, 2, 2, 1, 1, 1, 2, 1, 1, 1), 1.4591, 1.58),
    (2, 2, 4, (6, 6, 6, 6), 2.926, 1.65),
    (1, 4, 4, (4, 7, 7, 6), 1.8221, 1.71),
    (1, 2, 4, (1, 4, 4, 3, 3, 3, 3, 3), 2.0041, 1.71),
    (2, 1, 4, (3, 3, 3, 3, 3, 3, 3, 3), 3.1784, 1.79),
    (2, 2, 8, (6, 6, 6, 6), 4.1555, 1.91),
    (4, 1, 4, (6, 6, 6, 6), 3.9994, 2.05),
    (1, 4, 8, (6, 6, 6, 6), 2.7881, 2.07),
    (2, 1, 8, (3, 3, 3, 3, 3, 3, 3, 3), 4.6082, 2.12),
    (4, 1, 8, (6, 6, 6, 6), 5.085, 2.13),
    (1, 8, 1, (12, 12), 1.9761, 2.23),
    (1, 8, 2, (12, 12), 2.1342, 2.26),
    (2, 2, 16, (6, 6, 6, 6), 6.6146, 2.33),
    (1, 8, 4, (12, 12), 2.4505, 2.34),
    (2, 2, 2, (6, 6, 6, 6), 2.3112, 2.37),
    (2, 4, 4, (12, 12), 2.9126, 2.41),
    (2, 4, 8, (12, 12), 3.7238, 2.45),
    (4, 1, 16, (6, 6, 6, 6), 7.2561, 2.49),
    (2, 4, 2, (12, 12), 2.507, 2.5),
    (4, 2, 4, (12, 12), 3.7053, 2.66),
    (4, 2, 16, (12, 12), 5.8554, 2.66),
    (2, 1, 16, (3, 3, 3, 3, 3, 3, 3, 3), 7.4678, 2.69),
    (4, 2, 8, (12, 12), 4.422, 2.71),
    (2, 2, 1, (6, 6, 6, 6), 2.0038, 2.8),
    (2, 4, 1, (12, 12), 2.3042, 2.89),
    (1, 16, 1, (24,), 2.7789, 2.9),
    (2, 8, 4, (24,), 2.5985, 3.03),
    (2, 8, 2, (24,), 2.5985, 3.06),
    (2, 8, 1, (24,), 2.5985, 3.13),
    (4, 1, 32, (6, 6, 6, 6), 11.5983, 3.13),
    (4, 4, 8, (24,), 3.2456, 3.27),
    (4, 4, 4, (24,), 3.2456, 3.29),
    (4, 2, 2, (12, 12), 3.347, 3.29),
    (2, 1, 2, (3, 3, 3, 3, 3, 3, 3, 3), 2.4635, 3.36),
    (4, 4, 2, (24,), 3.2456, 3.56),
    (4, 4, 1, (24,), 3.2456, 3.8),
    (2, 1, 1, (3, 3, 3, 3, 3, 3, 3, 3), 2.1061, 3.81),
    (4, 1, 2, (6, 6, 6, 6), 3.4567, 3.92),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truths:
    """What a prediction takes into account beyond a time in proportion to the rows and links that nobody else uses."""

    fixed_part: bool = True  # a layer takes some time however few rows it has
    shared_links: bool = True  # devices of one host that send at once share its NIC


def predicted_s(pair: Pair, truths: Truths) -> float:
    """Seconds of a step by hetrun's cost model; ranks stand in order of stage, replica, tp, four to a host."""
    tp, dp, rows, layers = pair[:4]
    ranks = tuple(_rank(number, tp=tp, dp=dp) for number in range(tp * dp * len(layers)))
    count = BATCH // dp // rows
    replicas = [
        ReplicaPlan(
            first_row=replica * rows * count,
            microbatch_rows=rows,
            num_microbatches=count,
            stages=tuple(_stages(ranks, layers, replica, (tp, dp, rows), truths)),
        )
        for replica in range(dp)
    ]
    rate = NIC_BYTES_PER_S * (1 if truths.shared_links else tp)  # undoes sharing by tp rings
    links = [
        Link(kind=LinkKind.INSIDE_HOST, latency_s=0.0, bytes_per_s=s, a=c)
        for c, s in INSIDE_BYTES_PER_S.items()
    ]
    links += [
        Link(kind=kind, latency_s=0.0, bytes_per_s=rate)
        for kind in (LinkKind.INSIDE_ISLAND, LinkKind.ACROSS)
    ]
    return step_cost(ranks, replicas, links=links, model=_model(tp), dtype=Dtype.FP32).step_s


def forward_s(chip: str, tp: int, rows: int, truths: Truths) -> float:
    """Seconds of a layer's forward.

    Of the measured time of one row, what grows with the rows is found by comparing two chips of known peak: the time
    that the same layer takes longer on the slower one is computing, the rest is fixed. All-reduces of tp are two of
    an activation; what tp costs beyond these is fixed too.
    """
    measured = MILLISECONDS[chip, tp][1]
    if not truths.fixed_part:
        return rows * measured * 1e-3
    ratio = PEAK_TFLOPS["v100"] / PEAK_TFLOPS["t4"]
    quick, slow = (MILLISECONDS[name, 1][1] for name in ("v100", "t4"))
    computing = (slow - quick) / (ratio - 1) * PEAK_TFLOPS["v100"] / PEAK_TFLOPS[chip] / tp
    moved = 2 * 2 * (tp - 1) / tp * SEQ_LEN * HIDDEN * BYTES_PER_ACTIVATION
    reducing = moved / INSIDE_BYTES_PER_S[chip] * 1e3
    return (measured + (rows - 1) * (computing + reducing)) * 1e-3


def _stages(
    ranks: Sequence[RankPlan],
    layers: tuple[int, ...],
    replica: int,
    use: tuple[int, int, int],
    truths: Truths,
) -> list[StagePlan]:
    tp, dp, rows = use
    stages = []
    last = len(layers) - 1
    for place, count in enumerate(layers):
        first_rank = (place * dp + replica) * tp
        embedding_ms, _, head_ms = MILLISECONDS[ranks[first_rank].vendor, tp]
        ends_ms = embedding_ms * (place == 0) + head_ms * (place == last)
        seconds = (
            count * forward_s(ranks[first_rank].vendor, tp, rows, truths) + rows * ends_ms * 1e-3
        )
        stages.append(
            StagePlan(
                ranks=tuple(range(first_rank, first_rank + tp)),
                first_layer=sum(layers[:place]),
                num_layers=count,
                has_embedding=place == 0,
                has_head=place == last,
                window=plain_window(len(layers), place),
                forward_s=seconds,
                backward_s=2 * seconds,
                send_s=0.0 if place == last else _send_s(ranks, first_rank, use, truths),
                optimizer_s=0.0,
                memory_bytes=0,
                memory_limit_bytes=None,
            )
        )
    return stages


def _send_s(
    ranks: Sequence[RankPlan], first_rank: int, use: tuple[int, int, int], truths: Truths
) -> float:
    """Seconds of one microbatch to the next stage; its tp ranks send a part each."""
    tp, dp, rows = use
    host, target = ranks[first_rank].host, ranks[first_rank + tp * dp].host
    num_bytes = rows * SEQ_LEN * HIDDEN * BYTES_PER_ACTIVATION
    if host == target:
        return num_bytes / INSIDE_BYTES_PER_S[ranks[first_rank].vendor]
    replicas = [
        [[ranks[number].host] for number in range(replica * tp, len(ranks), tp * dp)]
        for replica in range(dp)
    ]
    at_once = Crossings(replicas).at_once(host, target) if truths.shared_links else 1
    nic = Link(kind=LinkKind.ACROSS, latency_s=0.0, bytes_per_s=NIC_BYTES_PER_S)
    return send_seconds(nic, num_bytes, at_once=at_once)


def _rank(number: int, *, tp: int, dp: int) -> RankPlan:
    host, local = divmod(number, PER_HOST)
    return RankPlan(
        rank=number,
        host=f"host{host}",
        local_rank=local,
        device_index=local,
        vendor=CHIPS[host],
        model=CHIPS[host],
        replica=number // tp % dp,
        stage=number // (tp * dp),
        torch_device="cuda",
    )


def _model(tp: int) -> ModelSpec:
    """GPT-2 with a vocabulary of 52,256; its table is tied and cut among tp devices."""
    layer = 12 * HIDDEN**2 + 13 * HIDDEN
    return ModelSpec(
        num_layers=24,
        hidden_size=HIDDEN,
        num_heads=16,
        ffn_size=4 * HIDDEN,
        vocab_size=52256,
        tied_embeddings=True,
        family="gpt2",
        config='{"model_type": "gpt2"}',
        counts=ModelCount(
            layers=(
                LayerCount(
                    num_layers=24,
                    parameters=layer,
                    active_parameters=layer,
                    attention_width=2 * HIDDEN,
                    wide_elements=0,
                    elements=0,
                ),
            ),
            embedding_parameters=52256 * HIDDEN // tp,
            head_parameters=52256 * HIDDEN // tp,
        ),
    )
