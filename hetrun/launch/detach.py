"""Starts a controller that outlives this command: in a session of its own, on this machine.

What follows it afterwards is left to `runs.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hetrun.errors import HangError, StorageError
from hetrun.launch.runs import RECORD
from hetrun.model import Controller
from hetrun.store import load

_START_S = 60.0
_POLL_S = 0.05


def detach(args: Sequence[str], run_root: Path) -> Path | tuple[str, int]:
    """Run `hetrun` with these arguments on its own; return the run's folder, or its words and exit code if none came to be.

    What it writes to stdout and stderr goes to `controller.log` in the run's folder.

    Raises:
        HangError: neither within a minute.
        StorageError: the run root cannot be written.
    """
    try:
        run_root.mkdir(parents=True, exist_ok=True)
        before = set(run_root.glob(f"*/{RECORD}"))
        fd, name = tempfile.mkstemp(prefix=".controller-", suffix=".log", dir=run_root)
    except OSError as error:
        raise StorageError(f"cannot write to {run_root}: {error.strerror}") from error
    said = Path(name)
    with os.fdopen(fd, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "hetrun", *args],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        code = process.poll()
        for path in set(run_root.glob(f"*/{RECORD}")) - before:
            if load(Controller, path).pid == process.pid:
                said.rename(path.with_name("controller.log"))
                return path.parent
        if code is not None:
            words = said.read_text(errors="replace").strip()
            said.unlink()
            return words, code
        time.sleep(_POLL_S)
    process.terminate()
    raise HangError(f"the controller did not begin within {_START_S:g} s", hint=f"see {said}")
