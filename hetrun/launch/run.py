"""One run from plan to launch.json. Following it once it is started is left to `supervise.py`."""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from hetrun.arch import need_trainable
from hetrun.errors import ConfigError, ExitCode, HetrunError, StorageError
from hetrun.launch.attempts import Attempts
from hetrun.launch.check import check_plan
from hetrun.launch.diagnose import Evidence, Kind, root_first, to_failure
from hetrun.launch.files import WORKER, HostFiles, Meeting, host_files, read_secrets
from hetrun.launch.hosts import Hosts
from hetrun.launch.monitor import Monitor
from hetrun.launch.observer import Observer
from hetrun.launch.remaining import Replan
from hetrun.launch.restart import Ending
from hetrun.launch.rundir import RunDir
from hetrun.launch.runs import note_controller
from hetrun.launch.supervise import Interrupted, Signals, Supervisor
from hetrun.launch.wants import wants_of
from hetrun.model import LostHost, Plan, RunOutcome, Severity, plan_sha
from hetrun.preflight import check_skips, preflight, refuse
from hetrun.preflight.addresses import choose_addresses
from hetrun.transport.bundle import Bundle, build_bundle
from hetrun.transport.connect import one_connection_per_host

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCode:
    """The module that torchrun runs, and files to ship beside ours."""

    module: str = WORKER
    extra: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`skip` names checks of preflight whose errors are passed over; `replan` makes plans without lost hosts.

    The recipe's `launch.on_lost_host: replan` needs the latter.
    """

    skip: tuple[str, ...] = ()
    replan: Replan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all attempts of one launch share."""

    run_dir: RunDir
    observer: Observer
    signals: Signals
    code: WorkerCode
    hidden: Mapping[str, str]  # values of secrets by name
    skip: tuple[str, ...]  # checks of preflight


