"""More never hurts: one more device, a faster link. Both within what a search of few candidates can promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.planner.variety import FEW
from tests.effort import examples
from tests.unit.planner_lab import Chips, Lab
from tests.unit.test_planner_properties import labs, plan_or_none

pytestmark = pytest.mark.slow

EXACT = 1e-9
NEAR = 0.01  # with more devices only some combinations are laid out, with real cuts fewer still


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
