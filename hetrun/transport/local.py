"""A /bin/sh on this machine, for laptops and CI. Stopping what it started deeper down is left to `guard.py`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from hetrun.errors import HostError
from hetrun.model import HostSpec

# What an outer torchrun, if any, told this process about its own job; it must not reach ours.
_OUTER_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
_GRACE_S = 8.0  # for a guard, to end its job
_OUTER_JOB_PREFIXES = ("MASTER_", "TORCHELASTIC_", "ROLE_", "GROUP_WORLD_")


def local_environ(environ: dict[str, str]) -> dict[str, str]:
    """Environment of a local shell: ours, with the interpreter that runs hetrun first on PATH if in a venv.

    Over SSH a bare `python3` means the host's own; here it means the one the user started hetrun with.
    """
    kept = {
        key: value
        for key, value in environ.items()
        if key not in _OUTER_JOB and not key.startswith(_OUTER_JOB_PREFIXES)
    }
    if sys.prefix != sys.base_prefix:
        path = kept.get("PATH", os.defpath)
        kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
    return kept


class LocalChannel:
    """One /bin/sh with three pipes, in its own session so that Ctrl-C does not reach it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def write(self, data: bytes) -> None:
        """Send bytes to its stdin; raises BrokenPipeError when it is gone."""
        stdin = self._pipe(self._process.stdin)
        stdin.write(data)
        stdin.flush()

    def close_stdin(self) -> None:
        """Let it see the end of its input."""
        with contextlib.suppress(OSError):
            self._pipe(self._process.stdin).close()

    def read_stdout(self, timeout_s: float) -> bytes:
        """Return the next bytes, b"" at the end; TimeoutError when none came in time."""
        return self._read(self._process.stdout, timeout_s)

    def read_stderr(self, timeout_s: float) -> bytes:
        """Return the next bytes, b"" at the end; TimeoutError when none came in time."""
        return self._read(self._process.stderr, timeout_s)

    def exit_code(self, timeout_s: float) -> int | None:
        """Return the exit code once it is known (-n: killed by signal n), None when it is not in time."""
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """End the shell and its process group: asked first, since a guard has to clean up, then killed."""
        self.close_stdin()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=_GRACE_S)
        for pipe in (self._process.stdout, self._process.stderr):
            self._pipe(pipe).close()

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise ValueError("local channel without pipes")
        return pipe

    def _read(self, pipe: IO[bytes] | None, timeout_s: float) -> bytes:
        stream = self._pipe(pipe)
        if stream.closed:
            return b""
        ready, _, _ = select.select([stream], [], [], timeout_s)
        if not ready:
            raise TimeoutError(f"no output within {timeout_s:g} s")
        return os.read(stream.fileno(), 1 << 16)


class LocalTransport:
    """This machine as a host."""

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self._channels: list[LocalChannel] = []

    def open_shell(self) -> LocalChannel:
        """Start /bin/sh."""
        started_s = time.monotonic()
        try:
            process = subprocess.Popen(
                ["/bin/sh"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=local_environ(dict(os.environ)),
                start_new_session=True,
            )
        except OSError as error:
            raise HostError(
                f"cannot start /bin/sh: {error.strerror or error}",
                hint=f"seen after {time.monotonic() - started_s:.1f} s; try: /bin/sh -c true",
                host=self.spec.name,
            ) from error
        channel = LocalChannel(process)
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        """End all channels."""
        while self._channels:
            self._channels.pop().close()
