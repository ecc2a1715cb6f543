"""Devices that share layers, and forwards that run again to save memory: when the planner uses them and what it says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.arch import layer_at
from hetrun.errors import NoPlanError
from hetrun.model import MIB, Dtype, Link, LinkKind, PlanLimits
from hetrun.planner import plan
from hetrun.planner.check import check_split
from hetrun.planner.kinds import parts_by_tp
from hetrun.planner.memory import Load, layer_bytes
from hetrun.planner.problem import Problem, read_problem
from hetrun.planner.recost import recost
from hetrun.planner.shapes import Shape, ShapeMaker
from tests.effort import examples
from tests.unit.planner_lab import FREE_LINKS, LINKS, Chips, Lab, small_model
from tests.unit.test_planner_properties import plan_or_none


def problem_of(lab: Lab) -> Problem:
    return read_problem(lab.facts, lab.profile, lab.recipe, targets={})


def units(count: float) -> float:
    """Bytes of `count` units of the case: a layer's states, or what it holds of one microbatch."""
    model, load = small_model(16), Load(rows=1, seq_len=SEQ_LEN, window=0)
    return count * layer_bytes(model, layer_at(model, 0), Dtype.FP32, load) / 0.92


SEQ_LEN = 68  # makes a layer's activations as large as its states
# The embedding, head and messages that the case leaves out have room between 12 and the next whole layer.
X = Chips(vendor="x", num_devices=4, layer_s=3.0, memory=units(13.3), per_host=4)
Y = Chips(vendor="y", num_devices=4, layer_s=3.0, memory=units(41), per_host=4)
SHORT_OF_MEMORY = Lab(
    chips=[X, Y],
    model=small_model(16),
    batch=64,
    rows=(1,),
    seq_len=SEQ_LEN,
    links=FREE_LINKS,
    limits=PlanLimits(recompute=True, max_stages=4),
)


def seconds(problem: Problem, shape: Shape) -> float:
    """What 64 microbatches take by the closed form of the case; the simulator says 12 less for X alone."""
    stages = [
        layers
        * (
            problem.kinds[k].timings[1].layer_forward_s
            + problem.kinds[k].timings[1].layer_backward_s
        )
        for k, layers in zip(shape.kinds, shape.layers, strict=True)
    ]
    return 63 * max(stages) + sum(stages)


def best_pipeline(vendors: str) -> tuple[float, tuple[int, ...], tuple[bool, ...]]:
    """The quickest four stages on these vendors over all choices of recomputation: seconds, layers, who recomputes."""
    problem = problem_of(SHORT_OF_MEMORY)
    maker = ShapeMaker(problem)
    ways = [[n for n, k in enumerate(problem.kinds) if k.vendor == vendor] for vendor in vendors]
    made = [shape for kinds in product(*ways) if (shape := maker.make(kinds, 1)) is not None]
    best = min(made, key=lambda shape: seconds(problem, shape))
    again = tuple(problem.kinds[kind].recompute for kind in best.kinds)
    return seconds(problem, best), best.layers, again


def test_short_memory_makes_the_small_vendor_recompute_alone_but_not_behind_the_large_one() -> None:
    alone_s, layers, again = best_pipeline("xxxx")
    assert alone_s == pytest.approx(1060)
    assert layers == (4, 3, 4, 5)
    assert again == (True, False, False, False)
    large_s, layers, again = best_pipeline("yyyy")
    assert large_s == pytest.approx(804)
    assert (layers, any(again)) == ((4, 4, 4, 4), False)
    mixed_s, layers, again = best_pipeline("yyxx")
    assert mixed_s == pytest.approx(804)
    assert (layers, any(again)) == ((4, 4, 4, 4), False)
    other_s, _, _ = best_pipeline("xxyy")
    both = 64 / alone_s + 64 / large_s
    assert 2 * 64 / mixed_s / both == pytest.approx(1.1373, abs=5e-5)
    assert 2 * 64 / other_s / both == pytest.approx(0.9181, abs=5e-5)


