"""Figures of a public experiment, OPT-350M on 32 A100-40 and 96 V100-16, and a judge that follows Sailor's formula.

Facts from github.com/eth-easl/sailor (commit cf2c8e3, MIT): measured times of a layer, fitted bandwidths of its cloud,
parameters and activations of the model. The judge is written anew from what its simulator computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2

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

Stage = tuple[str, int, int]  # chip, tp, and layers, of which embedding and head are one each

# steps per second that the planners in Sailor's harness reach, by its simulator
PEERS = {"Sailor": 0.1700, "AMP": 0.1316, "Metis": 0.1238, "FlashFlex": 0.1175}
# the best of 175,017 equal replicas with at most one block of stages per chip, up to 14 stages, judged one by one
BEST_OF_ALL = 0.19722
BATCH = 1024
SEQ_LEN = 2048
INSIDE_BYTES_PER_S = {"a100": 243e9, "v100": 68e9}
# chip, tp, rows of a microbatch: microseconds of a layer's forward and backward, of what embedding and first layer take
# beyond a layer (both ways), of the head's forward and backward, of the update; collectives of tp are inside
MICROSECONDS = {
    ("a100", 1, 1): (2314, 5909, 872, 4508, 3989, 2938),
    ("a100", 1, 2): (4169, 11628, 858, 8140, 7615, 2930),
    ("a100", 1, 4): (8204, 22715, 906, 16123, 14861, 2941),
    ("a100", 1, 8): (16207, 44958, 1106, 32208, 29778, 2947),
    ("a100", 2, 1): (1908, 3398, 763, 2604, 2319, 1504),
    ("a100", 2, 2): (2624, 6325, 1088, 4538, 4282, 1511),
    ("a100", 2, 4): (4744, 12288, 1295, 8236, 8097, 1512),
    ("a100", 2, 8): (9277, 23888, 1746, 16380, 15521, 1515),
    ("a100", 4, 1): (2134, 2278, 890, 2211, 2078, 976),
    ("a100", 4, 2): (2394, 4023, 888, 2918, 3069, 947),
    ("a100", 4, 4): (3001, 6854, 1363, 4449, 4769, 955),
    ("a100", 4, 8): (5634, 13383, 1813, 8446, 8591, 938),
    ("v100", 1, 1): (7321, 17195, 919, 18638, 30124, 4854),
    ("v100", 1, 2): (14086, 33946, 1172, 36702, 59358, 4843),
    ("v100", 1, 4): (28839, 71714, -474, 74796, 122149, 4853),
    ("v100", 2, 1): (4224, 9510, 1377, 9378, 15446, 2479),
    ("v100", 2, 2): (8285, 18651, 1516, 19210, 31325, 2471),
    ("v100", 2, 4): (16014, 35784, 1946, 37029, 60235, 2492),
    ("v100", 2, 8): (30993, 75162, 2534, 75150, 129319, 2491),
    ("v100", 4, 1): (2968, 5963, 1036, 4787, 8250, 1297),
    ("v100", 4, 2): (5193, 10241, 1379, 9580, 16181, 1300),
    ("v100", 4, 4): (9555, 19837, 1889, 18957, 31639, 1298),
    ("v100", 4, 8): (19003, 39492, 3121, 37792, 63490, 1292),
}
BOUNDARY_BYTES = 8_388_608  # of one row between layers, fp32
PARAMETERS = {"embedding": 53_608_448, "layer": 12_596_224, "head": 51_513_344}
HELD_BYTES = {1: 360_726_528, 2: 192_954_368}  # of one layer and row until its backward, by tp
# GB/s = a x^2 + b x + c with x = log2(MB) of a message, by chip and cards of a node that take part; the slower end counts
BANDWIDTH = {
    ("a100", 1): (-0.0024414231, 0.1408627339, 1.1168227571),
    ("a100", 2): (-0.0071965117, 0.2316852992, 2.1127137995),
    ("a100", 4): (-0.0366789550, 0.4773282044, 4.5592610072),
    ("v100", 1): (0.0044083806, 0.0465799322, 0.8793574712),
    ("v100", 2): (-0.0115321093, 0.1056176687, 1.7758034087),
    ("v100", 4): (-0.0084508976, 0.3234540787, 3.4469371753),
}
BUCKET_BYTES = 500_000_000
ELEMENTS = {tp: num_bytes // SEQ_LEN // 4 for tp, num_bytes in HELD_BYTES.items()}
MODEL = ModelSpec(
    num_layers=24,
    hidden_size=1024,
    num_heads=16,
    ffn_size=4096,
    vocab_size=50272,
    family="opt",
    config='{"model_type": "opt"}',
    counts=ModelCount(
        layers=(
            LayerCount(
                num_layers=24,
                parameters=PARAMETERS["layer"],
                active_parameters=PARAMETERS["layer"],
                attention_width=2048,
                wide_elements=0,
                elements=ELEMENTS[1],
                shared_elements=2 * (ELEMENTS[1] - ELEMENTS[2]),
            ),
        ),
        embedding_parameters=PARAMETERS["embedding"],
        head_parameters=PARAMETERS["head"],
    ),
)


@dataclass(frozen=True, kw_only=True)
class Experiment(Lab):
    """The cluster and the training of the experiment, with its measured figures."""

    def _figures(self, chips: Chips) -> DeviceProfile:
        timings = tuple(
            RowTiming(
                rows=rows,
                tp=tp,
                layer_forward_s=forward * 1e-6 - told_s(chip, tp, rows),
                layer_backward_s=backward * 1e-6 - told_s(chip, tp, rows),
                embedding_forward_s=max(0, first) * 1e-6,
                embedding_backward_s=0.0,
                head_forward_s=head_forward * 1e-6,
                head_backward_s=head_backward * 1e-6,
            )
            for (chip, tp, rows), (
                forward,
                backward,
                first,
                head_forward,
                head_backward,
                _,
            ) in MICROSECONDS.items()
            if chip == chips.vendor
        )
        return DeviceProfile(
            vendor=chips.vendor,
            model=f"{chips.vendor}-chip",
            hosts=(),
            source=Source.MEASURED,
            timings=timings,
            optimizer_s_per_parameter=0.0,
            matmul_flops_per_s=Quantity(value=None, source=Source.ASSUMED),
            copy_bytes_per_s=Quantity(value=None, source=Source.ASSUMED),
        )


def told_s(chip: str, tp: int, rows: int) -> float:
    """Two ring all-reduces of a layer's output: our profiles leave out what Sailor's layers have inside."""
    output = rows * SEQ_LEN * MODEL.hidden_size * 4
    return 2 * 2 * (tp - 1) * output / tp / INSIDE_BYTES_PER_S[chip]


def experiment(
    *, max_stages: int | None = None, max_shapes: int | None = 1, tp: tuple[int, ...] = (1, 2, 4)
) -> Experiment:
    """The cluster of the experiment; memory is without what Sailor adds: 3 GB of libraries, 8 bytes per parameter.

    What tp costs is taken from the layers' times and comes back with the links inside a host.
    """
    return Experiment(
        chips=[
            Chips(vendor="a100", num_devices=32, memory=40 * GIB - 5.0e9, per_host=4),
            Chips(vendor="v100", num_devices=96, memory=16 * GIB - 3.5e9, per_host=4),
        ],
        model=MODEL,
        batch=BATCH,
        rows=(1, 2, 4, 8),
        seq_len=SEQ_LEN,
        links=(
            *(
                Link(kind=LinkKind.INSIDE_HOST, latency_s=0.0, bytes_per_s=rate, a=chip)
                for chip, rate in INSIDE_BYTES_PER_S.items()
            ),
            Link(kind=LinkKind.INSIDE_ISLAND, latency_s=0.0, bytes_per_s=1.7e9, a="a100"),
            Link(kind=LinkKind.INSIDE_ISLAND, latency_s=0.0, bytes_per_s=1.2e9, a="v100"),
            Link(kind=LinkKind.ACROSS, latency_s=0.0, bytes_per_s=1.2e9),
        ),
        dtype=Dtype.FP32,
        limits=PlanLimits(tp=tp, max_stages=max_stages, max_shapes=max_shapes, memory_fraction=1.0),
    )


def judged(split: Split) -> float:
    """Steps per second that Sailor's formula gives a split.

    Raises:
        ValueError: its replicas differ in more than their number of microbatches, which that simulator cannot take.
    """
    shapes = {
        (
            replica.microbatch_rows,
            tuple(
                (
                    split.ranks[stage.ranks[0]].vendor,
                    len(stage.ranks),
                    stage.num_layers + stage.has_embedding + stage.has_head,
                )
                for stage in replica.stages
            ),
        )
        for replica in split.replicas
    }
    if len(shapes) != 1:
        raise ValueError(f"{len(shapes)} shapes of replicas, need one")
    ((rows, stages),) = shapes
    return 1 / step_s(rows, len(split.replicas), stages)


def step_s(rows: int, num_replicas: int, stages: Sequence[Stage]) -> float:
    """Seconds of a step by Sailor's formula: (m - 1) busiest + sum of busy + update + slowest sync.

    A stage is busy with its layers and with its sends, both ways.
    """
    last = len(stages) - 1
    busy_s = _sends(rows, stages)
    sync_s = update_s = 0.0
    for index, (chip, tp, count) in enumerate(stages):
        forward, backward, first, *head, update = MICROSECONDS[chip, tp, rows]
        layers = count - (index == 0) - (index == last)
        parameters = layers * PARAMETERS["layer"]
        busy_s[index] += layers * (forward + backward) * 1e-6
        if index == 0:
            busy_s[index] += first * 1e-6
            parameters += PARAMETERS["embedding"]
        if index == last:
            busy_s[index] += sum(head) * 1e-6
            parameters += PARAMETERS["head"]
        sync_s = max(sync_s, _reduce_s(4 * parameters / tp, num_replicas, chip))
        update_s = max(update_s, update * 1e-6)
    count = ceil(BATCH / (rows * num_replicas))
    return (count - 1) * max(busy_s) + sum(busy_s) + update_s + sync_s


def _sends(rows: int, stages: Sequence[Stage]) -> list[float]:
    """Seconds that each stage sends per microbatch; an end counts its only link twice, short pipelines' first once."""
    hops = [_message_s(BOUNDARY_BYTES * rows, [a[:2], b[:2]]) for a, b in pairwise(stages)]
    if not hops:
        return [0.0]
    first = hops[0] if len(stages) <= 3 else 2 * hops[0]
    return [first, *(a + b for a, b in pairwise(hops)), 2 * hops[-1]]


def _message_s(num_bytes: float, ends: Sequence[tuple[str, int]]) -> float:
    """Seconds of one message between chips of nodes of which so many cards send."""
    x = log2(num_bytes / 1e6)
    return max(
        num_bytes / 1e9 / (a * x * x + b * x + c) for a, b, c in [BANDWIDTH[end] for end in ends]
    )


def _reduce_s(num_bytes: float, size: int, chip: str) -> float:
    """Seconds of ring all-reduces of buckets, one after the other."""
    seconds = 0.0
    while num_bytes > 0 and size > 1:
        bucket = min(num_bytes, BUCKET_BYTES)
        seconds += 2 * (size - 1) * _message_s(bucket / size, [(chip, 1)])
        num_bytes -= bucket
    return seconds
