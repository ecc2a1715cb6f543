"""Zero bubble and real cuts in plans: what they reach, what they cost, and that they are taken only where they pay."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun import arch
from hetrun.errors import ConfigError
from hetrun.model import Order, Pins, Plan, PlanLimits, Profile, RankPlan, ReplicaPlan, Split
from hetrun.planner.bound import lower_bound
from hetrun.planner.check import check_split
from hetrun.planner.cost import Crossings
from hetrun.planner.drafts import Candidate, Group, judge, narrow_windows
from hetrun.planner.explain import explain
from hetrun.planner.export import TARGETS, export
from hetrun.planner.orders import even_cuts, refined
from hetrun.planner.problem import Problem, read_problem
from hetrun.planner.promise import promise_s
from hetrun.planner.recost import recost
from hetrun.planner.shapes import ShapeMaker
from hetrun.report.plan_page import to_page
from hetrun.schedule import simulate_replica, step_cost
from hetrun.schedule.modelled import modelled_timings
from tests.effort import examples
from tests.unit.planner_lab import FREE_LINKS, LINKS, MODEL, WHOLE, Chips, Lab, small_model

ALL = PlanLimits(orders=tuple(Order), fractional=True)


def headed(lab: Lab) -> Profile:
    """Figures whose head weighs one layer and whose B and W take as long as F."""
    profile = lab.profile
    devices = [
        replace(
            device,
            timings=tuple(
                replace(
                    t,
                    head_forward_s=t.layer_forward_s,
                    head_backward_s=t.layer_backward_s,
                    layer_weights_s=t.layer_forward_s,
                    head_weights_s=t.layer_forward_s,
                )
                for t in device.timings
            ),
        )
        for device in profile.devices
    ]
    return replace(profile, devices=tuple(devices))


def one_pipeline(
    speeds: tuple[float, ...], count: int, *, limits: PlanLimits = ALL, memory: float | None = None
) -> tuple[Problem, Candidate]:
    """Two chips of each speed in one pipeline of 24 layers and a head, on links that cost nothing."""
    lab = Lab(
        chips=[
            Chips(vendor="abc"[number], num_devices=2, layer_s=3 / speed, memory=memory)
            for number, speed in enumerate(speeds)
        ],
        model=small_model(24),
        batch=count,
        rows=(1,),
        seq_len=8,
        links=FREE_LINKS,
        limits=limits,
    )
    problem = read_problem(lab.facts, headed(lab), lab.recipe, targets={})
    kinds = tuple(kind for kind in range(len(speeds)) for _ in range(2))
    shape = ShapeMaker(problem).make(kinds, 1)
    assert shape is not None
    group = Group(shape=shape, windows=narrow_windows(shape), counts=(count,))
    return problem, judge(problem, (group,))


@pytest.mark.parametrize(
    ("speeds", "count", "least"),
    [
        ((2.0, 1.2), 64, 0.9846),
        pytest.param((2.0, 1.2), 512, 0.9977, marks=pytest.mark.slow),
        ((2.0, 1.2, 0.8), 64, 0.9664),
        pytest.param((2.0, 1.2, 0.8), 288, 0.9903, marks=pytest.mark.slow),
    ],
)
def test_a_mixed_pipeline_uses_nearly_all_of_the_summed_speed(
    speeds: tuple[float, ...], count: int, least: float
) -> None:
    problem, plain = one_pipeline(speeds, count)
    best = refined(problem, plain)
    used = lower_bound(problem).step_s / best.step_s
    assert least <= used <= 1
    (replica,) = best.layout.replicas
    assert replica.order is Order.ZERO_BUBBLE
    assert len(replica.cuts) == len(replica.stages) - 1
    for stage, (lane,) in zip(replica.stages, simulate_replica(replica).lanes, strict=True):
        assert stage.most_held is not None
        assert lane.peak_activations <= stage.most_held <= len(replica.stages) + 4
    assert used > lower_bound(problem).step_s / plain.step_s + 0.05


def test_every_allowed_order_and_cut_alone_is_slower_than_both() -> None:
    steps = []
    for limits in (WHOLE, replace(ALL, fractional=False), replace(WHOLE, fractional=True), ALL):
        problem, plain = one_pipeline((2.0, 1.2), 32, limits=limits)
        steps.append(refined(problem, plain).step_s)
    assert steps[3] < min(steps[1:3]) < max(steps[1:3]) < steps[0]


def test_real_cuts_level_the_stages_and_the_head_counts() -> None:
    problem, plain = one_pipeline((2.0, 1.2), 32)
    cuts = even_cuts(problem, plain.groups[0].shape, (4, 3, 2, 1))
    assert cuts == (7.8125, 15.625, 20.3125)  # 25 parts by 2, 2, 1.2, 1.2; the last has the head


def test_where_memory_is_short_fewer_microbatches_are_held() -> None:
    roomy = refined(*one_pipeline((2.0, 1.2), 32)).layout.replicas[0]
    most = max(stage.memory_bytes for stage in roomy.stages)
    tight = refined(*one_pipeline((2.0, 1.2), 32, memory=0.8 * most / 0.92)).layout.replicas[0]
    assert tight.order is Order.ZERO_BUBBLE
    held = [[stage.most_held or 0 for stage in r.stages] for r in (roomy, tight)]
    assert sum(held[1]) < sum(held[0])
    for stage in tight.stages:
        assert stage.memory_bytes <= (stage.memory_limit_bytes or 0)


def test_balanced_chips_that_each_hold_the_model_stay_with_plain_1f1b() -> None:
    lab = Lab(chips=[Chips(vendor="a", num_devices=4)], limits=ALL)
    plan = lab.plan()
    assert all(len(replica.stages) == 1 for replica in plan.split.replicas)
    assert all(replica.order is Order.ONE_F_ONE_B for replica in plan.split.replicas)
    assert "quicker than the best 1F1B" not in plan.verdict


def tight_lab(limits: PlanLimits) -> Lab:
    """Chips of which none holds the model alone."""
    return Lab(
        chips=[
            Chips(vendor="a", num_devices=2, gflops=2.0, memory=24e6),
            Chips(vendor="b", num_devices=2, gflops=1.2, memory=24e6),
        ],
        model=replace(MODEL, num_layers=24),
        batch=24,
        rows=(1,),
        limits=limits,
    )


def test_plan_says_what_its_order_and_cuts_gain_and_keeps_its_bound() -> None:
    plan = tight_lab(ALL).plan()
    assert "Zero bubble with real cuts: " in plan.verdict
    assert "quicker than the best 1F1B with whole layers" in plan.verdict
    assert "held and reduced twice" in plan.verdict
    assert plan.bound_s <= plan.split.cost.step_s
    assert plan.bound_covers == "any split"
    whole = tight_lab(WHOLE).plan()
    assert plan.split.cost.step_s < whole.split.cost.step_s
    assert even_of(plan) == even_of(whole)
    for replica in plan.split.replicas:
        assert sum(replica.layer_shares) == pytest.approx(24)


def even_of(plan: Plan) -> float:
    assert plan.even_split is not None
    assert all(replica.order is Order.ONE_F_ONE_B for replica in plan.even_split.replicas)
    return plan.even_split.cost.step_s


def test_pinned_layers_stay_whole() -> None:
    plan = tight_lab(replace(ALL, pins=Pins(layers=(8, 7, 5, 4)))).plan()
    assert [s.num_layers for s in plan.split.replicas[0].stages] == [8, 7, 5, 4]
    assert not any(replica.cuts for replica in plan.split.replicas)


def test_without_figures_of_the_weights_zero_bubble_is_not_offered() -> None:
    lab = tight_lab(replace(ALL, fractional=False))
    devices = [
        replace(d, timings=tuple(replace(t, layer_weights_s=None) for t in d.timings))
        for d in lab.profile.devices
    ]
    profile = replace(lab.profile, devices=tuple(devices))
    problem = read_problem(lab.facts, profile, lab.recipe, targets={})
    maker = ShapeMaker(problem)
    shape = maker.make((0, 0, 1, 1), 1)
    assert shape is not None
    plain = judge(problem, (Group(shape=shape, windows=narrow_windows(shape), counts=(24,)),))
    assert refined(problem, plain) is plain


@settings(max_examples=examples(8), deadline=None)
@given(
    speeds=st.lists(st.floats(0.5, 3), min_size=1, max_size=2),
    counts=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    memory=st.floats(12e6, 40e6),
    batch=st.integers(4, 20),
)
def test_a_refined_plan_is_never_slower_and_both_evaluators_agree(
    speeds: list[float], counts: list[int], memory: float, batch: int
) -> None:
    chips = [
        Chips(vendor="ab"[i], num_devices=counts[i], gflops=speed, memory=memory)
        for i, speed in enumerate(speeds)
    ]
    lab = Lab(chips=chips, model=replace(MODEL, num_layers=12), batch=batch, rows=(1,), limits=ALL)
    problem = read_problem(lab.facts, lab.profile, lab.recipe, targets={})
    maker = ShapeMaker(problem)
    kinds = tuple(k for k in range(len(chips)) for _ in range(counts[k]))
    shape = maker.make(kinds, 1)
    if shape is None or not maker.fits(shape, narrow_windows(shape)):
        return
    group = Group(shape=shape, windows=narrow_windows(shape), counts=(batch,))
    plain = judge(problem, (group,))
    best = refined(problem, plain)
    assert best.step_s <= plain.step_s
    whole = replace(problem, fractional=False)
    assert promise_s(whole, plain) <= refined(whole, plain).step_s * (1 + 1e-9)
    assert promise_s(problem, plain) <= promise_s(whole, plain)
    check_split(split_of(best), lab.facts, lab.profile, lab.recipe)


def split_of(candidate: Candidate) -> Split:
    plan = Lab(chips=[Chips(vendor="a", num_devices=1)]).plan()
    layout = candidate.layout
    return replace(plan.split, ranks=layout.ranks, replicas=layout.replicas, cost=layout.cost)


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("cut", [False, True])
def test_both_evaluators_agree_on_routes_through_different_numbers_of_lanes(
    order: Order, cut: bool
) -> None:
    lab = Lab(
        chips=[Chips(vendor="a", num_devices=3, gflops=2.0), Chips(vendor="b", num_devices=3)],
        batch=24,
        rows=(1,),
        limits=ALL,
    )
    problem = read_problem(lab.facts, lab.profile, lab.recipe, targets={})
    shape = ShapeMaker(problem).make((0, 0, 1), 1)
    assert shape is not None
    group = Group(shape=shape, windows=(3, 3, 2), counts=(24,))
    layout = refined(problem, judge(problem, (group,))).layout if cut else None
    if layout is None:
        layout = judge(problem, (group,)).layout
    ranks, replica = laned(layout.ranks, layout.replicas[0], (2, 1, 3))
    if order is Order.ONE_F_ONE_B or replica.order is Order.ONE_F_ONE_B:
        whole = [replace(s, weights_s=0.0, layer_weights_s=0.0) for s in replica.stages]
        replica = replace(replica, order=Order.ONE_F_ONE_B, stages=tuple(whole))
    cost = step_cost(
        ranks, [replica], links=problem.links, model=problem.model, dtype=problem.dtype
    )
    split = replace(split_of(judge(problem, (group,))), ranks=ranks, replicas=(replica,))
    assert recost(split, lab.profile, lab.recipe) == pytest.approx(cost.step_s, rel=1e-9)


def laned(
    ranks: tuple[RankPlan, ...], replica: ReplicaPlan, lanes: tuple[int, ...]
) -> tuple[tuple[RankPlan, ...], ReplicaPlan]:
    """Give each stage more devices like its own; hosts' links are shared by the lanes at their busier end."""
    more: list[RankPlan] = []
    stages = []
    hosts = [[ranks[s.ranks[0]].host] * n for s, n in zip(replica.stages, lanes, strict=True)]
    crossings = Crossings([hosts])
    at_once = [crossings.at_once(a[0], b[0]) for a, b in pairwise(hosts)]
    for stage, count, sends in zip(replica.stages, lanes, [*at_once, 1], strict=True):
        first = len(more)
        more += [replace(ranks[stage.ranks[0]], rank=first + n) for n in range(count)]
        send_s = stage.send_s + (sends - 1) * (stage.send_s - LINKS[2].latency_s)
        own = tuple(range(first, first + count))
        stages.append(replace(stage, ranks=own, lanes=count, send_s=send_s))
    return tuple(more), replace(replica, stages=tuple(stages))


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_exports_refuse_what_no_target_runs_and_say_what_to_set(target: str) -> None:
    plan = tight_lab(ALL).plan()
    with pytest.raises(ConfigError, match="runs zero bubble with real cuts") as caught:
        export(plan, target)
    assert "plan.orders: [1f1b]" in (caught.value.hint or "")


