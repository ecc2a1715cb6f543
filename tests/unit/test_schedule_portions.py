"""Whatever the degrees of the lanes: each slice of each parameter is summed up once by all who hold it, equal copies once."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun import arch
from hetrun.model import ModelSpec, RankPlan, ReplicaPlan, StagePlan
from hetrun.planner.recost_sync import owner_sets
from hetrun.schedule.portions import Portion, lanes_by_rank, portions
from hetrun.schedule.sync import Bucket, Part, gradient_buckets

MODEL = ModelSpec(num_layers=4, hidden_size=24, num_heads=12, ffn_size=48, vocab_size=32)
TIED = replace(MODEL, tied_embeddings=True)
Shape = list[tuple[int, int, int]]  # layers, lanes, tp of each stage


def make_ranks(count: int) -> list[RankPlan]:
    return [
        RankPlan(
            rank=number, host="h", local_rank=number, device_index=number, vendor="acme",
            model="m", replica=0, stage=0, torch_device="cpu",
        )
        for number in range(count)
    ]  # fmt: skip


def make_replicas(shapes: list[Shape]) -> list[ReplicaPlan]:
    replicas, first_rank = [], 0
    for shape in shapes:
        stages, first_layer = [], 0
        for index, (layers, lanes, tp) in enumerate(shape):
            ranks = tuple(range(first_rank, first_rank + lanes * tp))
            stages.append(
                StagePlan(
                    ranks=ranks, first_layer=first_layer, num_layers=layers, lanes=lanes,
                    has_embedding=index == 0, has_head=index == len(shape) - 1, window=9,
                    forward_s=1.0, backward_s=2.0, send_s=0.0, optimizer_s=0.0, memory_bytes=0,
                    memory_limit_bytes=None,
                )
            )  # fmt: skip
            first_rank += len(ranks)
            first_layer += layers
        replicas.append(
            ReplicaPlan(first_row=0, microbatch_rows=1, num_microbatches=9, stages=tuple(stages))
        )
    return replicas


def summed(
    replicas: list[ReplicaPlan], model: ModelSpec
) -> list[tuple[Bucket, tuple[Portion, ...]]]:
    count = sum(len(stage.ranks) for r in replicas for stage in r.stages)
    lanes = lanes_by_rank(replicas)
    buckets = gradient_buckets(make_ranks(count), replicas, model, 1)
    return [(bucket, portions(bucket, lanes)) for bucket in buckets]


def test_lanes_of_equal_tp_sum_up_place_by_place() -> None:
    ((bucket, (first, second)),) = summed(make_replicas([[(4, 1, 2)], [(4, 1, 2)]]), MODEL)
    assert (bucket.part, bucket.tp, bucket.ranks) == (Part.ALL, 2, (0, 2))
    assert (first.ranks, second.ranks) == ((0, 2), (1, 3))
    assert [(p.start, p.end, p.of, p.copies) for p in (first, second)] == [
        (0, 1, 2, True),
        (1, 2, 2, True),
    ]
    matrices = 4 * (arch.layer_parameters(MODEL) - 2 * 24)
    whole = 4 * 2 * 24 + arch.embedding_parameters(MODEL) + arch.head_parameters(MODEL)
    assert bucket.num_bytes == matrices // 2 + whole


def test_tp_2_1_4_over_replicas() -> None:
    (shares, by), (copies, (everybody,)) = summed(
        make_replicas([[(4, 1, 2)], [(4, 1, 1)], [(4, 1, 4)]]), MODEL
    )
    assert (shares.part, shares.tp, shares.ranks) == (Part.SHARES, 1, (0, 2, 3))
    assert [p.ranks for p in by] == [(0, 2, 3), (0, 2, 4), (1, 2, 5), (1, 2, 6)]
    assert shares.num_bytes == 4 * (arch.layer_parameters(MODEL) - 2 * 24)
    assert (copies.part, copies.tp, everybody.ranks) == (Part.COPIES, 1, tuple(range(7)))
    assert copies.ranks == everybody.ranks
    whole = 4 * 2 * 24 + arch.embedding_parameters(MODEL) + arch.head_parameters(MODEL)
    assert copies.num_bytes == whole


def test_a_single_lane_needs_no_sync_whatever_its_tp() -> None:
    assert summed(make_replicas([[(1, 1, 2), (3, 1, 4)]]), MODEL) == []
    (tied,) = summed(make_replicas([[(1, 1, 2), (3, 1, 4)]]), TIED)
    assert (tied[0].units, tied[0].part, tied[0].tp) == (("embedding",), Part.COPIES, 2)
    assert [p.ranks for p in tied[1]] == [(0, 2, 3), (1, 4, 5)]


@st.composite
def shapes(draw: st.DrawFn) -> list[Shape]:
    def shape() -> Shape:
        cut = draw(st.integers(0, 4))
        layers = [4] if cut == 4 else [cut, 4 - cut]
        return [
            (n, draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 4, 6]))) for n in layers
        ]

    return [shape() for _ in range(draw(st.integers(1, 3)))]


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["plain", "tied"])
@settings(max_examples=40)
@given(split=shapes())
def test_every_lane_gives_every_element_once(model: ModelSpec, split: list[Shape]) -> None:
    replicas = make_replicas(split)
    lanes = lanes_by_rank(replicas)
    given_by: Counter[tuple[str, object, Fraction]] = Counter()  # by unit, lane, cell; None: copies
    took: dict[tuple[str, object], set[int]] = defaultdict(set)
    for bucket, groups in summed(replicas, model):
        for portion in groups:
            for unit in bucket.units:
                for rank in portion.ranks:
                    lane = lanes[rank]
                    place = lane.index(rank)
                    if portion.start < portion.end and unit.startswith("layer."):
                        assert place * portion.of <= portion.start * len(lane)
                        assert portion.end * len(lane) <= (place + 1) * portion.of
                        for cell in range(
                            12 * portion.start // portion.of, 12 * portion.end // portion.of
                        ):
                            given_by[unit, lane, Fraction(cell)] += 1
                    if portion.copies:
                        took[unit, rank].add(len(took[unit, rank]) + 1)
                        copies = len(lane) // bucket.tp if bucket.part is Part.COPIES else 1
                        assert copies == sum(other in lane for other in portion.ranks)
    assert all(count == 1 for count in given_by.values())
    for lane_of_unit in {(unit, lane) for unit, lane, _ in given_by}:
        assert sum((*lane_of_unit, Fraction(cell)) in given_by for cell in range(12)) == 12
    assert all(times == {1} for times in took.values())  # each rank's copies in one group


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["plain", "tied"])
@settings(max_examples=40)
@given(split=shapes())
def test_the_second_evaluator_finds_the_same_sums(model: ModelSpec, split: list[Shape]) -> None:
    replicas = make_replicas(split)
    first = [(b.ranks, b.num_bytes, b.tp) for b, _ in summed(replicas, model)]
    plan = SimpleNamespace(replicas=replicas)
    second = [(tuple(sorted(r)), n, tp) for r, n, tp in owner_sets(plan, model)]  # type: ignore[arg-type]
    assert first == second
