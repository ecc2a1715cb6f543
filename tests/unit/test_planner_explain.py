"""The explanation adds up to the plan, and no number is without its source."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hetrun import store
from hetrun.model import PlanLimits, Source
from hetrun.planner.explain import Explanation, explain
from tests.unit.planner_lab import Chips, Lab, small_model

LAB = Lab(
    chips=(
        Chips(vendor="emu-a", num_devices=2, gflops=4.0),
        Chips(vendor="emu-b", num_devices=2, gflops=1.0),
    ),
    model=small_model(6),
    batch=12,
)
PLAN = LAB.plan()
FOUND = explain(PLAN, LAB.profile)


def value(what: str, of: str) -> float:
    (term,) = [term for term in FOUND.terms if (term.what, term.of) == (what, of)]
    assert term.value is not None
    return term.value


def test_parts_of_the_step_add_up() -> None:
    parts = [value(what, "step") for what in ("compute", "p2p", "bubble", "sync", "optimizer")]
    assert sum(parts) == pytest.approx(value("step", "step"))
    assert value("gap", "step") == pytest.approx(value("step", "step") / value("bound", "step") - 1)


def test_stage_is_made_of_the_timings_above_it() -> None:
    replica = PLAN.split.replicas[0]
    stage = replica.stages[0]
    rank = PLAN.split.ranks[stage.ranks[0]]
    chip = f"{rank.vendor} {rank.model}, {replica.microbatch_rows} rows"
    of = f"replica 0 stage 0 ({rank.vendor} {rank.model})"
    seconds = stage.num_layers * value("layer forward", chip)
    if stage.has_head:
        seconds += value("head forward and backward", chip) / 3
    assert value("forward", of) == pytest.approx(seconds)
    assert value("memory: all", of) == stage.memory_bytes
    assert value("memory: states", of) < value("memory: all", of) <= value("memory: limit", of)


def test_every_number_says_how_and_where_from() -> None:
    assert all(term.how for term in FOUND.terms)
    links = [term for term in FOUND.terms if term.of.startswith(("inside", "across"))]
    assert len(links) == 6
    assert {term.source for term in links} == {Source.ASSUMED}


def test_measured_timings_say_so_with_their_spread() -> None:
    devices = tuple(
        replace(
            device,
            source=Source.MEASURED,
            timings=tuple(replace(timing, spread=0.03) for timing in device.timings),
        )
        for device in LAB.profile.devices
    )
    terms = explain(PLAN, replace(LAB.profile, devices=devices)).terms
    layer = next(term for term in terms if term.what == "layer forward")
    assert layer.source is Source.MEASURED
    assert layer.how.endswith("spread 3.0%")


def test_sizes_between_and_beyond_the_measured_ones_say_so() -> None:
    def with_rows(keep: tuple[int, ...]) -> str:
        devices = tuple(
            replace(device, timings=tuple(t for t in device.timings if t.rows in keep))
            for device in LAB.profile.devices
        )
        rows = PLAN.split.replicas[0].microbatch_rows
        assert rows not in keep
        terms = explain(PLAN, replace(LAB.profile, devices=devices)).terms
        return next(term for term in terms if term.what == "layer forward").how

    rows = PLAN.split.replicas[0].microbatch_rows
    others = tuple(size for size in (1, 2, 4) if size != rows)
    expected = "extrapolated" if rows in (1, 4) else "interpolated"
    assert expected in with_rows(others)


def test_vendor_that_cannot_hold_the_model_has_no_number_and_a_reason() -> None:
    weak = replace(PLAN.baselines[0], rows_per_s=None, shape="", why="too small")
    terms = explain(replace(PLAN, baselines=(weak,)), LAB.profile).terms
    assert (terms[-1].value, terms[-1].how) == (None, "none: too small")


def test_explanation_is_data() -> None:
    assert '"what": "bound"' in store.dumps(FOUND)
    assert isinstance(FOUND, Explanation)


@pytest.mark.parametrize(
    "limits",
    [
        PlanLimits(),
        PlanLimits(tp=(2,)),
        PlanLimits(max_shapes=1, lanes=(1, 2)),
        PlanLimits(zero=(1,)),
        PlanLimits(zero=(1,), max_shapes=1),
    ],
)
def test_states_of_a_stage_are_those_of_what_it_holds_and_updates(limits: PlanLimits) -> None:
    """With shared updates the moments are of a part only, and what is in flight is as much as without."""
    lab = replace(LAB, limits=limits)
    plan = lab.plan()
    shown = [term for term in explain(plan, lab.profile).terms if term.what == "memory: states"]
    assert shown
    for term in shown:
        (whole,) = re.findall(r"^([\d,]+) parameters", term.how)
        updated = re.findall(r"of ([\d,]+) that this device updates", term.how) or [whole]
        held, own = (int(number.replace(",", "")) for number in (whole, updated[0]))
        assert term.value == held * 8 + own * 8  # fp32: weight and gradient; two moments
        assert (own < held) == (plan.split.replicas[0].zero > 0 and len(plan.split.ranks) > 1)
