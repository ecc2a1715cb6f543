"""Follows a started run to its end: stops everything at the first failure, on silence, or on a signal.

What counts as failure is said by `monitor.py`, which came first by `diagnose.py`.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from hetrun.errors import ExitCode, StorageError
from hetrun.launch.diagnose import Kind, root_first
from hetrun.launch.hosts import Heard, Hosts
from hetrun.launch.monitor import Monitor
from hetrun.launch.observer import Observer
from hetrun.launch.patience import hang_limit_s
from hetrun.model import LaunchSpec
from hetrun.transport.jobs import PING_S

log = logging.getLogger(__name__)

_TICK_S = 0.1
_SETTLE_S = 1.0  # for the cause to be seen when all that is known is a lost connection
_DUMP_S = 1.5  # for tracebacks of a hang to arrive
_CONFIRM_S = 12.0  # after the grace, for hosts to say that nothing is left
_MAX_AT_A_TIME = 500
_COUNT_EVERY_S = 5.0


class Interrupted(Exception):  # noqa: N818  a way to leave, not an error
    """A signal came before the run had started."""


class Signals:
    """Counts SIGINT, SIGTERM and SIGHUP while it is open; the first asks for order, the second for speed."""

    def __init__(self) -> None:
        self.count = 0
        self.first = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: FrameType | None) -> None:
        self.first = self.first or number
        self.count += 1

    def raise_if_any(self) -> None:
        """Leave by an exception."""
        if self.count:
            raise Interrupted

    @property
    def exit_code(self) -> ExitCode:
        """What the shell shall see."""
        return ExitCode.INTERRUPTED if self.first == signal.SIGINT else ExitCode.TERMINATED


class Supervisor:
    """One run from its start to the last process on the last host."""

    def __init__(
        self,
        hosts: Hosts,
        monitor: Monitor,
        *,
        limits: LaunchSpec,
        signals: Signals,
        observer: Observer,
        saves: bool = False,
    ) -> None:
        """`saves` says that ranks which are asked to end save a checkpoint first."""
        self.storage_error: StorageError | None = None
        self._hosts = hosts
        self._monitor = monitor
        self._limits = limits
        self._signals = signals
        self._observer = observer
        self._saves = saves
        self._lost: set[str] = set()
        self._sent_s: dict[int, float] = {}
        self._heard_s = {host: time.monotonic() for host in monitor.hosts}
        # Of a lease three pings may get lost: then a silent host is given up when it gives us up.
        self._ping_s = min(PING_S, limits.lease_s / 4)
        self._pinged_s = 0.0
        self._progress_s = time.monotonic()

    def follow(self) -> None:
        """Return once every host is empty, lost, or past its deadline."""
        reason = self._watch()
        if not self._monitor.all_done or reason:
            log.info("stopping: %s", reason)
            self._stop(save=reason == "signal" and self._saves)
        self._monitor.flush()

    def _watch(self) -> str:
        """Return why to stop, "" when all is done."""
        while True:
            self._turn()
            if self._signals.count:
                return "signal"
            if self.storage_error:
                return "storage"
            if self._monitor.evidence:
                self._settle()
                return "failure"
            if self._monitor.all_done:
                return ""
            silent_s = time.monotonic() - self._progress_s
            if silent_s > self._patience_s:
                self._explain_hang(silent_s)
                return "hang"

    @property
    def _patience_s(self) -> float:
        return hang_limit_s(
            self._limits,
            all_started=self._monitor.all_started,
            in_steps=self._monitor.in_steps,
            step_s=self._monitor.pace.step_s,
        )

    def _turn(self) -> None:
        """Take what came, ping, look for silent hosts."""
        self._take(_TICK_S)
        now_s = time.monotonic()
        if self._monitor.progressed:
            self._monitor.progressed = False
            self._progress_s = now_s
        if now_s - self._pinged_s >= self._ping_s:
            self._pinged_s = now_s
            number = len(self._sent_s)
            self._sent_s[number] = time.time()
            for error in self._hosts.tell(lambda job: job.ping(number), but=self._gone()):
                self._lose(error.host or "", error.message)
        for host, heard_s in self._heard_s.items():
            if now_s - heard_s > self._limits.lease_s and host not in self._gone():
                self._lose(host, f"silent for {now_s - heard_s:.0f} s")

    def _gone(self) -> frozenset[str]:
        empty = {host for host, found in self._monitor.hosts.items() if found.empty}
        return frozenset(self._lost | empty)

    def _take(self, timeout_s: float) -> None:
        for _ in range(_MAX_AT_A_TIME):
            try:
                heard = self._hosts.heard.get(timeout=timeout_s)
            except queue.Empty:
                return
            timeout_s = 0.001
            try:
                self._on_heard(heard)
            except StorageError as error:
                self.storage_error = self.storage_error or error

    def _on_heard(self, heard: Heard) -> None:
        self._heard_s[heard.host] = time.monotonic()
        if heard.frame is None:
            if heard.error is not None:
                self._lose(heard.host, heard.error.message)
            return
        meta, data = heard.frame
        if meta["t"] == "pong":
            sent_s = self._sent_s.get(int(meta["n"]))
            if sent_s is not None:
                self._monitor.on_clock(heard.host, float(meta["wall_s"]), sent_s, heard.when_s)
            return
        try:
            self._monitor.on_frame(heard.host, meta, data, heard.when_s)
        except (KeyError, ValueError, TypeError) as error:  # a host that is not ours any more
            self._lose(heard.host, f"its frame {meta['t']} makes no sense: {error}")

    def _lose(self, host: str, what: str) -> None:
        if host not in self._lost:
            self._lost.add(host)
            self._observer.on_status(host, f"lost contact: {what}")
            self._monitor.on_lost(host, f"lost contact: {what}", time.time())

    def _settle(self) -> None:
        """Where all that is known is a lost connection, give its cause a moment to be seen."""
        deadline_s = time.monotonic() + _SETTLE_S
        while root_first(self._monitor.evidence)[0].is_symptom and time.monotonic() < deadline_s:
            if self._signals.count or self.storage_error:
                return
            self._turn()

    def _explain_hang(self, silent_s: float) -> None:
        """Ask for states, make each rank show its stack, then say who hangs."""
        self._hosts.tell(lambda job: job.ask_states(), but=self._gone())
        self._wait(0.5)
        self._hosts.tell(lambda job: job.signal_ranks(signal.SIGABRT), but=self._gone())
        before = len(self._monitor.evidence)
        self._wait(_DUMP_S)
        del self._monitor.evidence[before:]  # deaths by our own signal
        self._monitor.hang(silent_s, time.time())

    def _wait(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            self._turn()

    def _save_first(self) -> None:
        """Let the ranks finish their step and save it; the countdown ends early at a second signal."""
        self._hosts.tell(lambda job: job.signal_ranks(signal.SIGTERM), but=self._gone())
        deadline_s = time.monotonic() + self._limits.save_grace_s
        said_s = float("inf")
        while (left_s := deadline_s - time.monotonic()) > 0 and self._signals.count < 2:
            if len(self._gone()) == len(self._monitor.hosts):
                return
            if said_s - left_s >= _COUNT_EVERY_S:
                said_s = left_s
                self._say_all(
                    f"saving a checkpoint, stopping in {left_s:.0f} s at the latest; again to stop at once"
                )
            self._turn()

    def _say_all(self, text: str) -> None:
        for host in self._monitor.hosts:
            if host not in self._gone():
                self._observer.on_status(host, text)

    def _stop(self, *, save: bool) -> None:
        """End everything everywhere, and listen until all hosts say that nothing is left."""
        known = len(self._monitor.evidence)
        stopped_s = time.time()
        if save:
            self._save_first()
        grace_s = 0.0 if self._signals.count > 1 else self._limits.stop_grace_s
        self._say_all("stopping")
        self._hosts.tell(lambda job: job.stop(grace_s), but=self._gone())
        deadline_s = time.monotonic() + grace_s + _CONFIRM_S
        while time.monotonic() < deadline_s and len(self._gone()) < len(self._monitor.hosts):
            if self._signals.count > 2:
                self._say_all("left alone: it stops by itself once it sees that nobody listens")
                break
            self._turn()
            if self._signals.count > 1 and grace_s:
                grace_s = 0.0
                self._hosts.tell(lambda job: job.stop(0.0), but=self._gone())
        evidence = self._monitor.evidence
        late = [
            piece
            for piece in evidence[known:]
            if piece.kind is Kind.LOST or (piece.when_s < stopped_s and not self._signals.count)
        ]
        evidence[known:] = late

    def not_clean(self) -> tuple[str, ...]:
        """Return the hosts that did not confirm that nothing is left."""
        return tuple(
            host for host, found in self._monitor.hosts.items() if not found.empty or found.left
        )
