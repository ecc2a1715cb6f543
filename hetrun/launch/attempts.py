"""Attempts of one run, one after the other, until one ends well or another would not help (`restart.py`).

Each attempt starts its guards anew, on a fresh port and with a fresh rendezvous id; ranks go on from the newest
complete checkpoint by themselves. What an attempt left in the run's folder is moved to `attempts/<number>`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from hetrun.errors import ExitCode, HetrunError
from hetrun.launch.observer import Observer
from hetrun.launch.remaining import Remaining, Replan, away
from hetrun.launch.restart import Ending, Verdict, judge
from hetrun.launch.rundir import RunDir
from hetrun.launch.supervise import Signals
from hetrun.model import Plan, Restart, RunOutcome

log = logging.getLogger(__name__)

_TICK_S = 0.1
_TRY_AGAIN_S = 3.0
_AWAY = (ExitCode.UNREACHABLE, ExitCode.PREFLIGHT, ExitCode.LOST_CONTACT)

Start = Callable[[Plan, int], tuple[RunOutcome, Ending]]


class Attempts:
    """`start(plan, number)` makes one attempt, counted from 1, and leaves launch.json."""

    def __init__(
        self,
        plan: Plan,
        run_dir: RunDir,
        observer: Observer,
        *,
        signals: Signals,
        replan: Replan | None = None,
    ) -> None:
        self._remaining = Remaining(plan, replan)
        self._refused: set[tuple[str, ...]] = set()  # hosts that no plan does without
        self._warnings: list[str] = []
        self._has_checkpoints = plan.recipe.checkpoint is not None
        self._limits = plan.recipe.launch
        self._run_dir = run_dir
        self._observer = observer
        self._signals = signals
        self._restarts: list[Restart] = []

    def run(self, start: Start) -> RunOutcome:
        """Return how the last attempt ended, with the restarts before it; launch.json holds the same.

        Raises:
            HetrunError: the first attempt did not get to start, or the run's folder cannot be written.
        """
        outcome, ending = start(self._remaining.plan, 1)
        endings = [ending]
        while True:
            if ending.checkpoint_step is not None:
                self._remaining.saved()
            verdict = judge(endings, self._limits, has_checkpoints=self._has_checkpoints)
            if self._signals.count or not verdict.again:
                return self._end(outcome, verdict)
            self._note(outcome, endings, verdict)
            if not self._wait(verdict.wait_s):
                return self._end(outcome, verdict)
            try:
                outcome, ending = self._start_again(start, len(endings) + 1)
            except HetrunError as error:
                if error.exit_code not in _AWAY:
                    raise
                why = f"not started again within launch.host_wait_s: {error}"
                return self._end(outcome, replace(verdict, why=why))
            endings.append(ending)

    def _note(self, outcome: RunOutcome, endings: list[Ending], verdict: Verdict) -> None:
        """Keep and say what happens now."""
        written = [ending.checkpoint_step for ending in endings if ending.checkpoint_step]
        failure = outcome.failures[0] if outcome.failures else None
        restart = Restart(
            number=len(endings),
            when_s=time.time(),
            exit_code=outcome.exit_code,
            failure=failure,
            checkpoint_step=written[-1] if written else None,
        )
        self._restarts.append(restart)
        where = failure.host if failure else self._remaining.plan.hosts[0].name
        rank = "" if failure is None or failure.rank is None else f"rank {failure.rank} "
        what = f"{rank}{failure.what}" if failure else outcome.status
        self._observer.on_status(
            where,
            f"{what}; restart {restart.number} of {self._limits.max_restarts} from {restart.origin}"
            f" in {verdict.wait_s:g} s",
        )

    def _start_again(self, start: Start, number: int) -> tuple[RunOutcome, Ending]:
        """Make an attempt; a host that is away gets its time to come back."""
        self._run_dir.begin_again(number - 1)
        deadline_s = time.monotonic() + self._limits.host_wait_s
        while True:
            try:
                return start(self._remaining.plan, number)
            except HetrunError as error:
                if error.exit_code not in _AWAY or self._signals.count:
                    raise
                if self._leave_out(away(error)):
                    self._run_dir.begin_again(None)
                    continue
                if time.monotonic() >= deadline_s:
                    raise
                self._observer.on_status(error.host or "", f"waiting for it: {error.message}")
                if not self._wait(_TRY_AGAIN_S):
                    raise
                self._run_dir.begin_again(None)

    def _leave_out(self, hosts: tuple[str, ...]) -> bool:
        """Plan again without these hosts, if that is wanted and can be; say so either way."""
        if not hosts or not self._remaining.may_shrink or hosts in self._refused:
            return False
        names = ", ".join(hosts)
        try:
            words = self._remaining.leave_out(hosts)
        except HetrunError as error:
            self._refused.add(hosts)
            self._warn(f"{names}: cannot be left out: {error}")
            return False
        left_out = (*self._restarts[-1].left_out, *hosts)
        self._restarts[-1] = replace(self._restarts[-1], left_out=left_out)
        self._observer.on_status(hosts[0], words)
        self._warn(
            f"{names}: lost, and left out; what ran there ends by itself, which nobody has seen:"
            f" hetrun clean {self._run_dir.run_id} looks once it is back",
        )
        return True

    def _warn(self, text: str) -> None:
        self._warnings.append(text)
        log.warning("%s", text)

    def _wait(self, seconds: float) -> bool:
        """Return whether the time has passed without a signal."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            if self._signals.count:
                return False
            time.sleep(_TICK_S)
        return True

    def _end(self, outcome: RunOutcome, verdict: Verdict) -> RunOutcome:
        code = verdict.exit_code
        if self._signals.count and outcome.exit_code != ExitCode.DONE:
            interrupted = self._signals.exit_code
            keeps = outcome.exit_code in (ExitCode.NOT_CLEAN, interrupted)
            code = ExitCode(outcome.exit_code) if keeps else interrupted
        status = outcome.status
        if code is ExitCode.NO_PROGRESS:
            status = "no progress"
        elif self._signals.count and code is self._signals.exit_code:
            status = "interrupted"
        whole = replace(
            outcome,
            exit_code=int(code),
            status=status,
            restarts=tuple(self._restarts),
            warnings=(*outcome.warnings, *self._warnings, *filter(None, [verdict.why])),
        )
        if whole != outcome:
            self._run_dir.finish(whole)
        return whole
