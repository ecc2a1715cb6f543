"""Runs below a folder: which go on, how far they are, how to stop one, what a dead controller left on hosts.

A controller is known by pid, start time and boot, so that no other process is ever taken for it. Showing is left to
the command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hetrun.errors import ConfigError, ExitCode, HetrunError, JobError
from hetrun.launch.move import moved
from hetrun.launch.rundir import RunDir
from hetrun.model import Controller, HostSpec, LeftOver, Plan, RunOutcome, RunState
from hetrun.store import load
from hetrun.transport.connect import open_transport
from hetrun.transport.guard_link import GuardLink
from hetrun.transport.guard_sweep import identity
from hetrun.transport.threads import call_all

RECORD = "controller.json"
RUNNING, GONE = "running", "controller gone"
_AT_ONCE = 32
_TAIL = 1 << 16
_POLL_S = 0.1
_AGAIN_S = 0.3  # two signals that come together are one
_SWEEP_S = 60.0


def note_controller(run_dir: RunDir) -> None:
    """Leave in a run's folder who controls it."""
    found = identity(os.getpid())
    if found is None:
        raise ValueError("this process is not in /proc")
    run_dir.save(Controller(host=socket.gethostname(), **found), RECORD)  # type: ignore[arg-type]


def find_run(root: Path, name: str | None) -> Path:
    """Return the folder of a run: by its path, its id, or the newest one.

    Raises:
        ConfigError: there is none.
    """
    if name is not None:
        for path in (root / name, Path(name)):
            if (path / "plan.json").is_file():
                return path
        raise ConfigError(f"{name}: no run of that name in {root}", hint="hetrun ps lists them")
    runs = sorted(root.glob("*/plan.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise ConfigError(
            f"{root}: no run there", hint="hetrun launch plan.json, or name a run directory"
        )
    return runs[-1].parent


def controller(run_dir: Path) -> Controller | None:
    """Return the process that controls a run, None when it has ended or is on another machine."""
    if not (run_dir / RECORD).is_file():
        return None
    found = load(Controller, run_dir / RECORD)
    mine = identity(found.pid)
    wanted = {"pid": found.pid, "start_ticks": found.start_ticks, "boot_id": found.boot_id}
    return found if mine == wanted else None


def state(run_dir: Path) -> RunState:
    """Say how a run stands.

    Raises:
        ConfigError: its files are damaged.
    """
    plan = load(Plan, run_dir / "plan.json")
    alive = controller(run_dir)
    outcome = run_dir / "launch.json"
    where = moved(run_dir)
    if where is not None:
        status = f"on {where.host}"
    elif alive is not None:
        status = RUNNING
    else:
        status = load(RunOutcome, outcome).status if outcome.is_file() else GONE
    return RunState(
        run_id=run_dir.name,
        status=status,
        pid=alive.pid if alive else None,
        step=_last_step(run_dir / "events/rank-0000.jsonl"),
        num_steps=plan.recipe.train.steps,
        hosts=tuple(spec.name for spec in plan.hosts),
    )


def states(root: Path) -> tuple[RunState, ...]:
    """Return how all runs below a folder stand, oldest first; folders that cannot be read are left out."""
    found = []
    for path in sorted(root.glob("*/plan.json")):
        with contextlib.suppress(ConfigError):  # of another version of hetrun
            found.append(state(path.parent))
    return tuple(found)


def _last_step(path: Path) -> int | None:
    """Number of the last step that this rank ended."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            event = json.loads(line)
            if event["event"] == "step":
                return int(event["step"])
    return None


def lines(run_dir: Path, rank: int | None, *, follow: bool) -> Iterator[str]:
    """Give the lines of a run's log, host and rank in front, or those of one rank; `follow` goes on until the run ends.

    Raises:
        ConfigError: the plan has no such rank.
    """
    num_ranks = len(load(Plan, run_dir / "plan.json").split.ranks)
    if rank is not None and not 0 <= rank < num_ranks:
        raise ConfigError(f"--rank {rank}: this run has ranks 0 to {num_ranks - 1}")
    path = run_dir / ("all.log" if rank is None else f"logs/rank-{rank:04}.log")
    at, rest = 0, b""
    while True:
        ended = controller(run_dir) is None  # before reading: what came until then is read
        data = b""
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(at)
            data = file.read(1 << 20)
        at += len(data)
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
        if not data and (ended or not follow):
            if rest:
                yield rest.decode(errors="replace")
            return
        if not data:
            time.sleep(_POLL_S)


def stop(run_dir: Path, *, force: bool) -> RunState:
    """Ask a run's controller to stop it, in order with a checkpoint or at once, and wait until it has.

    Raises:
        ConfigError: the run has ended already, or its controller is not on this machine.
        JobError: the controller does not end in time.
    """
    found = controller(run_dir)
    if found is None:
        raise _no_controller(run_dir)
    limits = load(Plan, run_dir / "plan.json").recipe.launch
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(found.pid)
        try:
            if controller(run_dir) == found:  # it is still the one that the descriptor is of
                signal.pidfd_send_signal(fd, signal.SIGTERM)
                if force:
                    time.sleep(_AGAIN_S)
                    signal.pidfd_send_signal(fd, signal.SIGTERM)
        finally:
            os.close(fd)
    deadline_s = time.monotonic() + limits.save_grace_s + limits.stop_grace_s + 60.0
    while controller(run_dir) is not None:
        if time.monotonic() > deadline_s:
            raise JobError(
                f"{run_dir.name}: its controller, process {found.pid}, does not end",
                hint=f"hetrun stop {run_dir.name} --force",
            )
        time.sleep(_POLL_S)
    return state(run_dir)


def _no_controller(run_dir: Path) -> ConfigError:
    now = state(run_dir)
    if now.status != GONE:
        return ConfigError(f"{run_dir.name} has ended: {now.status}")
    where = ""
    if (run_dir / RECORD).is_file():
        where = f" (it ran on {load(Controller, run_dir / RECORD).host})"
    return ConfigError(
        f"{run_dir.name}: no controller of it runs on this machine{where}",
        hint=f"if it is dead: hetrun clean {run_dir.name}",
    )


def hosts(run_dir: Path) -> tuple[HostSpec, ...]:
    """Return all hosts that a run had in any of its attempts: those that were left out later may hold something, too."""
    paths = [run_dir / "plan.json", *sorted(run_dir.glob("attempts/*/plan.json"))]
    specs = {spec.name: spec for path in paths for spec in load(Plan, path).hosts}
    return tuple(specs.values())


def clean(run_dir: Path, *, done: Callable[[str, str], None]) -> tuple[LeftOver, ...]:
    """End on all hosts what a dead controller left of a run; `done` hears of each host.

    Raises:
        ConfigError: its controller is alive.
    """
    if controller(run_dir) is not None:
        raise ConfigError(
            f"{run_dir.name} goes on", hint=f"hetrun stop {run_dir.name} ends it in order"
        )
    calls = {spec.name: partial(_sweep, spec, run_dir.name) for spec in hosts(run_dir)}
    futures = call_all(calls, at_once=_AT_ONCE)
    found = []
    for host, future in futures.items():
        try:
            found.append(future.result(timeout=_SWEEP_S))
        except HetrunError as error:
            found.append(LeftOver(host=host, error=error.message))
        except TimeoutError:
            found.append(LeftOver(host=host, error=f"no answer in {_SWEEP_S:g} s"))
        done(host, _words(found[-1]))
    return tuple(found)


def clean_code(found: tuple[LeftOver, ...]) -> ExitCode:
    """Return the exit code of a cleaning."""
    if any(host.left for host in found):
        return ExitCode.NOT_CLEAN
    return ExitCode.UNREACHABLE if any(host.error for host in found) else ExitCode.DONE


def _words(found: LeftOver) -> str:
    if found.error:
        return f"failed: {found.error}"
    if found.left:
        return f"failed: still runs there: {', '.join(found.left)}"
    return f"ended {', '.join(found.ended)}" if found.ended else "nothing was left"


def _sweep(spec: HostSpec, run_id: str) -> LeftOver:
    transport = open_transport(spec)
    try:
        link = GuardLink(transport)
        try:
            answer = link.ask(
                {"t": "sweep", "run_id": run_id, "work_dir": spec.work_dir}, answer="swept"
            )
            return LeftOver(
                host=spec.name, ended=tuple(answer["ended"]), left=tuple(answer["left"])
            )
        finally:
            link.close()
    finally:
        transport.close()
