"""One shell script on one host, its output kept apart. Which hosts, and how many at once, is left to `fanout.py`.

The host itself ends a script: when the channel closes (controller killed, Ctrl-C, deadline here) and at a deadline of
its own (link cut without a word). All that the script started goes with it, also when the script ends well.
"""

from __future__ import annotations

import math
import secrets
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hetrun.errors import HetrunError, HostError, LostContactError
from hetrun.transport import Channel, CommandResult, Transport

MAX_BYTES = 16 << 20
_SLICE_S = 0.25
_LATER_S = 2  # so much after our deadline the host ends a script that we could not end

# Around each script, for any POSIX sh; needs grep, sleep and /proc. The script's processes are known by a mark in
# their environment, which follows them into other groups and sessions; this shell and its two watchers have none.
# What they cannot see: a process that cleared its environment in a session of its own; what cannot be ended: one
# that became another user's (sudo), or hangs in a driver (it is left after 50 tries).
# The script comes through a pipe, not as an argument: no process list may show it.
_WATCHDOG = r"""
exec 3<&0 4>&2 2>/dev/null
sweep() {
  try=0
  while [ $try -lt 50 ]; do
    found=$(grep -lszF "HETRUN_SCRIPT=$mark" /proc/[0-9]*/environ)
    if [ -z "$found" ]; then break; fi
    case $try in 0) how=TERM ;; [1-5]) how=0 ;; *) how=KILL ;; esac
    for file in $found; do file=${file%/environ}; kill -$how "${file##*/}"; done
    if [ $try -gt 0 ]; then sleep 0.1 || sleep 1; fi
    try=$((try + 1))
  done
  kill -KILL -$script
}
finish() {
  trap '' HUP INT TERM
  kill -STOP $watchers # they start nothing more; a child that they just made may have no mark yet
  for watcher in $watchers; do
    for file in $(grep -ls "^[0-9]* (.*) [A-Z] $watcher " /proc/[0-9]*/stat); do
      file=${file%/stat}
      kill -KILL "${file##*/}"
    done
  done
  kill -KILL $watchers
  sweep
  exit "$1"
}
own=
if setsid true; then own=setsid; fi
printf '{
%s
} </dev/null
' "$text" | HETRUN_SCRIPT=$mark $own /bin/sh 2>&4 3<&- 4>&- &
script=$!
(trap : HUP INT TERM; read -r word <&3; sweep) >/dev/null 4>&- &
watchers=$!
(trap : HUP INT TERM; HETRUN_SCRIPT=$mark /bin/sh -c "sleep $limit_s"; sweep) </dev/null >/dev/null 3<&- 4>&- &
watchers="$watchers $!"
trap 'finish 143' HUP INT TERM
wait $script
finish $?
"""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is given what a script prints, as it comes; the one of stderr from a thread of its own."""

    stdout: Callable[[bytes], None]
    stderr: Callable[[bytes], None]


def run_script(
    transport: Transport,
    script: str,
    *,
    timeout_s: float,
    max_bytes: int = MAX_BYTES,
    listeners: Listeners | None = None,
) -> CommandResult:
    """Run a script with /bin/sh on the host and return all it printed; nothing that it started outlives it.

    The shell reads the whole script before it runs any of it, and its commands meet the end of their input.
    Where there are `listeners` they get what it prints, of any size, and none of it is returned.

    Raises:
        HostError: unreachable, not finished in time, or more output than `max_bytes`.
        LostContactError: the link went down meanwhile.
    """
    host = transport.spec.name
    started_s = time.monotonic()
    channel = transport.open_shell()
    try:
        try:
            channel.write(_guarded(script, timeout_s))
        except OSError as error:
            raise LostContactError(f"the shell went away: {error}", host=host) from error
        deadline_s = time.monotonic() + timeout_s
        out, err = _Stream(host, max_bytes), _Stream(host, max_bytes)
        if listeners is not None:
            out.listener, err.listener = listeners.stdout, listeners.stderr
        _drain(channel, deadline_s, out, err)
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
    seconds = time.monotonic() - started_s
    return CommandResult(
        rc=rc,
        stdout=b"".join(out.parts),
        stderr=b"".join(err.parts),
        seconds=seconds,
        arrivals=tuple(out.arrivals),
    )


def _guarded(script: str, timeout_s: float) -> bytes:
    """Return what /bin/sh gets on stdin, which stays open: its end means that nobody listens any more."""
    values = {
        "mark": secrets.token_hex(16),
        "limit_s": str(math.ceil(timeout_s) + _LATER_S),
        "text": script,
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    return "\n".join(["{", *lines, _WATCHDOG, "}", ""]).encode()


@dataclass(slots=True)
class _Stream:
    """What came on one of the two streams: kept within bounds, or given to a listener."""

    host: str
    max_bytes: int
    listener: Callable[[bytes], None] | None = None
    parts: list[bytes] = field(default_factory=list)
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    num_bytes: int = 0

    def take(self, part: bytes) -> None:
        if self.listener is not None:
            self.listener(part)
            return
        self.num_bytes += len(part)
        if self.num_bytes > self.max_bytes:
            raise HostError(
                f"sent more than {self.max_bytes} bytes, need at most that much",
                hint="a start file of the login shell or a vendor tool floods its output",
                host=self.host,
            )
        self.parts.append(part)
        self.arrivals.append((self.num_bytes, time.time()))

    def read_all(self, read: Callable[[float], bytes], deadline_s: float) -> None:
        """Take all up to the end of the stream."""
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("deadline passed")
            try:
                part = read(min(left_s, _SLICE_S))
            except TimeoutError:
                continue
            if not part:
                return
            self.take(part)


def _drain(channel: Channel, deadline_s: float, out: _Stream, err: _Stream) -> None:
    """Read both streams to their ends, stderr in a thread of its own."""
    errors: list[Exception] = []

    def read_stderr() -> None:
        try:
            err.read_all(channel.read_stderr, deadline_s)
        except (HetrunError, OSError) as error:  # raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=read_stderr, daemon=True, name=f"stderr of {out.host}")
    thread.start()
    out.read_all(channel.read_stdout, deadline_s)
    thread.join(max(0.0, deadline_s - time.monotonic()) + 1.0)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise TimeoutError("stderr stays open")
