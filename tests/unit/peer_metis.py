"""Figures of Metis' shipped example, GPT of 8 layers on 8 A100 and 8 half as quick devices, and a judge by its cost model.

Facts from github.com/SamsungLabs/Metis (commit 4b24046): measured milliseconds and megabytes of a layer, bytes of its
parameters. The second type is made up: all times twice. The formula of the paper's cost model is written anew here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetrun.model import (
    GIB,
    DeviceProfile,
    Dtype,
    LayerCount,
    Link,
    LinkKind,
    ModelCount,
    ModelSpec,
    PlanLimits,
    Quantity,
    RowTiming,
    Source,
    Split,
)
from tests.unit.planner_lab import Chips, Lab

Stage = tuple[
    str, int, int, int
]  # type, dp, tp, and layers, of which embedding and head are one each

METIS_MS = 3978.3  # of the plan that Metis picks: two stages of (dp 8, tp 1), 16 microbatches, layers 4 and 6
EXACT_MS = 3841.7  # the best of its own space: (dp 8, tp 1) then (dp 2, tp 4), the same cut
BATCH = 128
SLOWER = {"a100": 1.0, "half": 2.0}
# tp, rows of a microbatch: milliseconds of embedding, a layer, head (both ways), and of what a step takes beyond these
MILLISECONDS = {
    (1, 1): (0.289, 29.508, 0.410, 56.033),
    (1, 2): (0.628, 58.863, 0.656, 108.068),
    (1, 4): (1.096, 116.566, 1.066, 209.291),
    (2, 1): (1.163, 16.838, 0.353, 31.382),
    (2, 2): (1.720, 32.242, 0.469, 53.241),
    (2, 4): (2.507, 63.252, 0.670, 102.505),
    (4, 1): (1.026, 10.217, 0.338, 16.820),
    (4, 2): (1.830, 19.173, 0.404, 24.301),
    (4, 4): (2.949, 35.824, 0.679, 45.076),
}
MEGABYTES = {  # of embedding, a layer, head on each device
    (1, 1): (7820, 4146, 12132),
    (1, 2): (8078, 4838.5, 14554),
    (1, 4): (9078, 6259, 26084),
    (2, 1): (4378, 2119.5, 6232),
    (2, 2): (4279, 2607.5, 8833),
    (2, 4): (4174, 4042, 11930),
    (4, 1): (2257.25, 1140.5, 3067.75),
    (4, 2): (2681.25, 1425.5, 4679.25),
    (4, 4): (2591.75, 2067, 6305.75),
}
PARAMETER_BYTES = (393_216_000, 202_383_360, 393_220_096)  # embedding, a layer, head
WHOLE_BYTES = PARAMETER_BYTES[0] + 8 * PARAMETER_BYTES[1] + PARAMETER_BYTES[2]
OPTIMIZER_MS, BATCH_MS = (
    40.603,
    1.0257,
)  # of the whole model on one device; of making one microbatch
BYTES_PER_MS = {"a100": 46 << 20, "half": 50 << 20}
BOUNDARY = 1024 * 4096  # what a row is between stages, counted as bytes there
MODEL = ModelSpec(
    num_layers=8,
    hidden_size=4096,
    num_heads=32,
    ffn_size=16384,
    vocab_size=32000,
    family="gpt",
    config='{"model_type": "gpt"}',
    counts=ModelCount(
        layers=(
            LayerCount(
                num_layers=8,
                parameters=PARAMETER_BYTES[1] // 4,
                active_parameters=PARAMETER_BYTES[1] // 4,
                attention_width=8192,
                wide_elements=0,
                elements=700_000_000 // 1024 // 4,
                shared_elements=700_000_000 // 1024 // 4,
            ),
        ),
        embedding_parameters=PARAMETER_BYTES[0] // 4,
        head_parameters=PARAMETER_BYTES[2] // 4,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Example(Lab):
    """The example, with its measured figures; what a step takes beyond its layers is the head's."""

    def _figures(self, chips: Chips) -> DeviceProfile:
        unit = 1e-3 * SLOWER[chips.vendor] / 3
        timings = tuple(
            RowTiming(
                rows=rows,
                tp=tp,
                layer_forward_s=layer * unit,
                layer_backward_s=2 * layer * unit,
                embedding_forward_s=embedding * unit,
                embedding_backward_s=2 * embedding * unit,
                head_forward_s=(head + beyond) * unit,
                head_backward_s=2 * (head + beyond) * unit,
            )
            for (tp, rows), (embedding, layer, head, beyond) in MILLISECONDS.items()
        )
        return DeviceProfile(
            vendor=chips.vendor,
            model=f"{chips.vendor}-chip",
            hosts=(),
            source=Source.MEASURED,
            timings=timings,
            optimizer_s_per_parameter=OPTIMIZER_MS * 4e-3 / WHOLE_BYTES,
            matmul_flops_per_s=Quantity(value=None, source=Source.ASSUMED),
            copy_bytes_per_s=Quantity(value=None, source=Source.ASSUMED),
        )


