"""Copies of a stage that take microbatches in turn: when the planner uses them, what it proves of them, and brute force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.errors import NoPlanError
from hetrun.model import MIB, LinkKind, Order, PlanLimits, Split, StagePlan
from hetrun.planner import plan
from hetrun.planner.batch import many_windows
from hetrun.planner.check import check_split
from hetrun.planner.drafts import Candidate, Group, judge, narrow_windows, wide_windows
from hetrun.planner.estimate import sync_s
from hetrun.planner.explain import explain
from hetrun.planner.problem import Problem
from hetrun.planner.search import search
from hetrun.planner.shapes import ShapeMaker
from hetrun.schedule import all_reduce_s, gradient_buckets, lane_windows, simulate_step
from hetrun.store import dumps
from tests.effort import examples
from tests.unit.planner_lab import FREE_LINKS, LINKS, WHOLE, Chips, Lab, small_model
from tests.unit.test_planner_brute import cuts, heavy, multisets, problem_of
from tests.unit.test_planner_orders import split_of
from tests.unit.test_planner_properties import plan_or_none

ROUTES = replace(WHOLE, lanes=(1, 2, 3))
ONE_LAYER = 0.3 * MIB  # of memory: a layer of two and its microbatches
FAST = Chips(vendor="fast", num_devices=1, layer_s=1.0, memory=ONE_LAYER)
SLOW = Chips(vendor="slow", num_devices=3, layer_s=3.0, memory=ONE_LAYER)
SHALLOW = Lab(
    chips=[FAST, SLOW],
    model=small_model(2),
    batch=12,
    rows=(1,),
    seq_len=16,
    links=FREE_LINKS,
    limits=WHOLE,
)


def routed(split: Split) -> list[StagePlan]:
    return [stage for r in split.replicas for stage in r.stages if stage.lanes > 1]


def one_replica(lab: Lab, kinds: tuple[int, ...], count: int) -> Candidate:
    problem = problem_of(lab)
    shape = ShapeMaker(problem).make(kinds, lab.rows[0])
    assert shape is not None
    return judge(problem, (Group(shape=shape, windows=wide_windows(shape), counts=(count,)),))


def test_three_slow_copies_keep_up_with_one_fast_device() -> None:
    """Two layers make two stages at most: two pipelines at a slow device's pace take 21 s. With lanes it is four rounds
    of 3 s, of which the fast device fills all but the 3 s in which the slow ones begin and end.
    """
    alone = SHALLOW.plan()
    assert alone.split.cost.step_s == pytest.approx(21, rel=1e-6)
    assert routed(alone.split) == []
    lanes = replace(SHALLOW, limits=ROUTES).plan()
    (replica,) = lanes.split.replicas
    assert [(stage.lanes, stage.num_layers) for stage in replica.stages] == [(3, 1), (1, 1)]
    assert lanes.split.cost.step_s == pytest.approx(15, rel=1e-6)
    assert lanes.split.cost.compute_s == pytest.approx(12, rel=1e-6)
    assert lanes.bound_s == pytest.approx(12, rel=1e-6)
    assert "Stages in up to 3 lanes: 40.00% quicker" in lanes.verdict
    assert "slow 1 in 2 lanes" in lanes.runner_up
    terms = explain(lanes, replace(SHALLOW, limits=ROUTES).profile).terms
    assert [term.value for term in terms if term.what == "lanes"] == [3]


@pytest.mark.parametrize("many", [1, 8])
def test_slow_links_between_vendors_make_routes_of_what_would_be_replicas(many: int) -> None:
    """Replicas reduce every layer between the vendors; on a route each vendor holds a layer of its own."""
    links = tuple(
        replace(link, bytes_per_s=5e3) if link.kind is LinkKind.ACROSS else link for link in LINKS
    )
    chips = [
        replace(FAST, memory=None, num_devices=many),
        replace(SLOW, memory=None, num_devices=3 * many),
    ]
    lab = replace(SHALLOW, chips=chips, links=links, batch=48 * many, model=small_model(2, 257))
    alone, lanes = lab.plan(), replace(lab, limits=ROUTES).plan()
    assert len(routed(lanes.split)) == many
    assert lanes.split.cost.step_s < 0.8 * alone.split.cost.step_s
    check_split(lanes.split, lab.facts, lab.profile, lanes.recipe)


def test_lanes_of_equal_pace_never_wait() -> None:
    """Where stages are balanced and microbatches fill all turns, a step is the rounds of the last stage and what is before it."""
    assert lane_windows((1, 1, 1)) == (3, 2, 1)
    assert lane_windows((2, 1, 3)) == (3, 4, 1)
    lab = replace(
        SHALLOW,
        chips=[replace(FAST, num_devices=2, layer_s=2.0, memory=None)] * 1
        + [replace(SLOW, num_devices=2, layer_s=2.0, memory=None)],
        limits=PlanLimits(lanes=(1, 2)),
    )
    found = one_replica(lab, (1, 3), 12)  # both in two lanes
    assert [stage.lanes for stage in found.layout.replicas[0].stages] == [2, 2]
    assert found.step_s == pytest.approx(6 * 2 + 2, rel=1e-6)


def test_arrays_have_the_same_windows() -> None:
    import numpy as np

    lanes = np.asarray([[1, 1, 1, 0], [2, 1, 3, 0], [4, 0, 0, 0], [1, 2, 4, 1]])
    for row, windows in zip(lanes.tolist(), many_windows(lanes).tolist(), strict=True):
        own = [count for count in row if count]
        assert windows == [*lane_windows(own), *([1] * (4 - len(own)))]


def test_lanes_of_a_single_replica_reduce_their_gradients() -> None:
    lab = replace(SHALLOW, links=LINKS, limits=ROUTES)
    split = lab.plan().split
    (bucket, *others) = gradient_buckets(split.ranks, split.replicas, lab.model, 4)
    stage = routed(split)[0]
    assert others == []
    assert bucket.ranks == stage.ranks
    spent_s = all_reduce_s(bucket.num_bytes, [split.ranks[rank] for rank in stage.ranks], LINKS)
    assert 0 < spent_s < split.cost.sync_s + 1e-12
    problem = problem_of(lab)
    shape = ShapeMaker(problem).make((3, 0), 1)
    assert shape is not None
    assert shape.lanes == (3, 1)
    assert sync_s(problem, ((shape, 1),)) == pytest.approx(split.cost.sync_s)


def test_sends_take_the_slowest_link_between_lanes() -> None:
    chips = [replace(SLOW, num_devices=3, per_host=2, memory=None)]
    lab = replace(SHALLOW, chips=chips, links=LINKS, limits=ROUTES)
    replica = one_replica(lab, (1, 0), 6).layout.replicas[0]
    sent = 16 * 32 * 4
    assert [stage.lanes for stage in replica.stages] == [2, 1]
    assert replica.stages[0].send_s == pytest.approx(2e-5 + sent / 6e9)


def test_eight_copies_before_two_of_four_devices_each() -> None:
    """dp 8 tp 1, then dp 2 tp 4: what other planners call (8, 1)(2, 4)."""
    chips = [
        Chips(vendor="a", num_devices=8, per_host=4),
        Chips(vendor="b", num_devices=8, per_host=4),
    ]
    limits = PlanLimits(lanes=(1, 2, 8), tp=(1, 4))
    lab = Lab(chips=chips, model=small_model(4), batch=32, rows=(1,), seq_len=16, limits=limits)
    lab = replace(lab, model=replace(lab.model, num_heads=4))
    problem = problem_of(lab)
    ways = {(k.vendor, k.tp, k.lanes): n for n, k in enumerate(problem.kinds)}
    found = one_replica(lab, (ways["a", 1, 8], ways["b", 4, 2]), 32)
    split = split_of(found)
    check_split(split, lab.facts, lab.profile, lab.recipe)
    first, second = split.replicas[0].stages
    assert (first.lanes, len(first.ranks), second.lanes, len(second.ranks)) == (8, 8, 2, 8)
    for lane in (second.ranks[:4], second.ranks[4:]):
        assert len({split.ranks[rank].host for rank in lane}) == 1


def test_lanes_are_the_knob_where_first_stages_hold_too_many_microbatches() -> None:
    chips = [Chips(vendor="x", num_devices=5, memory=0.6974 * MIB, per_host=8)]
    lab = Lab(chips=chips, model=small_model(3), batch=16, rows=(1,), seq_len=64)
    with pytest.raises(NoPlanError) as caught:
        lab.plan()
    assert (caught.value.hint or "").startswith("allow plan.lanes: [1, 2, 4], or ")
    helped = replace(lab, limits=PlanLimits(lanes=(1, 2, 4))).plan()
    assert routed(helped.split)
    tiny = replace(lab, chips=[replace(chips[0], memory=0.1 * MIB)])
    with pytest.raises(NoPlanError) as caught:
        tiny.plan()
    assert "lanes" not in (caught.value.hint or "")


@pytest.mark.parametrize("lanes", [(), (2,), (1, 1), (1, 0)])
def test_lanes_of_a_recipe_hold_one_and_no_nonsense(lanes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="plan: lanes"):
        PlanLimits(lanes=lanes)


@pytest.mark.parametrize("broken", [{"lanes": 1}, {"num_layers": 2}, {"window": 1}])
def test_broken_routes_are_refused(broken: dict[str, int]) -> None:
    lab = replace(SHALLOW, limits=ROUTES)
    split = lab.plan().split
    (replica,) = split.replicas
    first = replace(replica.stages[0], **broken)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"plan|no figures"):
        check_split(
            replace(split, replicas=(replace(replica, stages=(first, *replica.stages[1:])),)),
            lab.facts,
            lab.profile,
            lab.recipe,
        )
    with pytest.raises(ValueError, match="3 lanes"):
        check_split(split, lab.facts, lab.profile, SHALLOW.recipe)


@st.composite
def labs(draw: st.DrawFn) -> Lab:
    chips = [
        Chips(
            vendor=name,
            num_devices=draw(st.integers(1, 4)),
            gflops=draw(st.sampled_from([0.5, 1.0, 2.0])),
            memory=draw(st.sampled_from([0.3 * MIB, 0.6 * MIB, None])),
            per_host=4,
        )
        for name in "xy"
    ]
    order = draw(st.sampled_from([(Order.ONE_F_ONE_B,), tuple(Order)]))
    return Lab(
        chips=chips,
        model=draw(st.sampled_from([small_model(2), small_model(4), heavy(3), heavy(5)])),
        batch=draw(st.integers(4, 16)),
        rows=(1,),
        seq_len=16,
        links=tuple(
            replace(link, bytes_per_s=draw(st.sampled_from([1e6, 1e9])))
            if link.kind is LinkKind.ACROSS
            else link
            for link in LINKS
        ),
        limits=PlanLimits(
            lanes=(1, 2, 3),
            tp=draw(st.sampled_from([(1,), (1, 2)])),
            recompute=draw(st.booleans()),
            fractional=draw(st.booleans()),
            orders=order,
        ),
    )


@pytest.mark.slow
@settings(max_examples=examples(8), deadline=None)
@given(labs())
def test_leave_to_take_turns_never_costs_and_both_evaluators_agree(lab: Lab) -> None:
    found = plan_or_none(lab)  # proves and evaluates it anew
    if found is None:
        return
    split, recipe = found.split, lab.recipe
    run = simulate_step(split.ranks, split.replicas, lab.links, lab.model, recipe.train.dtype)
    assert run.cost.step_s == pytest.approx(split.cost.step_s, rel=1e-9)
    for replica in split.replicas:
        for stage in replica.stages:
            peaks = {run.peak_activations[rank] for rank in stage.ranks}
            assert max(peaks) <= (stage.most_held or stage.window)
    assert split.cost.step_s >= found.bound_s * (1 - 1e-9)
    without = plan_or_none(replace(lab, limits=replace(lab.limits, lanes=(1,))))
    if without is not None:
        assert split.cost.step_s <= without.split.cost.step_s * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=examples(2), deadline=None)
@given(labs())
def test_order_of_hosts_changes_no_route_and_the_same_input_gives_the_same_bytes(lab: Lab) -> None:
    found = plan_or_none(lab)
    if found is None:
        return
    facts = replace(lab.facts, hosts=lab.facts.hosts[::-1])
    assert dumps(plan(facts, lab.profile, lab.recipe, targets={})) == dumps(found)
    assert dumps(lab.plan()) == dumps(found)


@pytest.mark.slow
@settings(max_examples=examples(4), deadline=None)
@given(
    tight=st.sampled_from([ONE_LAYER, 0.5 * MIB]), layers=st.integers(2, 3), batch=st.integers(3, 8)
)
def test_another_device_never_makes_a_route_slower(tight: float, layers: int, batch: int) -> None:
    slower = None
    for count in (1, 2, 3):
        chips = [replace(FAST, memory=tight), replace(SLOW, memory=tight, num_devices=count)]
        lab = replace(SHALLOW, chips=chips, batch=batch, model=small_model(layers), limits=ROUTES)
        found = plan_or_none(lab)
        if found is not None:
            assert slower is None or found.split.cost.step_s <= slower * (1 + 1e-6)
            slower = found.split.cost.step_s


def sequences(problem: Problem, use: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All orders of stages that take exactly so many devices of each group."""
    if not any(use):
        yield ()
        return
    for number, kind in enumerate(problem.kinds):
        place = problem.places[number]
        if kind.width <= use[place]:
            left = tuple(n - kind.width * (at == place) for at, n in enumerate(use))
            for rest in sequences(problem, left):
                yield (number, *rest)


