"""Whose time it is: real seconds, or the modelled seconds of emulated chips, behind one interface.

Modelled figures come from the plan; passing the time from rank to rank is left to `boundary.py` and `sync.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from hetrun.errors import ConfigError, JobError
from hetrun.model import GIB, Plan, RankPlan, StagePlan
from hetrun.runtime.process import sleep_tightly


class OutOfMemoryError(JobError):
    """A stage needs more memory than its chip has."""


class Clock(Protocol):
    """Seconds since the step began, on one rank."""

    modelled: bool

    def start_step(self) -> None:
        """Set the clock to 0."""
        ...

    def now_s(self) -> float:
        """Seconds since the step began."""
        ...

    def wait_until(self, when_s: float) -> None:
        """An input is there that was ready at `when_s`."""
        ...

    def spend(self, planned_s: float) -> None:
        """Work that the plan takes to last `planned_s` has been asked of the device."""
        ...


class VirtualClock:
    """Modelled time: an action starts at max(own clock, timestamps of its inputs) and lasts what the plan says.

    The real arithmetic runs as fast or slow as the host likes; no reading depends on it.
    """

    modelled = True

    def __init__(self) -> None:
        self._now_s = 0.0

    def start_step(self) -> None:
        """All ranks start a step together, at 0."""
        self._now_s = 0.0

    def now_s(self) -> float:
        """Modelled seconds since the step began."""
        return self._now_s

    def wait_until(self, when_s: float) -> None:
        """Sleep without sleeping."""
        self._now_s = max(self._now_s, when_s)

    def spend(self, planned_s: float) -> None:
        """Move on by the plan's figure."""
        self._now_s += planned_s


class PacedClock(VirtualClock):
    """Modelled time that real time follows: whoever is ahead of `pace` real seconds per modelled one sleeps.

    Whoever is behind, since the arithmetic took longer than the chip would, sleeps less later: it does not add up in a step.
    """

    def __init__(
        self,
        pace: float,
        *,
        wall: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self._pace = pace
        self._wall = wall
        self._sleep = sleep
        self._start_s = wall()
        self.late_s = 0.0  # most that this step has been behind

    def start_step(self) -> None:
        """Set both clocks to 0."""
        super().start_step()
        self._start_s = self._wall()
        self.late_s = 0.0

    def wait_until(self, when_s: float) -> None:
        """Sleep until an input is there."""
        super().wait_until(when_s)
        self._follow()

    def spend(self, planned_s: float) -> None:
        """Sleep for what is left of the chip's time once the arithmetic is done."""
        super().spend(planned_s)
        self._follow()

    def real_s(self) -> float:
        """Real seconds since the step began."""
        return self._wall() - self._start_s

    def _follow(self) -> None:
        ahead_s = self._pace * self.now_s() - self.real_s()
        if ahead_s > 0:
            self._sleep(ahead_s)
        self.late_s = max(self.late_s, self.real_s() - self._pace * self.now_s())


class WallClock:
    """Real time; the device is waited for, so that a reading covers the work asked of it."""

    modelled = False

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._start_s = time.perf_counter()

    def start_step(self) -> None:
        """Take the time."""
        self._synchronize()
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        """Real seconds since the step began."""
        return time.perf_counter() - self._start_s

    def wait_until(self, when_s: float) -> None:
        """Nothing to do: the input is there, so its time has passed."""

    def spend(self, planned_s: float) -> None:
        """Wait for the device, whatever was planned."""
        self._synchronize()


def make_clock(plan: Plan, synchronize: Callable[[], None]) -> Clock:
    """The clock of a run: modelled where some chip of the plan is emulated, paced where launch wants it, else real.

    Raises:
        ConfigError: a pace for real devices, whose time nobody can change.
    """
    pace = plan.recipe.launch.pace
    if not plan.emulated:
        if pace is not None:
            raise ConfigError(
                f"launch: pace {pace:g}, but no device of this plan is emulated",
                hint="leave launch.pace out of the recipe",
            )
        return WallClock(synchronize)
    if pace is None:
        return VirtualClock()
    sleep_tightly()
    return PacedClock(pace)


def check_memory(stage: StagePlan, rank: RankPlan) -> None:
    """An emulated chip refuses what a real one could not hold.

    Raises:
        OutOfMemoryError: the stage's modelled bytes exceed the chip's memory.
    """
    if rank.emulated and rank.memory_bytes is not None and stage.memory_bytes > rank.memory_bytes:
        raise OutOfMemoryError(
            f"rank {rank.rank}: stage {stage.first_layer}+{stage.num_layers} layers needs"
            f" {stage.memory_bytes / GIB:.2f} GiB, emulated {rank.model} has {rank.memory_bytes / GIB:.2f} GiB",
            host=rank.host,
            hint="plan again, or lower microbatch_rows in the recipe",
        )