def example(*, tp: tuple[int, ...], max_shapes: int | None = None) -> Example:
    """8 + 8 devices in hosts of four, 128 rows. What fits is judged by `most_megabytes`: our own count is another."""
    speed = BYTES_PER_MS["a100"] * 1e3
    return Example(
        chips=[
            Chips(vendor=vendor, num_devices=8, memory=80 * GIB, per_host=4) for vendor in SLOWER
        ],
        model=MODEL,
        batch=BATCH,
        rows=(1, 2, 4),
        seq_len=1024,
        links=tuple(Link(kind=kind, latency_s=0.0, bytes_per_s=speed) for kind in LinkKind),
        dtype=Dtype.FP32,
        limits=PlanLimits(
            tp=tp, max_shapes=max_shapes, fractional=False
        ),  # the judge has no real cuts
    )


def lockstep_ms(stages: Sequence[Stage], count: int) -> float:
    """Milliseconds of Metis' cost model: all stages take each of `count` microbatches whole, dp parts at once.

    (count - 1) slowest + sum + what lies beyond layers + slowest update + slowest all-reduce + sends + making batches.
    """
    busy, update, reduce, sends = [], 0.0, 0.0, 0.0
    for place, (chip, dp, tp, layers, whole_bytes) in enumerate(_with_bytes(stages)):
        rows = BATCH // dp // count
        embedding, layer, head, beyond = (SLOWER[chip] * ms for ms in MILLISECONDS[tp, rows])
        ends = (place == 0) + (place == len(stages) - 1)
        busy.append((layers - ends) * layer + embedding * (place == 0))
        update = max(update, OPTIMIZER_MS / tp * layers / 10)
        reduce = max(reduce, _reduce_ms(whole_bytes / tp, dp, BYTES_PER_MS[chip]))
        if place < len(stages) - 1:
            sends += rows * BOUNDARY / min(BYTES_PER_MS.values())
    busy[-1] += head
    beyond_ms = (beyond + BATCH_MS) * count
    return (count - 1) * max(busy) + sum(busy) + beyond_ms + update + reduce + sends


def split_ms(split: Split) -> float:
    """The same of replicas that go their own ways until gradients are reduced, each with its own microbatches."""
    slowest = update = reduce = 0.0
    for replica in split.replicas:
        busy, count = [], replica.num_microbatches
        beyond = 0.0
        for stage in replica.stages:
            chip, tp = split.ranks[stage.ranks[0]].vendor, len(stage.ranks)
            embedding, layer, head, more = (
                SLOWER[chip] * ms for ms in MILLISECONDS[tp, replica.microbatch_rows]
            )
            ends = stage.has_embedding + stage.has_head
            busy.append(
                stage.num_layers * layer + embedding * stage.has_embedding + head * stage.has_head
            )
            beyond = more
            update = max(update, OPTIMIZER_MS / tp * (stage.num_layers + ends) / 10)
            whole_bytes = _bytes(stage.num_layers, first=stage.has_embedding, last=stage.has_head)
            reduce = max(
                reduce, _reduce_ms(whole_bytes / tp, len(split.replicas), BYTES_PER_MS["a100"])
            )
        sends = replica.microbatch_rows * BOUNDARY / BYTES_PER_MS["a100"] * (len(busy) - 1)
        own = (count - 1) * max(busy) + sum(busy) + sends + (beyond + BATCH_MS) * count
        slowest = max(slowest, own)
    return slowest + update + reduce


def most_megabytes(split: Split) -> float:
    """Memory of the fullest device, counted as Metis does."""
    most = 0.0
    for replica in split.replicas:
        for stage in replica.stages:
            embedding, layer, head = MEGABYTES[len(stage.ranks), replica.microbatch_rows]
            ends = embedding * stage.has_embedding + head * stage.has_head
            most = max(most, stage.num_layers * layer + ends)
    return most


def _with_bytes(stages: Sequence[Stage]) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield stages with the bytes of their parameters."""
    last = len(stages) - 1
    for place, (chip, dp, tp, layers) in enumerate(stages):
        ends = (place == 0) + (place == last)
        yield chip, dp, tp, layers, _bytes(layers - ends, first=place == 0, last=place == last)


def _bytes(layers: int, *, first: bool, last: bool) -> int:
    return layers * PARAMETER_BYTES[1] + first * PARAMETER_BYTES[0] + last * PARAMETER_BYTES[2]


def _reduce_ms(num_bytes: float, size: int, bytes_per_ms: float) -> float:
    return 2 * (size - 1) / size * num_bytes / bytes_per_ms
