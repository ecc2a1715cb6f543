"""More never hurts: one more device, a faster link, leave to do more. All within what a search of few candidates can promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.model import MIB, Link, LinkKind, Order, Pins, PlanLimits
from hetrun.planner.problem import read_problem
from hetrun.planner.search import search
from hetrun.planner.variety import FEW
from tests.effort import examples
from tests.unit.planner_lab import FREE_LINKS, LINKS, WHOLE, Chips, Lab, small_model
from tests.unit.test_planner_properties import labs, plan_or_none

pytestmark = pytest.mark.slow

EXACT = 1e-9
NEAR = 0.1  # with more devices only some combinations are laid out; of 184 random labs 2 were worse, 3.5 % at most
FREEDOM = (
    0.1  # other orders are tried of what 1F1B ranks; of 150 random labs 2 were worse, 6.3 % at most
)


def allowed(lab: Lab) -> float:
    """How much of a step the search may miss."""
    return EXACT if sum(chips.num_devices for chips in lab.chips) <= FEW else NEAR


@settings(max_examples=examples(8), deadline=None)
@given(labs())
def test_one_more_device_never_makes_a_plan_slower(lab: Lab) -> None:
    if max(lab.rows) > lab.batch:
        return
    before = plan_or_none(lab)
    if before is None:
        return
    first = lab.chips[0]
    more: list[Chips] = [replace(first, num_devices=first.num_devices + 1), *lab.chips[1:]]
    larger = replace(lab, chips=more)
    after = larger.plan()
    assert after.split.cost.step_s <= before.split.cost.step_s * (1 + allowed(larger))


@settings(max_examples=examples(8), deadline=None)
@given(labs(), st.sampled_from([2.0, 10.0]))
def test_faster_links_never_make_a_plan_slower(lab: Lab, factor: float) -> None:
    if max(lab.rows) > lab.batch:
        return
    before = plan_or_none(lab)
    if before is None:
        return
    links = tuple(
        replace(link, latency_s=link.latency_s / factor, bytes_per_s=link.bytes_per_s * factor)
        for link in lab.links
    )
    after = replace(lab, links=links).plan()
    assert after.split.cost.step_s <= before.split.cost.step_s * (1 + allowed(lab))


FREE = PlanLimits(orders=tuple(Order), fractional=True)
LESS = {
    "two stages": replace(FREE, max_stages=2),
    "three stages": replace(FREE, max_stages=3),
    "one shape": replace(FREE, max_shapes=1),
    "two shapes": replace(FREE, max_shapes=2),
    "whole layers": replace(FREE, fractional=False),
    "1F1B": replace(FREE, orders=WHOLE.orders),
}


@settings(max_examples=examples(8), deadline=None)
@given(labs(), st.sampled_from(sorted(LESS)))
def test_leave_to_do_more_never_makes_a_plan_slower(lab: Lab, less: str) -> None:
    if max(lab.rows) > lab.batch:
        return
    limited = plan_or_none(replace(lab, limits=LESS[less]))
    if limited is None:
        return
    free = replace(lab, limits=FREE).plan()
    assert free.split.cost.step_s <= limited.split.cost.step_s * (1 + FREEDOM)


def slow_links(
    latency_s: float, inside_host: float, inside_island: float, across: float
) -> tuple[Link, ...]:
    """Links of one latency and these bytes per second."""
    rates = {
        LinkKind.INSIDE_HOST: inside_host,
        LinkKind.INSIDE_ISLAND: inside_island,
        LinkKind.ACROSS: across,
    }
    return tuple(replace(x, latency_s=latency_s, bytes_per_s=rates[x.kind]) for x in LINKS)


FEW_ROWS = {
    "one row, two layers": Lab(
        chips=[
            Chips(vendor="x", num_devices=1, gflops=0.8),
            Chips(vendor="y", num_devices=2, gflops=0.8, per_host=1),
            Chips(vendor="z", num_devices=3, gflops=2.0, memory=2.5 * MIB, per_host=1),
        ],
        model=small_model(2),
        batch=1,
        links=slow_links(2e-3, 1e7, 1e7, 1e7),
    ),
    "three rows, one layer": Lab(
        chips=[Chips(vendor="x", num_devices=2, gflops=2.0), Chips(vendor="y", num_devices=4)],
        model=small_model(1),
        batch=3,
        links=slow_links(1e-4, 1e10, 1e7, 1e8),
    ),
    "only some of a vendor": Lab(
        chips=[
            Chips(vendor="x", num_devices=2, memory=1.2 * MIB, per_host=1),
            Chips(vendor="y", num_devices=4, gflops=0.5, memory=1.2 * MIB, per_host=3),
        ],
        model=small_model(1),
        batch=5,
        links=slow_links(0.0, 1e10, 1e7, 1e10),
    ),
    "some pipelines beside another": Lab(
        chips=[
            Chips(vendor="x", num_devices=3, gflops=0.5, memory=1.2 * MIB),
            Chips(vendor="y", num_devices=3, memory=0.6 * MIB),
            Chips(vendor="z", num_devices=3, gflops=0.8),
        ],
        model=small_model(5),
        batch=14,
        links=slow_links(2e-3, 1e7, 1e7, 1e10),
    ),
}


@pytest.mark.parametrize("lab", FEW_ROWS.values(), ids=FEW_ROWS)
def test_devices_that_would_only_share_gradients_are_left_idle(lab: Lab) -> None:
    lab = replace(lab, rows=(1,), seq_len=16, limits=replace(WHOLE, max_stages=2))
    first = lab.chips[0]
    larger = replace(lab, chips=[replace(first, num_devices=first.num_devices + 1), *lab.chips[1:]])
    step_s = lab.plan().split.cost.step_s
    assert larger.plan().split.cost.step_s <= step_s * (1 + EXACT)


ALONE = Lab(
    chips=[
        Chips(vendor="x", num_devices=9, gflops=0.5, memory=1.2 * MIB, per_host=3),
        Chips(vendor="y", num_devices=8, gflops=0.5, memory=6 * MIB, per_host=2),
    ],
    model=replace(small_model(4), tied_embeddings=True),
    batch=17,
    rows=(1, 2),
    seq_len=16,
    links=slow_links(2e-3, 1e10, 1e7, 1e7),
    limits=WHOLE,
)


def test_a_vendor_alone_is_never_quicker_than_the_plan() -> None:
    plan = ALONE.plan()
    alone = max(base.rows_per_s or 0.0 for base in plan.baselines)
    assert ALONE.batch / plan.split.cost.step_s >= alone * (1 - EXACT)


def test_a_vendor_alone_does_not_take_the_place_of_what_is_pinned() -> None:
    problem = read_problem(ALONE.facts, ALONE.profile, ALONE.recipe, targets={})
    mixed = search(problem).best
    rows = tuple(sorted(replica.num_rows for replica in mixed.layout.replicas))
    pinned = replace(ALONE, limits=replace(WHOLE, pins=Pins(rows=rows))).plan()
    assert tuple(sorted(replica.num_rows for replica in pinned.split.replicas)) == rows
    assert pinned.split.cost.step_s > ALONE.plan().split.cost.step_s


def test_zero_bubble_may_make_quickest_what_waits_longest_in_1f1b() -> None:
    lab = Lab(
        chips=[
            Chips(vendor="x", num_devices=1, layer_s=1.0),
            Chips(vendor="y", num_devices=3, layer_s=1.0),
        ],
        model=small_model(6),
        batch=6,
        rows=(1,),
        links=FREE_LINKS,
        limits=PlanLimits(orders=tuple(Order), fractional=False),
    )
    assert lab.plan().split.cost.step_s == pytest.approx(10.0)
