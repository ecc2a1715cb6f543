"""How bytes reach a host: a plain /bin/sh on the other side, with stdin, stdout and stderr apart.

What is said over it is left to `probe.py` and `jobs.py`. The command that opens a channel is one
constant for all hosts, so that no login shell can read meaning into our data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hetrun.model import HostSpec

# The one command that every login shell gets (sh, bash, zsh, fish, tcsh read it alike). All data
# follows on stdin, but only after the marker came back: start files may read stdin or print.
OPEN_SHELL = "echo hetrun-ready; exec /bin/sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What one script left behind."""

    rc: int
    stdout: bytes
    stderr: bytes
    seconds: float
    arrivals: tuple[tuple[int, float], ...] = ()  # bytes of stdout that were here by a time of ours


class Channel(Protocol):
    """A running /bin/sh on a host. Every wait has a deadline; a lost link raises LostContactError."""

    def write(self, data: bytes) -> None:
        """Send bytes to its stdin."""
        ...

    def close_stdin(self) -> None:
        """Let it see the end of its input."""
        ...

    def read_stdout(self, timeout_s: float) -> bytes:
        """Return the next bytes, b"" at the end; TimeoutError when none came in time."""
        ...

    def read_stderr(self, timeout_s: float) -> bytes:
        """Return the next bytes, b"" at the end; TimeoutError when none came in time."""
        ...

    def exit_code(self, timeout_s: float) -> int | None:
        """Return the exit code once it is known, None when it is not in time."""
        ...

    def close(self) -> None:
        """Drop the channel; a local process is killed with its children."""
        ...


class Transport(Protocol):
    """One host. Opening it twice is one connection with two channels."""

    spec: HostSpec

    def open_shell(self) -> Channel:
        """Start /bin/sh and return once it answers (shell start-up noise is swallowed).

        Raises:
            HostError: unreachable, unknown or changed host key, refused key.
        """
        ...

    def close(self) -> None:
        """End all channels and the connection."""
        ...
