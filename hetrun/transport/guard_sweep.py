"""Finds and ends on a host what a run left there: by its run id and the recorded identity of its guard, never by a name.

Needs the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

from hetrun.transport.guard_host import is_held
from hetrun.transport.guard_proc import stat_fields

_RECORD = "guard.json"
_END_S = 12.0  # a guard that is asked to end gives its ranks a moment, and kills what does not go
_START_TIME = 19  # in the fields of /proc/<pid>/stat from the state on: clock ticks after boot


def identity(pid: int) -> dict[str, object] | None:
    """What tells a process from all others, past and present; None when there is none."""
    fields = stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"pid": pid, "start_ticks": int(fields[_START_TIME]), "boot_id": boot_id}


def note_guard(folder: Path) -> None:
    """Leave in a job's folder who looks after it."""
    (folder / _RECORD).write_text(json.dumps(identity(os.getpid())))


def sweep(base: Path, run_id: str) -> dict[str, list[str]]:
    """End what is left of one run; return the folders where something was `ended`, and those where something is `left`."""
    ended: list[str] = []
    left: list[str] = []
    for folder in sorted((base / "jobs").glob("*")):
        if folder.name.rpartition("-")[0] != run_id or not is_held(folder):
            continue
        _end_guard(folder)
        (left if is_held(folder) else ended).append(folder.name)
    for folder in sorted((base / "jobs").glob("*")):
        if folder.name.rpartition("-")[0] == run_id and not is_held(folder):
            shutil.rmtree(folder / "env", ignore_errors=True)  # it may hold secrets
    return {"ended": ended, "left": left}


def _end_guard(folder: Path) -> None:
    """Ask the recorded guard to end, then make it; all of its job goes with it."""
    try:
        recorded = json.loads((folder / _RECORD).read_text())
        pid = int(recorded["pid"])
    except (OSError, ValueError, TypeError, KeyError):
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        if identity(pid) != recorded:
            break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)  # a stopped process does not see SIGTERM
        _wait_free(folder)
    _wait_free(folder)


def _wait_free(folder: Path) -> None:
    deadline_s = time.monotonic() + _END_S
    while is_held(folder) and time.monotonic() < deadline_s:
        time.sleep(0.05)
