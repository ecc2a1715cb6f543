"""The door to all orders: which layers a microbatch passes, what that takes, and one step with cuts, lanes and W."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrun.model import Dtype, Order, ReplicaPlan, StagePlan
from hetrun.schedule import (
    ActionKind,
    gradient_buckets,
    layers_of,
    replica_ends,
    simulate_pipeline,
    simulate_replica,
    simulate_step,
    stage_times,
    step_cost,
    work_of,
)
from tests.unit.test_schedule_step import LINKS, MODEL, make_ranks, make_replica

LAYER_S = 0.3  # a third of it forward; MODEL has four layers


def stage(first: int, end: int, rank: int, *, of: int, index: int, split: bool) -> StagePlan:
    count = end - first
    return StagePlan(
        ranks=(rank,),
        first_layer=first,
        num_layers=count,
        has_embedding=index == 0,
        has_head=index == of - 1,
        window=of - index + 2,
        most_held=of - index + 3,
        forward_s=count * LAYER_S / 3,
        backward_s=count * LAYER_S * 2 / 3,
        weights_s=count * LAYER_S / 3 * split,
        layer_forward_s=LAYER_S / 3,
        layer_backward_s=LAYER_S * 2 / 3,
        layer_weights_s=LAYER_S / 3 * split,
        send_s=0.01 if index < of - 1 else 0.0,
        optimizer_s=0.01 * count,
        memory_bytes=0,
        memory_limit_bytes=None,
    )


def cut_replica(order: Order, *, m: int = 16) -> ReplicaPlan:
    """Two stages that are cut at layer 1.5 of 4, so both hold layer 1."""
    split = order is Order.ZERO_BUBBLE
    return ReplicaPlan(
        first_row=0,
        microbatch_rows=1,
        num_microbatches=m,
        stages=(
            stage(0, 2, 0, of=2, index=0, split=split),
            stage(1, 4, 1, of=2, index=1, split=split),
        ),
        order=order,
        cuts=(1.5,),
    )


def test_a_microbatch_passes_each_layer_once_and_pays_for_these() -> None:
    replica = cut_replica(Order.ZERO_BUBBLE)
    seen = set()
    for i in range(16):
        first, second = layers_of(replica, 0, i), layers_of(replica, 1, i)
        assert [*first, *second] == [0, 1, 2, 3]
        seen.add(len(first))
        assert work_of(replica.stages[0], len(first)) == pytest.approx([0.1 * len(first)] * 3)
    assert seen == {1, 2}


@pytest.mark.parametrize("order", list(Order))
def test_a_cut_replica_does_all_work_once_and_beats_its_whole_halves(order: Order) -> None:
    replica = cut_replica(order)
    run = simulate_replica(replica)
    kinds = len(ActionKind) if order is Order.ZERO_BUBBLE else 2
    assert [len(lane.actions) for (lane,) in run.lanes] == [kinds * 16] * 2
    work_s = sum(a.end_s - a.start_s for (lane,) in run.lanes for a in lane.actions)
    assert work_s == pytest.approx(16 * 4 * LAYER_S)
    assert replica_ends(replica) == tuple(tuple(ln.end_s for ln in lanes) for lanes in run.lanes)


def test_whole_layers_in_one_lane_run_strict_1f1b() -> None:
    replica = make_replica([3, 1], 0, send_s=0.1)
    run = simulate_replica(replica)
    strict = simulate_pipeline([stage_times(s) for s in replica.stages], 4)
    assert tuple(lane.actions for (lane,) in run.lanes) == strict.actions
    assert run.end_s == strict.end_s
    assert [lane.peak_activations for (lane,) in run.lanes] == list(strict.peak_activations)


@pytest.mark.parametrize("order", list(Order))
def test_step_and_its_cost_agree_with_cuts(order: Order) -> None:
    ranks = make_ranks("ab")
    replica = cut_replica(order)
    run = simulate_step(ranks, [replica], LINKS, MODEL, Dtype.FP32)
    cost = step_cost(ranks, [replica], links=LINKS, model=MODEL, dtype=Dtype.FP32)
    assert cost == run.cost
    parts = (cost.compute_s, cost.bubble_s, cost.p2p_s, cost.sync_s, cost.optimizer_s)
    assert sum(parts) == pytest.approx(cost.step_s)
    assert cost.sync_s > 0  # of the layer that both hold
    spans = {span.kind for span in run.rank_spans[0]}
    assert ("W" in spans) == (order is Order.ZERO_BUBBLE)


def test_both_holders_of_a_cut_layer_and_all_lanes_of_a_stage_reduce_together() -> None:
    (bucket,) = gradient_buckets(make_ranks("ab"), [cut_replica(Order.ONE_F_ONE_B)], MODEL, 4)
    assert (bucket.units, bucket.ranks) == (("layer.1",), (0, 1))
    first, last = make_replica([2, 2], 0).stages
    laned = replace(
        make_replica([2, 2], 0),
        stages=(replace(first, ranks=(0, 1), lanes=2), replace(last, ranks=(2, 3, 4), lanes=3)),
    )
    buckets = gradient_buckets(make_ranks("aabbb"), [laned], MODEL, 4)
    assert [b.ranks for b in buckets] == [(2, 3, 4), (0, 1)]


def test_ranks_of_a_lane_that_share_layers_stand_as_one() -> None:
    first, last = make_replica([2, 2], 0).stages
    shared = replace(
        make_replica([2, 2], 0),
        stages=(replace(first, ranks=(0, 1, 2, 3), lanes=2), replace(last, ranks=(4,))),
    )
    (bucket,) = gradient_buckets(make_ranks("aaaab"), [shared], MODEL, 4)
    assert bucket.ranks == (0, 2)
    run = simulate_step(make_ranks("aaaab"), [shared], LINKS, MODEL, Dtype.FP32)
    done = [[s.microbatch for s in spans if s.kind == "F"] for spans in run.rank_spans]
    assert done == [[0, 2], [0, 2], [1, 3], [1, 3], [0, 1, 2, 3]]
