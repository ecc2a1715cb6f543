"""A paced clock makes real time follow modelled time; both are played by a clock that only sleeping and working move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrun.errors import ConfigError
from hetrun.model import LaunchSpec, Pacing, Plan
from hetrun.report.build import _pacing
from hetrun.report.gather import StepSums
from hetrun.report.words import paced
from hetrun.runtime.emulate import PacedClock, VirtualClock, WallClock, make_clock
from tests.dist.plans import Pipeline, make_plan


class Wall:
    """Real time that nobody else moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    def work(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def clock(wall: Wall) -> PacedClock:
    made = PacedClock(2.0, wall=lambda: wall.now_s, sleep=wall.sleep)
    made.start_step()
    return made


def test_sleeps_what_the_arithmetic_leaves_of_the_chips_time(clock: PacedClock, wall: Wall) -> None:
    wall.work(0.5)
    clock.spend(1.0)
    assert wall.slept == [pytest.approx(1.5)]
    clock.wait_until(3.0)
    assert clock.real_s() == pytest.approx(6.0)
    assert clock.now_s() == 3.0
    assert clock.late_s == pytest.approx(0.0)


def test_who_is_late_catches_up_and_says_how_late_it_was(clock: PacedClock, wall: Wall) -> None:
    wall.work(5.0)
    clock.spend(1.0)
    assert wall.slept == []
    assert clock.late_s == pytest.approx(3.0)
    clock.spend(4.0)
    assert clock.real_s() == pytest.approx(10.0)  # no trace of it
    assert clock.late_s == pytest.approx(3.0)
    clock.start_step()
    assert (clock.now_s(), clock.late_s) == (0.0, 0.0)


def test_a_sleep_that_overshoots_is_lateness_and_does_not_add_up(wall: Wall) -> None:
    clock = PacedClock(
        1.0, wall=lambda: wall.now_s, sleep=lambda seconds: wall.sleep(seconds + 0.01)
    )
    clock.start_step()
    for _ in range(50):
        clock.spend(0.1)
    assert clock.real_s() == pytest.approx(5.01)
    assert clock.late_s == pytest.approx(0.01)


def test_modelled_time_is_that_of_a_clock_without_a_pace(clock: PacedClock, wall: Wall) -> None:
    plain = VirtualClock()
    plain.start_step()
    for kind, seconds in (
        ("work", 0.7),
        ("spend", 0.1),
        ("wait", 0.05),
        ("spend", 0.3),
        ("wait", 2.0),
    ):
        if kind == "work":
            wall.work(seconds)
            continue
        for one in (clock, plain):
            (one.spend if kind == "spend" else one.wait_until)(seconds)
    assert clock.now_s() == plain.now_s() == 2.0


def _with_pace(plan: Plan, pace: float | None) -> Plan:
    return replace(plan, recipe=replace(plan.recipe, launch=LaunchSpec(pace=pace)))


def test_the_clock_is_chosen_by_plan_and_pace() -> None:
    plan = make_plan((Pipeline((8,), 1, 1),))
    real = make_plan((Pipeline((8,), 1, 1),), emulated=False)
    assert type(make_clock(plan, lambda: None)) is VirtualClock
    assert type(make_clock(_with_pace(plan, 2.0), lambda: None)) is PacedClock
    assert type(make_clock(real, lambda: None)) is WallClock
    with pytest.raises(ConfigError, match="pace 2, but no device of this plan is emulated"):
        make_clock(_with_pace(real, 2.0), lambda: None)
    with pytest.raises(ValueError, match=r"pace 0\.0, need more than 0"):
        LaunchSpec(pace=0.0)


def _step(step: int, real_s: float | None, late_s: float | None) -> StepSums:
    return StepSums(
        step=step, step_s=1.0, loss=1.0, lowest_loss=1.0, highest_loss=1.0, num_tokens=1,
        real_s=real_s, late_s=late_s,
    )  # fmt: skip


def test_the_report_says_how_well_real_time_followed() -> None:
    plan = _with_pace(make_plan((Pipeline((8,), 1, 1),)), 2.0)
    steps = [_step(0, 9.0, 7.0), _step(1, 2.02, 0.004), _step(2, 2.0, 0.001), _step(3, 2.01, 0.03)]
    found = _pacing(plan, steps)
    assert found is not None
    assert replace(found, error=0.0) == Pacing(pace=2.0, error=0.0, late_s=0.03)
    assert found.error == pytest.approx(0.005)
    assert paced(found) == (
        "Paced at 2 real seconds per modelled one: steps were off by +0.5 %, a rank was 30.0 ms late at most"
    )
    assert _pacing(plan, [_step(0, None, None)]) is None
    assert _pacing(_with_pace(plan, None), steps) is None
