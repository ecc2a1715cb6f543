"""How much of the summed compute real processes with real gradients use, in modelled time. Prints a table for docs/benchmarks.md.

What is charged stands in tests/dist/chips.py.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetrun.model import Plan, PlanLimits
from tests.dist.chips import Executed, execute, mixed, reached, simulated, with_split
from tests.dist.training import train_reference

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

DATA_PARALLEL = PlanLimits(max_stages=1)
_MOST_ROWS_OF_EVEN = 128  # of cases whose even split is run too
TWO, THREE = (2.0, 1.2), (2.0, 1.2, 0.8)


@dataclass(frozen=True)
class Case:
    """Chips, rows of each replica, and the least E1."""

    speeds: tuple[float, ...]
    rows: tuple[int, ...]
    least: float
    limits: PlanLimits | None = None


CASES = {
    "two speeds, one pipeline, m = 512": Case(TWO, (512,), 0.9977),
    "three speeds, one pipeline, m = 288": Case(THREE, (288,), 0.9903),
    "two speeds, one pipeline, m = 64": Case(TWO, (64,), 0.985),
    "three speeds, one pipeline, m = 64": Case(THREE, (64,), 0.965),
    "two speeds, 128 rows data-parallel": Case(TWO, (40, 40, 24, 24), 0.98, DATA_PARALLEL),
    "three speeds, 128 rows data-parallel": Case(
        THREE, (32, 32, 19, 19, 13, 13), 0.955, DATA_PARALLEL
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_chips_of_several_speeds_reach_nearly_what_each_reaches_alone(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    plan = mixed(case.speeds, case.rows, limits=case.limits)
    done = _run(name, plan, tmp_path)
    reference = train_reference(plan, is_ragged=False)
    assert done.loss == pytest.approx(reference.losses[0], rel=1e-11)
    assert done.gradient_norm == pytest.approx(reference.gradient_norms[0], rel=1e-9)
    e1 = reached(plan, done).e1.value
    assert e1 is not None
    assert e1 >= case.least
    if plan.even_split is None:
        sys.stdout.write(f"\n  even split: none, {plan.even_split_why}")
    elif sum(case.rows) <= _MOST_ROWS_OF_EVEN:
        _run("  even split", with_split(plan, plan.even_split), tmp_path)


def _run(name: str, plan: Plan, folder: Path) -> Executed:
    """Execute a plan, compare its clock with the simulator's and print a line."""
    start_s = time.perf_counter()
    done = execute(plan, folder, timeout_s=600.0)
    wall_s = time.perf_counter() - start_s
    expected = simulated(plan)
    assert done.step_s == pytest.approx(expected.cost.step_s, rel=1e-6)
    assert done.peaks == expected.peak_activations
    e = reached(plan, done)
    replica = plan.split.replicas[0]
    shape = f"{len(plan.split.replicas)} x {len(replica.stages)} {replica.way}"
    cost = plan.split.cost
    shares = ", ".join(f"{share.value:.2%}" for share in (e.e1, e.e2, e.u) if share.value)
    sys.stdout.write(
        f"\n{name}: {shape}; E1, E2, U = {shares}; step {done.step_s:.4f} s modelled (simulator"
        f" {expected.cost.step_s:.4f}), send {replica.stages[0].send_s * 1e3:.2f} ms, sync {cost.sync_s * 1e3:.1f} ms,"
        f" optimizer {cost.optimizer_s * 1e3:.1f} ms, activations held {list(done.peaks)}; {wall_s:.0f} s wall"
    )
    return done
