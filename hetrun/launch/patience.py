"""How long nothing may move before it counts as a hang. What moved is told by `monitor.py`."""

from __future__ import annotations

from collections import deque
from statistics import median

from hetrun.model import UNHURRIED_S, LaunchSpec

LEAST_S = 60.0
STEPS = 5
_KEPT = 32  # steps


class Pace:
    """Real seconds of the latest steps of each rank, from one step's end to the next."""

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def step_ended(self, rank: int, wall_s: float) -> None:
        """Take the time of a step's end, on the clock of that rank's host."""
        before = self._ends.get(rank)
        self._ends[rank] = wall_s
        if before is not None and wall_s > before:
            self._seconds.append(wall_s - before)

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step; None before two have ended."""
        return median(self._seconds) if self._seconds else None


def hang_limit_s(
    limits: LaunchSpec, *, all_started: bool, in_steps: bool, step_s: float | None
) -> float:
    """Return the seconds without any movement that count as a hang.

    `in_steps` says that every rank is inside a step and says so; what happens outside (loading, saving, evaluating)
    shows no movement of its own and gets more time.
    """
    if not all_started:
        return limits.start_timeout_s
    if limits.step_timeout_s is not None:
        return limits.step_timeout_s
    least_s = LEAST_S if in_steps and step_s is not None else UNHURRIED_S
    return max(least_s, STEPS * (step_s or 0.0))