class Run:
    """State of one attempt, counted from 1."""

    def __init__(self, plan: Plan, shared: Shared, *, attempt: int) -> None:
        self._plan = plan
        self._run_dir = shared.run_dir
        self._observer = shared.observer
        self._signals = shared.signals
        self._shared = shared
        self._attempt = attempt
        self._started = datetime.now(timezone.utc)
        self._started_s = time.monotonic()
        self._monitor = Monitor(plan, shared.run_dir, shared.observer)
        self._has_outcome = False
        self.ending = Ending(exit_code=ExitCode.INTERNAL)  # until there is one

    def run(self) -> RunOutcome:
        """Do all of it; launch.json is there afterwards, whatever happened.

        Raises:
            HetrunError: the run did not get to start, or its folder cannot be written.
        """
        try:
            with one_connection_per_host():
                return self._run()
        finally:
            if not self._has_outcome:
                self._note_bug(sys.exc_info()[1])

    def _run(self) -> RunOutcome:
        hosts = Hosts(self._plan, tick=self._signals.raise_if_any)
        supervisor = None
        try:
            self._run_dir.save_plan(self._plan)
            files = self._prepare(hosts)
            supervisor = Supervisor(
                hosts,
                self._monitor,
                limits=self._plan.recipe.launch,
                signals=self._signals,
                observer=self._observer,
                saves=self._plan.recipe.checkpoint is not None,
            )
            hosts.start(files)
            supervisor.follow()
            self._say_goodbye(hosts, supervisor)
        except Interrupted:
            self.ending = Ending(exit_code=self._signals.exit_code)
            return self._finish(self._interrupted())
        except HetrunError as error:
            with suppress(StorageError):  # the error that is raised says more
                self._finish(self._did_not_start(error))
            raise
        finally:
            hosts.close()
            self._run_dir.close()
        outcome = self._outcome(supervisor)
        if supervisor.storage_error is not None:
            with suppress(StorageError):
                self._finish(outcome)
            raise supervisor.storage_error
        return self._finish(outcome)

    def _prepare(self, hosts: Hosts) -> dict[str, HostFiles]:
        """Check each host and all together, connect, and work out what each gets."""
        for spec in self._plan.hosts:
            self._observer.on_status(spec.name, "connecting")
        bundle = build_bundle(self._shared.code.extra)
        self._check(bundle)
        ready = hosts.prepare(
            self._run_dir.run_id,
            bundle=bundle,
            addresses=choose_addresses(self._plan.hosts),
            done=lambda host, answer: self._observer.on_status(
                host, f"ready: {answer.addr} on {answer.nic}"
            ),
        )
        hosts.measure_clocks(self._monitor.on_clock)
        addr = ready[self._plan.hosts[0].name].addr
        if addr is None:
            raise ValueError("host 0 has no data address")
        meeting = Meeting(
            addr=addr,
            port=hosts.free_port(addr),
            rdzv_id=secrets.token_hex(16),
            attempt=self._attempt,
        )
        return {
            spec.name: host_files(
                self._plan,
                node_rank,
                meeting=meeting,
                nic=ready[spec.name].nic,
                secrets=self._shared.hidden,
                module=self._shared.code.module,
            )
            for node_rank, spec in enumerate(self._plan.hosts)
        }

    def _check(self, bundle: Bundle) -> None:
        """Let preflight look at all hosts; what it refuses ends the launch, the rest is kept as warnings."""
        wants = wants_of(self._plan)
        if self._attempt > 1:  # what could be imported minutes ago still can
            wants = tuple(replace(item, import_torch=False) for item in wants)
        found = preflight(
            wants,
            bundle=bundle,
            skip=self._shared.skip,
            progress=lambda host, words: self._observer.on_status(host, f"preflight: {words}"),
            tick=self._signals.raise_if_any,
        )
        self._run_dir.save(found, "preflight.json")
        for finding in found.findings:
            if finding.severity in (Severity.WARNING, Severity.SKIPPED):
                passed = " (skipped)" if finding.severity is Severity.SKIPPED else ""
                self._monitor.warn(f"{finding.host}: {finding.check}{passed}: {finding.what}")
        error = refuse(found)
        if error is not None:
            raise error

    def _say_goodbye(self, hosts: Hosts, supervisor: Supervisor) -> None:
        not_clean = supervisor.not_clean()
        clean = [host for host in self._monitor.hosts if host not in not_clean]
        for host in hosts.goodbye(clean):
            self._monitor.warn(f"{host}: its guard did not say goodbye; its env files may be left")

    def _outcome(self, supervisor: Supervisor) -> RunOutcome:
        pieces = root_first(self._monitor.evidence)
        code, status = self._verdict(pieces, supervisor)
        not_clean = supervisor.not_clean()
        if not_clean and code in (ExitCode.DONE, ExitCode.INTERRUPTED, ExitCode.TERMINATED):
            code = ExitCode.NOT_CLEAN
        self.ending = self._ending(code, pieces, unsure=bool(not_clean))
        return self._blank(
            code, status, tuple(self._with_lines(piece) for piece in pieces), not_clean
        )

    def _ending(self, code: ExitCode, pieces: tuple[Evidence, ...], *, unsure: bool) -> Ending:
        root = pieces[0] if pieces else None
        rank = root.rank if root else None
        return Ending(
            exit_code=code,
            kind=root.kind if root else None,
            what=root.what if root else "",
            step=None if rank is None else self._monitor.ranks[rank].step,
            out_of_memory=any(piece.out_of_memory for piece in pieces),
            unsure=unsure,
            checkpoint_step=self._monitor.checkpoint_step,
        )

    def _verdict(
        self, pieces: tuple[Evidence, ...], supervisor: Supervisor
    ) -> tuple[ExitCode, str]:
        if supervisor.storage_error is not None:
            return supervisor.storage_error.exit_code, "failed"
        if self._signals.count and not pieces and not self._monitor.all_ended:
            return self._signals.exit_code, "interrupted"
        if not pieces:
            return ExitCode.DONE, "done"
        if pieces[0].kind is Kind.LOST:
            return ExitCode.LOST_CONTACT, "lost contact"
        if pieces[0].kind is Kind.HANG:
            return ExitCode.HANG, "hang"
        return ExitCode.JOB_FAILED, "failed"

    def _with_lines(self, piece: Evidence) -> Evidence:
        return replace(piece, last_lines=self._monitor.last_lines(piece))

    def _interrupted(self) -> RunOutcome:
        return self._blank(self._signals.exit_code, "interrupted", (), ())

    def _did_not_start(self, error: HetrunError) -> RunOutcome:
        pieces: tuple[Evidence, ...] = ()
        if error.host is not None:
            pieces = (
                Evidence(
                    kind=Kind.AGENT,
                    host=error.host,
                    rank=None,
                    when_s=time.time(),
                    what=error.message,
                ),
            )
        return self._blank(error.exit_code, "failed", pieces, ())

    def _blank(
        self,
        code: ExitCode,
        status: str,
        pieces: tuple[Evidence, ...],
        not_clean: tuple[str, ...],
    ) -> RunOutcome:
        return RunOutcome(
            run_id=self._run_dir.run_id,
            plan_sha=plan_sha(self._plan),
            started=self._started.isoformat(timespec="seconds"),
            wall_s=round(time.monotonic() - self._started_s, 3),
            exit_code=int(code),
            status=status,
            failures=tuple(to_failure(piece) for piece in pieces),
            warnings=tuple(self._monitor.warnings),
            skipped=self._shared.skip,
            not_clean=not_clean,
        )

    def _note_bug(self, error: BaseException | None) -> None:
        """Leave an outcome though hetrun itself failed; the error goes on to the caller."""
        if isinstance(error, HetrunError):  # the folder cannot be written, which was tried
            return
        self._monitor.warn(f"a bug in hetrun ended this run: {type(error).__name__}: {error}")
        with suppress(StorageError):
            self._finish(self._blank(ExitCode.INTERNAL, "failed", (), ()))

    def _finish(self, outcome: RunOutcome) -> RunOutcome:
        self._run_dir.finish(outcome)
        self._has_outcome = True
        return outcome


