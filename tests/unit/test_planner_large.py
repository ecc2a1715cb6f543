"""plan() with more devices than can be tried one by one: the same promises, and a published frame of 768 devices."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from hetrun.errors import NoPlanError
from hetrun.model import GIB, MIB, Dtype, ModelSpec, Order, Plan, PlanLimits
from hetrun.planner import plan
from hetrun.planner.apportion import Part, apportion
from hetrun.planner.check import check_split
from hetrun.planner.layout import FreeSeats
from hetrun.planner.problem import read_problem
from tests.unit.planner_lab import FREE_LINKS, Chips, Lab, small_model

pytestmark = pytest.mark.slow

LARGE = Lab(
    chips=[
        Chips(vendor="x", num_devices=24, gflops=1.0, memory=0.6 * MIB, per_host=8),
        Chips(vendor="y", num_devices=16, gflops=0.4, memory=1.2 * MIB, per_host=4),
    ],
    model=small_model(8),
    batch=320,
    rows=(1, 2),
    seq_len=16,
)


@pytest.fixture(scope="module")
def large() -> Plan:
    return LARGE.plan()


def test_large_plan_is_whole_fits_and_keeps_a_bound_that_says_what_it_covers(large: Plan) -> None:
    check_split(large.split, LARGE.facts, LARGE.profile, LARGE.recipe)
    assert large.split.cost.step_s >= large.bound_s
    assert large.gap < 0.25
    assert large.bound_covers == "any split" or "replica shapes" in large.bound_covers
    assert large.even_split is None or large.split.cost.step_s < large.even_split.cost.step_s


def test_a_vendor_that_cannot_hold_the_model_is_no_obstacle_among_many_devices() -> None:
    chips = [replace(LARGE.chips[0], memory=0.3 * MIB), replace(LARGE.chips[1], memory=None)]
    found = replace(LARGE, chips=chips, model=small_model(4), batch=32, rows=(1,)).plan()
    assert found.split.cost.step_s >= found.bound_s


def test_order_of_many_hosts_changes_nothing(large: Plan) -> None:
    facts = replace(LARGE.facts, hosts=LARGE.facts.hosts[::-1])
    other = plan(facts, LARGE.profile, LARGE.recipe, targets={})
    assert json.dumps(asdict(other), default=str) == json.dumps(asdict(large), default=str)


def test_one_shape_is_kept_to_with_many_devices_and_has_a_price(large: Plan) -> None:
    one = replace(LARGE, limits=PlanLimits(max_shapes=1)).plan()
    shapes = {
        (r.microbatch_rows, *((one.split.ranks[s.ranks[0]].vendor, s.num_layers) for s in r.stages))
        for r in one.split.replicas
    }
    assert len(shapes) == 1
    price = one.split.cost.step_s / large.split.cost.step_s - 1
    assert f"At most 1 replica shape: {price:.2%} slower" in one.verdict


def test_many_devices_without_room_are_told_what_is_missing() -> None:
    chips = [replace(chips, memory=0.05 * MIB) for chips in LARGE.chips]
    with pytest.raises(NoPlanError, match="lacks") as caught:
        replace(LARGE, chips=chips).plan()
    assert "allow plan.recompute" in (caught.value.hint or "")


def test_large_batches_are_made_of_mixed_sizes_exactly() -> None:
    parts = [
        Part(rows=3, count=40, fill_s=1.0, cycle_s=1.0),
        Part(rows=2, count=11, fill_s=2.0, cycle_s=0.7),
    ]
    counts = apportion(50_001, parts)
    assert counts is not None
    assert sum(p.rows * sum(c) for p, c in zip(parts, counts, strict=True)) == 50_001
    assert apportion(50_001, [Part(rows=2, count=3, fill_s=0, cycle_s=1)]) is None


def test_seats_come_from_the_host_with_fewest_to_spare_else_from_the_first_ones() -> None:
    chips = [Chips(vendor="x", num_devices=11, per_host=4)]
    lab = replace(LARGE, chips=chips)
    seats = read_problem(lab.facts, lab.profile, lab.recipe, targets={}).kinds[0].seats
    free = FreeSeats(seats)
    taken = [[seat.name for seat in free.take(count)] for count in (3, 2, 4, 2)]
    assert taken == [
        ["x-2/0", "x-2/1", "x-2/2"],
        ["x-0/0", "x-0/1"],
        ["x-1/0", "x-1/1", "x-1/2", "x-1/3"],
        ["x-0/2", "x-0/3"],
    ]
    assert free.take(0) == []


def frame(ratio: float) -> Plan:
    """HETHUB's frame: 128 + 640 devices in hosts of eight, 140B, free links, 4,096 microbatches."""
    model = ModelSpec(
        num_layers=110, hidden_size=10240, num_heads=80, ffn_size=27648, vocab_size=32000
    )
    chips = [
        Chips(vendor="a", num_devices=128, gflops=ratio * 2e5, memory=64 * GIB, per_host=8),
        Chips(vendor="b", num_devices=640, gflops=2e5, memory=80 * GIB, per_host=8),
    ]
    return Lab(
        chips=chips,
        model=model,
        batch=4096,
        rows=(1,),
        seq_len=2048,
        dtype=Dtype.BF16,
        links=FREE_LINKS,
        limits=PlanLimits(tp=(8,), recompute=True),
    ).plan()


def share_of_a(result: Plan) -> float:
    """Layers times rows that vendor a computes, of all."""
    work = {"a": 0, "b": 0}
    for replica in result.split.replicas:
        for stage in replica.stages:
            work[result.split.ranks[stage.ranks[0]].vendor] += stage.num_layers * replica.num_rows
    return work["a"] / sum(work.values())


def is_as_published(result: Plan) -> bool:
    """Whether all 768 devices work and the mix reaches what was published for it."""
    e1 = result.split.efficiency.e1.value
    return result.idle_devices == () and e1 is not None and e1 >= 0.9749


def test_768_devices_of_two_vendors_all_work_at_the_published_efficiency() -> None:
    assert is_as_published(frame(0.6))


@pytest.mark.slow
def test_share_of_768_devices_moves_with_their_speed() -> None:
    results = [frame(ratio) for ratio in (0.3, 0.45, 0.6, 0.8, 1.0, 1.25, 1.5)]
    assert all(is_as_published(result) for result in results)
    shares = [share_of_a(result) for result in results]
    assert shares == sorted(shares)
    assert shares[-1] > 3 * shares[0]


def test_allowing_shared_layers_never_hides_the_better_long_pipelines_of_many_devices() -> None:
    model = ModelSpec(
        num_layers=40, hidden_size=5120, num_heads=40, ffn_size=13824, vocab_size=32000
    )
    chips = [
        Chips(vendor=vendor, num_devices=7, gflops=300e3 * speed, memory=gib * GIB, per_host=8)
        for vendor, speed, gib in zip(
            "abcd", (1.0, 0.62, 0.35, 0.22), (96, 64, 64, 32), strict=True
        )
    ]
    whole_layers = PlanLimits(orders=(Order.ONE_F_ONE_B,), fractional=False)
    lab = Lab(
        chips=chips,
        model=model,
        batch=448,
        rows=(1, 2),
        seq_len=4096,
        dtype=Dtype.BF16,
        limits=whole_layers,
    )
    alone = lab.plan()
    shared = replace(lab, limits=replace(whole_layers, tp=(1, 2))).plan()
    assert shared.split.cost.step_s <= alone.split.cost.step_s
