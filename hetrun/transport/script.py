"""One shell script on one host, its output kept apart. Which hosts, and how many at once, is left to `fanout.py`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hetrun.errors import HetrunError, HostError, LostContactError
from hetrun.transport import Channel, CommandResult, Transport

MAX_BYTES = 16 << 20
_SLICE_S = 0.25


def run_script(
    transport: Transport, script: str, *, timeout_s: float, max_bytes: int = MAX_BYTES
) -> CommandResult:
    """Run a script with /bin/sh on the host and return all it printed.

    The shell reads the whole script before it runs any of it, so that a command in it that reads
    its input meets the end of the input, not the rest of the script.

    Raises:
        HostError: unreachable, not finished in time, or more output than `max_bytes`.
        LostContactError: the link went down meanwhile.
    """
    host = transport.spec.name
    started_s = time.monotonic()
    channel = transport.open_shell()
    try:
        try:
            channel.write(b"{\n" + script.encode() + b"\n}\n")
            channel.close_stdin()
        except OSError as error:
            raise LostContactError(f"the shell went away: {error}", host=host) from error
        deadline_s = time.monotonic() + timeout_s
        stdout, stderr = _drain(channel, deadline_s, max_bytes, host)
        rc = channel.exit_code(max(0.1, deadline_s - time.monotonic()))
    except TimeoutError as error:
        raise HostError(
            f"script did not finish within {timeout_s:g} s",
            hint="a command on the host hangs; look at its load and at its device drivers",
            host=host,
        ) from error
    finally:
        channel.close()
    if rc is None:
        raise LostContactError("output ended but no exit code came", host=host)
    return CommandResult(rc=rc, stdout=stdout, stderr=stderr, seconds=time.monotonic() - started_s)


def _drain(channel: Channel, deadline_s: float, max_bytes: int, host: str) -> tuple[bytes, bytes]:
    """Read both streams to their ends, stderr in a thread of its own."""
    errors: list[Exception] = []
    stderr: list[bytes] = []

    def read_stderr() -> None:
        try:
            stderr.append(_read_all(channel.read_stderr, deadline_s, max_bytes, host))
        except (HetrunError, OSError) as error:  # raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=read_stderr, daemon=True, name=f"stderr of {host}")
    thread.start()
    stdout = _read_all(channel.read_stdout, deadline_s, max_bytes, host)
    thread.join(max(0.0, deadline_s - time.monotonic()) + 1.0)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise TimeoutError("stderr stays open")
    return stdout, stderr[0]


def _read_all(
    read: Callable[[float], bytes], deadline_s: float, max_bytes: int, host: str
) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("deadline passed")
        try:
            part = read(min(left_s, _SLICE_S))
        except TimeoutError:
            continue
        if not part:
            return b"".join(parts)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise HostError(
                f"sent more than {max_bytes} bytes, need at most that much",
                hint="a start file of the login shell or a vendor tool floods its output",
                host=host,
            )
        parts.append(part)
