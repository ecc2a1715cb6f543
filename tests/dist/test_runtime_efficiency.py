"""Chips of two speeds in one pipeline, as the planner wants it: executed in real processes, it lasts as simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.chips import execute, mixed, reached, simulated
from tests.dist.training import train_reference

pytestmark = pytest.mark.dist


def test_a_planned_mix_lasts_as_simulated_and_uses_what_the_plan_says(tmp_path: Path) -> None:
    """The short sister of tests/bench/test_runtime_efficiency.py."""
    plan = mixed((2.0, 1.2), (12,), num_layers=10)
    (replica,) = plan.split.replicas
    assert (replica.way, len(replica.stages)) == ("zero bubble with real cuts", 4)
    done = execute(plan, tmp_path)
    run = simulated(plan)
    assert done.step_s == pytest.approx(run.cost.step_s, rel=1e-6)
    assert done.peaks == run.peak_activations
    assert max(done.peaks) <= len(replica.stages) + 4 < replica.num_microbatches
    reference = train_reference(plan, is_ragged=False)
    assert done.loss == pytest.approx(reference.losses[-1], rel=1e-11)
    assert done.gradient_norm == pytest.approx(reference.gradient_norms[-1], rel=1e-9)
    said, found = plan.split.efficiency, reached(plan, done)
    assert found.e1.value == pytest.approx(said.e1.value, rel=1e-6)
    assert found.u.value == pytest.approx(said.u.value, rel=1e-6)
    even = plan.even_split
    assert even is not None
    assert even.efficiency.u.value is not None
    assert found.u.value is not None
    assert found.u.value > even.efficiency.u.value + 0.1