def test_layers_are_shared_inside_a_host_where_they_fit_in_no_other_way() -> None:
    chips = [
        Chips(vendor="x", num_devices=8, memory=0.32 * MIB, per_host=4),
        Chips(vendor="y", num_devices=4, memory=0.35 * MIB, per_host=2, gflops=0.6),
    ]
    lab = Lab(chips=chips, model=small_model(4), batch=32, rows=(1,), seq_len=16)
    with pytest.raises(NoPlanError):
        lab.plan()
    shared = replace(lab, limits=PlanLimits(tp=(1, 2, 4))).plan()
    stages = [stage for replica in shared.split.replicas for stage in replica.stages]
    assert {len(stage.ranks) for stage in stages} != {1}
    for stage in stages:
        assert len({shared.split.ranks[rank].host for rank in stage.ranks}) == 1
    check_split(
        shared.split,
        lab.facts,
        replace(lab, limits=PlanLimits(tp=(1, 2, 4))).profile,
        shared.recipe,
    )


@pytest.mark.parametrize(("latency_s", "bytes_per_s", "tp"), [(0.0, 1e12, 4), (0.01, 1e12, 1)])
def test_what_devices_that_share_a_layer_tell_each_other_decides_whether_they_do(
    latency_s: float, bytes_per_s: float, tp: int
) -> None:
    inside = Link(kind=LinkKind.INSIDE_HOST, latency_s=latency_s, bytes_per_s=bytes_per_s)
    lab = Lab(
        chips=[Chips(vendor="x", num_devices=4, per_host=4, tp_share=1.0)],
        batch=1,  # one row: only sharing its layers keeps all four at work
        rows=(1,),
        links=(inside, *LINKS[1:]),
        limits=PlanLimits(tp=(1, 2, 4)),
    )
    found = lab.plan()
    stage = found.split.replicas[0].stages[0]
    assert len(stage.ranks) == tp
    alone = lab.profile.devices[0].timings_of(tp=tp)[0]
    output = lab.seq_len * lab.model.hidden_size * 4
    told_s = 0.0 if tp == 1 else 2 * 2 * (tp - 1) * (latency_s + output / tp / bytes_per_s)
    expected_s = alone.head_forward_s + lab.model.num_layers * (alone.layer_forward_s + told_s)
    assert stage.forward_s == pytest.approx(expected_s)
    assert recost(found.split, lab.profile, found.recipe) == pytest.approx(
        found.split.cost.step_s, rel=1e-12
    )


def test_without_figures_for_any_allowed_tp_there_is_no_plan() -> None:
    lab = Lab(chips=[Chips(vendor="x", num_devices=2)], batch=8)
    recipe = replace(lab.recipe, plan=PlanLimits(tp=(2,)))
    with pytest.raises(NoPlanError, match=r"no figures for any tp of \[2\]"):
        read_problem(lab.facts, lab.profile, recipe, targets={})


def test_plenty_of_memory_needs_no_recomputation() -> None:
    lab = Lab(chips=[Chips(vendor="x", num_devices=3)], batch=24, limits=PlanLimits(recompute=True))
    assert not any(s.recompute for r in lab.plan().split.replicas for s in r.stages)


def test_recomputation_is_the_knob_that_a_refusal_names() -> None:
    tight = replace(SHORT_OF_MEMORY, chips=[replace(X, memory=units(8), num_devices=2)])
    with pytest.raises(NoPlanError) as caught:
        replace(tight, limits=PlanLimits()).plan()
    assert "allow plan.recompute" in (caught.value.hint or "")


def test_recomputation_that_is_allowed_and_was_not_profiled_is_to_be_profiled() -> None:
    tight = replace(SHORT_OF_MEMORY, chips=[replace(X, memory=units(8), num_devices=2)])
    plain = replace(tight, limits=PlanLimits())
    recipe = replace(plain.recipe, plan=PlanLimits(recompute=True))
    with pytest.raises(NoPlanError) as caught:
        plan(plain.facts, plain.profile, recipe, targets={})
    hint = caught.value.hint or ""
    assert "run `hetrun profile` again" in hint
    assert "allow plan.recompute" not in hint


