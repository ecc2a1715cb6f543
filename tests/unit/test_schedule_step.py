"""One step of all ranks on one clock, by hand and by property."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.model import Dtype, Link, LinkKind, ModelSpec, RankPlan, ReplicaPlan, StagePlan
from hetrun.schedule import (
    all_reduce_s,
    gradient_buckets,
    simulate_step,
    step_cost,
)
from hetrun.schedule.step import SCALAR_BYTES

MODEL = ModelSpec(num_layers=4, hidden_size=8, num_heads=2, ffn_size=16, vocab_size=32)
LINKS = (
    Link(kind=LinkKind.INSIDE_HOST, latency_s=1e-3, bytes_per_s=1e6),
    Link(kind=LinkKind.ACROSS, latency_s=2e-3, bytes_per_s=1e5),
)


def make_ranks(vendors: str) -> list[RankPlan]:
    return [
        RankPlan(
            rank=index,
            host="h1",
            local_rank=index,
            device_index=index,
            vendor=vendor,
            model="m",
            replica=0,
            stage=0,
            torch_device="cpu",
        )
        for index, vendor in enumerate(vendors)
    ]


def make_replica(
    cuts: list[int], first_rank: int, *, layer_s: float = 0.3, send_s: float = 0.0, m: int = 4
) -> ReplicaPlan:
    stages = []
    first = 0
    for index, count in enumerate(cuts):
        last = index == len(cuts) - 1
        stages.append(
            StagePlan(
                ranks=(first_rank + index,),
                first_layer=first,
                num_layers=count,
                has_embedding=index == 0,
                has_head=last,
                window=len(cuts) - index,
                forward_s=count * layer_s / 3,
                backward_s=count * layer_s * 2 / 3,
                send_s=0.0 if last else send_s,
                optimizer_s=0.01 * count,
                memory_bytes=0,
                memory_limit_bytes=None,
            )
        )
        first += count
    return ReplicaPlan(first_row=0, microbatch_rows=1, num_microbatches=m, stages=tuple(stages))


def test_single_rank_pays_compute_and_optimizer_only() -> None:
    cost = simulate_step(make_ranks("a"), [make_replica([4], 0)], (), MODEL, Dtype.FP32).cost
    assert cost.step_s == pytest.approx(4 * 4 * 0.3 + 0.04)
    assert cost.compute_s == pytest.approx(4 * 4 * 0.3)
    assert cost.optimizer_s == pytest.approx(0.04)
    assert (cost.bubble_s, cost.p2p_s, cost.sync_s) == (0.0, 0.0, 0.0)


def test_fast_replica_waits_for_the_slow_one_before_the_sync() -> None:
    ranks = make_ranks("ab")
    replicas = [make_replica([4], 0, m=6), make_replica([4], 1, layer_s=0.6, m=4)]
    run = simulate_step(ranks, replicas, LINKS, MODEL, Dtype.FP32)
    (bucket,) = gradient_buckets(ranks, replicas, MODEL, 4)
    sync_s = all_reduce_s(bucket.num_bytes, ranks, LINKS)
    scalar_s = all_reduce_s(SCALAR_BYTES, ranks, LINKS)
    assert run.cost.compute_s == pytest.approx(4 * 4 * 0.6)
    assert run.cost.sync_s == pytest.approx(sync_s + scalar_s)
    assert run.cost.step_s == pytest.approx(9.6 + sync_s + scalar_s + 0.04)
    kinds = [[span.kind for span in spans] for spans in run.rank_spans]
    assert kinds[0] == [*("FB" * 6), "sync", "sync", "optimizer"]
    assert run.rank_spans[0][12].start_s == pytest.approx(9.6)
    assert run.rank_spans[0][12].end_s == pytest.approx(9.6 + sync_s)


def test_buckets_without_a_common_rank_run_side_by_side() -> None:
    ranks = make_ranks("aabb")
    replicas = [make_replica([2, 2], 0), make_replica([2, 2], 2)]
    slow = [replace(link, bytes_per_s=1e4) for link in LINKS]
    run = simulate_step(ranks, replicas, slow, MODEL, Dtype.FP32)
    first_syncs = [next(s for s in spans if s.kind == "sync") for spans in run.rank_spans]
    assert first_syncs[1] == first_syncs[3]
    assert first_syncs[0] == first_syncs[2]
    # the last stage is free one backward before the first, and both overlap
    assert first_syncs[1].start_s < first_syncs[0].start_s < first_syncs[1].end_s


def test_free_links_have_no_p2p_part_and_slow_ones_do() -> None:
    ranks = make_ranks("aa")
    free = simulate_step(ranks, [make_replica([2, 2], 0)], LINKS, MODEL, Dtype.FP32).cost
    slow = make_replica([2, 2], 0, send_s=0.1)
    paid = simulate_step(ranks, [slow], LINKS, MODEL, Dtype.FP32).cost
    assert free.p2p_s == 0.0
    assert free.bubble_s == pytest.approx(0.6)
    assert paid.p2p_s > 0.1
    assert paid.compute_s == free.compute_s


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[RankPlan], list[ReplicaPlan]]:
    replicas: list[ReplicaPlan] = []
    num_ranks = 0
    for _ in range(draw(st.integers(1, 3))):
        mark = draw(st.integers(1, 3))
        cuts = draw(st.sampled_from([[4], [mark, 4 - mark]]))
        replicas.append(
            make_replica(
                cuts,
                num_ranks,
                layer_s=draw(st.floats(0.1, 1.0)),
                send_s=draw(st.floats(0.0, 0.3)),
                m=draw(st.integers(1, 6)),
            )
        )
        num_ranks += len(cuts)
    vendors = draw(st.text("ab", min_size=num_ranks, max_size=num_ranks))
    return make_ranks(vendors), replicas


@settings(deadline=None)
@given(splits(), st.sampled_from(Dtype))
def test_parts_add_up_and_spans_never_overlap(
    case: tuple[list[RankPlan], list[ReplicaPlan]], dtype: Dtype
) -> None:
    ranks, replicas = case
    run = simulate_step(ranks, replicas, LINKS, MODEL, dtype)
    cost = run.cost
    parts = (cost.compute_s, cost.bubble_s, cost.p2p_s, cost.sync_s, cost.optimizer_s)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(cost.step_s, rel=1e-9)
    quick = step_cost(ranks, replicas, links=LINKS, model=MODEL, dtype=dtype)
    assert asdict(quick) == pytest.approx(asdict(cost), rel=1e-11, abs=1e-12)
    assert max(spans[-1].end_s for spans in run.rank_spans) == cost.step_s
    for spans in run.rank_spans:
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
    scalar = [spans[-2].end_s for spans in run.rank_spans if len(ranks) > 1]
    assert len(set(scalar)) <= 1


def test_same_replica_twice_costs_as_much_as_two_different_objects() -> None:
    ranks = make_ranks("aabb")
    one, two = make_replica([2, 2], 0, send_s=0.1), make_replica([2, 2], 2, send_s=0.1)
    other = replace(two, stages=(two.stages[0], replace(two.stages[1], forward_s=0.9)))
    assert step_cost(ranks, [one, two], links=LINKS, model=MODEL, dtype=Dtype.FP32).compute_s < (
        step_cost(ranks, [one, other], links=LINKS, model=MODEL, dtype=Dtype.FP32).compute_s
    )
