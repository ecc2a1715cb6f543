"""Modelled time knows nothing of the host; real time nothing of the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrun.model import RankPlan, StagePlan
from hetrun.runtime.emulate import OutOfMemoryError, VirtualClock, WallClock, check_memory
from tests.dist.plans import Pipeline, make_plan

PLAN = make_plan((Pipeline((8,), 1, 1),))


def _stage_and_rank() -> tuple[StagePlan, RankPlan]:
    return PLAN.split.replicas[0].stages[0], PLAN.split.ranks[0]


def test_virtual_action_starts_at_the_later_of_clock_and_input() -> None:
    clock = VirtualClock()
    clock.start_step()
    clock.spend(2.0)
    clock.wait_until(1.0)  # there already
    assert clock.now_s() == 2.0
    clock.wait_until(5.0)
    clock.spend(0.5)
    assert clock.now_s() == 5.5
    clock.start_step()
    assert clock.now_s() == 0.0


def test_wall_clock_waits_for_the_device_and_ignores_the_plan() -> None:
    waits: list[int] = []
    clock = WallClock(lambda: waits.append(1))
    clock.start_step()
    clock.wait_until(1000.0)
    clock.spend(1000.0)
    assert 0 <= clock.now_s() < 10
    assert len(waits) == 2  # at the start, and after the work


def test_stage_that_fits_exactly_is_accepted() -> None:
    stage, rank = _stage_and_rank()
    check_memory(replace(stage, memory_bytes=2000), replace(rank, memory_bytes=2000))


def test_stage_over_the_chips_memory_is_refused() -> None:
    stage, rank = _stage_and_rank()
    with pytest.raises(OutOfMemoryError, match=r"rank 0: stage 0\+8 layers needs 2\.00 GiB"):
        check_memory(replace(stage, memory_bytes=2 << 30), replace(rank, memory_bytes=1 << 30))


def test_real_device_speaks_for_itself() -> None:
    stage, rank = _stage_and_rank()
    real = replace(rank, emulated=False, memory_bytes=1)
    check_memory(stage, real)