def test_a_shortage_is_said_in_the_unit_that_fits() -> None:
    lab = Lab(chips=[Chips(vendor="x", num_devices=2, memory=0.3 * MIB)], batch=8)
    with pytest.raises(NoPlanError, match=r"lacks [1-9][\d.]* MiB .* with 0\.276 MiB to use"):
        lab.plan()


@st.composite
def labs(draw: st.DrawFn) -> Lab:
    chips = [
        Chips(
            vendor=name,
            num_devices=draw(st.integers(1, 4)),
            gflops=draw(st.sampled_from([0.5, 1.0, 2.0])),
            memory=draw(st.sampled_from([0.3 * MIB, 0.6 * MIB, 1.2 * MIB, None])),
            per_host=draw(st.integers(1, 4)),
        )
        for name in ("x", "y")[: draw(st.integers(1, 2))]
    ]
    return Lab(
        chips=chips,
        model=replace(small_model(draw(st.integers(1, 6))), tied_embeddings=draw(st.booleans())),
        batch=draw(st.integers(2, 16)),
        rows=draw(st.sampled_from([(1,), (1, 2)])),
        seq_len=16,
        limits=PlanLimits(tp=(1, 2), recompute=draw(st.booleans())),
    )


@settings(max_examples=examples(5), deadline=None)
@given(labs())
def test_every_such_plan_fits_and_costs_what_it_says(lab: Lab) -> None:
    result = plan_or_none(lab)
    if result is None:
        return
    check_split(result.split, lab.facts, lab.profile, lab.recipe)
    again_s = recost(result.split, lab.profile, lab.recipe)
    assert again_s == pytest.approx(result.split.cost.step_s, rel=1e-9)
    assert result.split.cost.step_s >= result.bound_s * (1 - 1e-12)
    for stage in (stage for replica in result.split.replicas for stage in replica.stages):
        limit = stage.memory_limit_bytes
        assert limit is None or stage.memory_bytes <= limit


@pytest.mark.parametrize(
    ("per_host", "tps", "parts"),
    [
        (8, (4, 2, 1), [((4, 2, 1), 16)]),
        (7, (4, 2, 1), [((4, 2, 1), 8), ((2, 1), 4), ((1,), 2)]),
        (3, (2,), [((2,), 4)]),
        (6, (6, 3, 2, 1), [((6, 3, 1), 12)]),
    ],
)
def test_devices_are_parted_so_that_tp_stays_inside_their_hosts(
    per_host: int, tps: tuple[int, ...], parts: list[tuple[tuple[int, ...], int]]
) -> None:
    chips = Chips(vendor="x", num_devices=2 * per_host, per_host=per_host)
    seats = problem_of(Lab(chips=[chips], batch=8)).kinds[0].seats
    found = list(parts_by_tp(seats, tps))
    assert [(chain, len(taken)) for chain, taken in found] == parts
    for chain, taken in found:
        sizes = Counter(seat.host for seat in taken)
        assert all(size % chain[0] == 0 for size in sizes.values())


@pytest.mark.parametrize(("tp", "idle"), [((1, 2), 0), ((2,), 2)])
def test_hosts_with_an_odd_number_of_devices_never_share_layers_across(
    tp: tuple[int, ...], idle: int
) -> None:
    chips = [Chips(vendor="x", num_devices=6, per_host=3, tp_share=1.0)]
    found = Lab(chips=chips, batch=2, rows=(1,), limits=PlanLimits(tp=tp)).plan()
    stages = [stage for replica in found.split.replicas for stage in replica.stages]
    assert max(len(stage.ranks) for stage in stages) == 2
    for stage in stages:
        assert len({found.split.ranks[rank].host for rank in stage.ranks}) == 1
    if idle:
        assert len(found.idle_devices) == idle
        assert "2 x x x-chip left idle" in found.verdict