def pipelines(maker: ShapeMaker, use: tuple[int, ...]) -> Iterator[Group]:
    for kinds in sequences(maker.problem, use):
        for layers in cuts(maker.problem.model.num_layers, len(kinds)):
            shape = maker.finish(kinds, layers, 1, memory_bound=False)
            for windows in {narrow_windows(shape), wide_windows(shape)}:
                if maker.fits(shape, windows):
                    yield Group(shape=shape, windows=windows, counts=())


def brute_force(problem: Problem) -> Candidate | None:
    """Every way to group, order, route, cut and share out, with narrow and wide windows."""
    maker = ShapeMaker(problem)
    best: Candidate | None = None
    for use in product(*(range(n + 1) for n in problem.capacity)):
        for replicas in multisets(use, use):
            for picked in product(*(list(pipelines(maker, one)) for one in replicas)):
                for counts in cuts(problem.batch_rows, len(picked)) if picked else ():
                    groups = (replace(g, counts=(n,)) for g, n in zip(picked, counts, strict=True))
                    tried = judge(problem, tuple(groups))
                    if best is None or tried.step_s < best.step_s:
                        best = tried
    return best


@st.composite
def tiny(draw: st.DrawFn) -> Lab:
    chips = [
        Chips(
            vendor=name,
            num_devices=draw(st.integers(1, most)),
            gflops=draw(st.sampled_from([0.5, 1.0, 2.0])),
            memory=draw(st.sampled_from([ONE_LAYER, 0.5 * MIB, 0.8 * MIB, None])),
        )
        for name, most in (("x", 3), ("y", 1))
    ]
    across = draw(st.sampled_from([1e6, 1e7, 1e9]))
    return Lab(
        chips=chips,
        model=draw(st.sampled_from([small_model(2), small_model(3), heavy(2), heavy(3)])),
        batch=draw(st.integers(1, 5)),
        rows=(1,),
        seq_len=16,
        links=tuple(
            replace(link, bytes_per_s=across) if link.kind is LinkKind.ACROSS else link
            for link in LINKS
        ),
        limits=ROUTES,
    )


@pytest.mark.slow
@settings(max_examples=examples(8), deadline=None)
@given(tiny())
def test_no_route_of_a_tiny_cluster_is_better_than_ours(lab: Lab) -> None:
    problem = problem_of(lab)
    best = brute_force(problem)
    if best is not None:
        assert search(problem).best.step_s <= best.step_s * 1.001


def test_the_clear_case_is_solved_exactly() -> None:
    problem = problem_of(replace(SHALLOW, limits=ROUTES, batch=6))
    best = brute_force(problem)
    assert best is not None
    assert max(max(group.shape.lanes) for group in best.groups) > 1
    assert search(problem).best.step_s == pytest.approx(best.step_s, rel=1e-9)