def test_page_and_explanation_show_order_shares_and_what_is_held() -> None:
    lab = tight_lab(ALL)
    plan = lab.plan()
    page = to_page(plan)
    assert "zero bubble with real cuts" in page
    assert "gradients of weights" in page
    stage, share = plan.split.replicas[0].stages[0], plan.split.replicas[0].layer_shares[0]
    assert f"{share:.4g} layers" in page
    assert f"{stage.window}, holds {stage.most_held}" in page
    terms = explain(plan, lab.profile).terms
    held = [term.how for term in terms if term.what == "memory: in flight"]
    assert any(f"of {stage.most_held} x 1 row" in how for how in held)
    assert any(term.what == "gradients of weights" for term in terms)


def test_modelled_weights_are_the_matrices_part_of_a_forward() -> None:
    (timing,) = modelled_timings(MODEL, [(1, False, 2)], seq_len=64, flops_per_s=1e9)
    matrices = arch.layer_parameters(MODEL) - 2 * MODEL.hidden_size
    assert timing.layer_weights_s == pytest.approx(2 * matrices * 2 * 64 / 1e9)
    assert timing.layer_backward_s == 2 * timing.layer_forward_s
    assert timing.head_weights_s == timing.head_forward_s
    assert (
        timing.layer_weights_s or 0.0
    ) < timing.layer_forward_s  # attention scores have no weights


