"""Plans of models whose layers differ: what holds for every plan holds for them too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun import arch
from hetrun.arch.hf import from_config
from hetrun.errors import NoPlanError
from hetrun.model import GIB, MIB, Dtype, Facts, LayerCount, ModelCount, ModelSpec, PlanLimits
from hetrun.planner import plan
from hetrun.planner.check import check_split
from hetrun.planner.cost import Piece, stage_seconds
from hetrun.planner.explain import explain
from hetrun.planner.memory import Load, stage_bytes
from hetrun.planner.problem import Problem, read_problem
from hetrun.planner.recost import recost
from hetrun.planner.search import search
from hetrun.schedule.modelled import modelled_timings
from tests.effort import examples
from tests.unit import arch_configs as configs
from tests.unit.planner_lab import LINKS, Chips, Lab, small_model

slow = pytest.mark.slow

DEEPSEEK = from_config(configs.DEEPSEEK_V3)
SPARSE = {"parameters": 3.0, "active": 0.5, "elements": 1.5}


def layer(num_layers: int, *, parameters: float, active: float, elements: float) -> LayerCount:
    """A run of layers, as multiples of those of a small llama."""
    plain = arch.layer_at(small_model(1), 0)
    return replace(
        plain,
        num_layers=num_layers,
        parameters=int(plain.parameters * parameters),
        active_parameters=int(plain.active_parameters * active),
        elements=int(plain.elements * elements),
    )


def model_of(runs: Sequence[LayerCount], vocab_size: int = 32) -> ModelSpec:
    base = small_model(sum(run.num_layers for run in runs), vocab_size)
    counts = ModelCount(
        layers=tuple(runs),
        embedding_parameters=vocab_size * base.hidden_size,
        head_parameters=base.hidden_size + vocab_size * base.hidden_size,
    )
    return replace(base, family="odd", counts=counts, config='{"model_type": "odd"}')


MODEL = model_of([layer(2, parameters=1, active=1, elements=1), layer(5, **SPARSE)])
LAB = Lab(
    chips=[
        Chips(vendor="x", num_devices=2, gflops=1.0, memory=2.5 * MIB),
        Chips(vendor="y", num_devices=2, gflops=0.6, memory=4 * MIB),
    ],
    model=MODEL,
    batch=12,
    rows=(1,),
    seq_len=16,
)


def problem_of(lab: Lab) -> Problem:
    return read_problem(lab.facts, lab.profile, lab.recipe, targets={})


def test_modelled_seconds_of_each_run_are_its_own_flops_and_the_mean_is_that_of_all() -> None:
    (timing,) = modelled_timings(DEEPSEEK, [(2, True, 1)], seq_len=512, flops_per_s=1e12)
    for run, timed in zip(arch.layer_runs(DEEPSEEK), timing.runs, strict=True):
        forward_s = arch.run_forward_flops(run, 1, 512) / 2 / 1e12
        assert timed.num_layers == run.num_layers
        assert (timed.forward_s, timed.backward_s) == pytest.approx((forward_s, 3 * forward_s))
    dense, sparse = timing.runs
    assert timing.layer_forward_s == pytest.approx(
        (3 * dense.forward_s + 58 * sparse.forward_s) / 61
    )
    (alike,) = modelled_timings(small_model(4), [(1, False, 1)], seq_len=8, flops_per_s=1e9)
    assert alike.runs == ()


def test_a_stage_costs_and_holds_the_layers_that_it_has() -> None:
    (timing,) = modelled_timings(DEEPSEEK, [(1, False, 1)], seq_len=64, flops_per_s=1e12)
    dense, sparse = timing.runs
    piece = Piece(first_layer=2, num_layers=3, has_embedding=False, has_head=False)
    assert stage_seconds(timing, piece)[0] == pytest.approx(dense.forward_s + 2 * sparse.forward_s)
    load = Load(rows=1, seq_len=64, window=2, tp=8)
    runs = arch.layer_runs(DEEPSEEK)
    states = 4 * 2 * -(-(runs[0].parameters + 2 * runs[1].parameters) // 8)
    held = [arch.layer_activation_bytes(r, Dtype.BF16, rows=1, seq_len=64, tp=8) for r in runs]
    messages = 4 * 64 * 7168 * 2
    expected = states + 2 * (held[0] + 2 * held[1]) + messages
    assert stage_bytes(DEEPSEEK, Dtype.BF16, piece, load) == expected
    again = stage_bytes(DEEPSEEK, Dtype.BF16, piece, replace(load, recompute=True))
    assert again == states + 2 * 3 * 64 * 7168 * 2 + max(held) + messages


def test_figures_of_other_layers_are_refused() -> None:
    profile = LAB.profile
    devices = tuple(
        replace(device, timings=tuple(replace(t, runs=()) for t in device.timings))
        for device in profile.devices
    )
    with pytest.raises(NoPlanError, match=r"the figures of x x-chip are not of layers \[2, 5\]"):
        read_problem(LAB.facts, replace(profile, devices=devices), LAB.recipe, targets={})


def test_every_number_of_a_run_of_layers_is_explained() -> None:
    lab = replace(LAB, chips=[replace(LAB.chips[1], num_devices=1)])
    terms = explain(lab.plan(), lab.profile).terms
    names = {(term.what, term.of) for term in terms}
    assert ("parameters", "one layer of 0-1") in names
    assert ("parameters", "one layer of 2-6") in names
    assert any(what == "layer of 2-6 backward" for what, _ in names)


def test_shortage_of_unequal_layers_names_the_group_and_how_many_are_held() -> None:
    chips = [replace(chips, memory=0.4 * MIB) for chips in LAB.chips]
    with pytest.raises(NoPlanError, match=r"together they hold \d of 7 layers"):
        replace(LAB, chips=chips).plan()


@st.composite
def labs(draw: st.DrawFn) -> Lab:
    """Clusters of one to three vendors and models of one to three runs, some of them heavy."""
    chips = [
        Chips(
            vendor=name,
            num_devices=draw(st.integers(1, 2)),
            gflops=draw(st.sampled_from([0.5, 0.8, 1.0, 2.0])),
            memory=draw(st.sampled_from([0.8 * MIB, 1.6 * MIB, 3 * MIB, 8 * MIB, None])),
            per_host=draw(st.integers(1, 3)),
        )
        for name in ("x", "y", "z")[: draw(st.integers(1, 2))]
    ]
    factor = st.sampled_from([0.5, 1.0, 3.0])
    runs = [
        layer(
            draw(st.integers(1, 4)),
            parameters=parameters,
            active=min(parameters, draw(factor)),
            elements=draw(factor),
        )
        for parameters in draw(st.lists(factor, min_size=2, max_size=3))
    ]
    across_s = draw(st.sampled_from([0.0, 1e-4, 2e-3]))
    links = tuple(
        replace(link, latency_s=across_s, bytes_per_s=draw(st.sampled_from([1e7, 1e8, 1e10])))
        for link in LINKS
    )
    limits = PlanLimits(
        tp=draw(st.sampled_from([(1,), (1, 2)])),
        recompute=draw(st.booleans()),
        max_stages=draw(st.sampled_from([None, 2])),
    )
    return Lab(
        chips=chips,
        model=model_of(runs, draw(st.sampled_from([32, 257]))),
        batch=draw(st.integers(2, 12)),
        rows=(1,) if draw(st.booleans()) else (1, 2),
        seq_len=16,
        links=links,
        limits=limits,
    )


def step_s(lab: Lab) -> float | None:
    try:
        return search(problem_of(lab)).best.step_s
    except NoPlanError as error:
        return None if "iB to use" in error.message else pytest.fail(str(error))


@slow
@settings(max_examples=examples(5), deadline=None)
@given(labs())
def test_every_plan_is_whole_fits_and_costs_what_it_says(lab: Lab) -> None:
    if step_s(lab) is None:
        return
    result = lab.plan()
    splits = [result.split] if result.even_split is None else [result.split, result.even_split]
    for split in splits:
        check_split(split, lab.facts, lab.profile, lab.recipe)
        again_s = recost(split, lab.profile, lab.recipe)
        assert again_s == pytest.approx(split.cost.step_s, rel=1e-9)
        for replica in split.replicas:
            held = [
                number
                for stage in replica.stages
                for number in range(stage.first_layer, stage.first_layer + stage.num_layers)
            ]
            assert held == list(range(lab.model.num_layers))
            for stage in replica.stages:
                memory = split.ranks[stage.ranks[0]].memory_bytes
                assert memory is None or stage.memory_bytes <= 0.92 * memory
    assert result.split.cost.step_s >= result.bound_s * (1 - 1e-12)
    u = result.split.efficiency.u.value
    assert u is not None
    assert u <= 1 + 1e-12


@slow
@settings(max_examples=examples(4), deadline=None)
@given(labs(), st.data())
def test_one_more_device_or_a_faster_link_never_makes_it_worse(
    lab: Lab, data: st.DataObject
) -> None:
    before_s = step_s(lab)
    if before_s is None:
        return
    number = data.draw(st.integers(0, len(lab.chips) - 1))
    more = [
        replace(chips, num_devices=chips.num_devices + (index == number))
        for index, chips in enumerate(lab.chips)
    ]
    after_s = step_s(replace(lab, chips=more))
    assert after_s is not None
    assert after_s <= before_s * (1 + 1e-3)
    faster = tuple(replace(link, bytes_per_s=3 * link.bytes_per_s) for link in lab.links)
    quicker_s = step_s(replace(lab, links=faster))
    assert quicker_s is not None
    assert quicker_s <= before_s * (1 + 1e-3)


@slow
def test_order_of_the_inventory_changes_nothing_and_same_input_gives_same_bytes() -> None:
    facts = LAB.facts
    assert len(facts.hosts) == 2

    def written(found: Facts) -> str:
        return json.dumps(asdict(plan(found, LAB.profile, LAB.recipe, targets={})), default=str)

    first = written(facts)
    assert first == written(replace(facts, hosts=facts.hosts[::-1])) == written(facts)


@slow
def test_hundreds_of_devices_train_deepseek_and_every_stage_fits() -> None:
    lab = Lab(
        chips=[
            Chips(vendor="a", num_devices=192, gflops=4e5, memory=80 * GIB, per_host=8),
            Chips(vendor="b", num_devices=256, gflops=2.5e5, memory=64 * GIB, per_host=8),
        ],
        model=DEEPSEEK,
        batch=512,
        rows=(1,),
        seq_len=4096,
        dtype=Dtype.BF16,
        limits=PlanLimits(tp=(4, 8), recompute=True),
    )
    result = lab.plan()
    check_split(result.split, lab.facts, lab.profile, lab.recipe)
    assert result.split.cost.step_s >= result.bound_s
    first = result.split.replicas[0].stages[0]
    assert first.first_layer == 0
    assert all(
        stage.memory_limit_bytes is not None and stage.memory_bytes <= stage.memory_limit_bytes
        for replica in result.split.replicas
        for stage in replica.stages
    )