def launch(
    plan: Plan,
    *,
    run_root: Path,
    observer: Observer,
    environ: Mapping[str, str],
    code: WorkerCode | None = None,
    options: Options | None = None,
) -> RunOutcome:
    """Start torchrun on every host of the plan and follow the run to its end.

    A run that started returns its outcome, failed or not; nothing of it is left running on hosts that answer.
    `code` replaces the worker, for tests.

    Raises:
        ConfigError: the plan contradicts itself, or a secret is not set.
        HostError: a host cannot be reached.
        PreflightError: a host cannot run its part.
        StorageError: the run's folder cannot be written; everything is stopped then.
    """
    need_trainable(plan)
    check_plan(plan)
    options = options or Options()
    skip = check_skips(options.skip)
    if plan.recipe.launch.on_lost_host is LostHost.REPLAN and options.replan is None:
        raise ConfigError("launch.on_lost_host: replan needs facts and a profile to plan from")
    hidden = read_secrets(plan, environ)
    with Signals() as signals:
        now = datetime.now()  # noqa: DTZ005  the folder's name is for people, in their own time
        run_dir = RunDir(run_root, plan.recipe.name, now, hidden.values())
        note_controller(run_dir)

        shared = Shared(
            run_dir=run_dir,
            observer=observer,
            signals=signals,
            code=code or WorkerCode(),
            hidden=hidden,
            skip=skip,
        )

        def attempt(plan: Plan, number: int) -> tuple[RunOutcome, Ending]:
            run = Run(plan, shared, attempt=number)
            return run.run(), run.ending

        attempts = Attempts(plan, run_dir, observer, signals=signals, replan=options.replan)
        return attempts.run(attempt)