BROKEN = [
    ("holds None until W", {"most_held": None}, {}),
    ("first layer 0, need", {"first_layer": 0}, {}),
    ("its cut is", {}, {"cuts": (3.5, 15.5, 20.5)}),
    ("recomputes and puts off W", {"recompute": True}, {}),
    ("evaluated anew", {"window": 1}, {}),
]


@pytest.mark.parametrize(("text", "of_stage", "of_replica"), BROKEN)
def test_broken_zero_bubble_is_refused(
    text: str, of_stage: dict[str, Any], of_replica: dict[str, Any]
) -> None:
    lab = tight_lab(replace(ALL, max_stages=4))
    problem = read_problem(lab.facts, lab.profile, lab.recipe, targets={})
    shape = ShapeMaker(problem).make((0, 0, 1, 1), 1)
    assert shape is not None
    plain = judge(problem, (Group(shape=shape, windows=narrow_windows(shape), counts=(24,)),))
    best = refined(problem, plain)
    split = split_of(best)
    check_split(split, lab.facts, lab.profile, lab.recipe)
    (replica,) = split.replicas
    stages = list(replica.stages)
    stages[2] = replace(stages[2], **of_stage)
    broken = replace(split, replicas=(replace(replica, stages=tuple(stages), **of_replica),))
    with pytest.raises(ValueError, match=text):
        check_split(broken, lab.facts, lab.profile, lab.recipe)
