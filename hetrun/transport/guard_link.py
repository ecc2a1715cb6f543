"""The controller's end of a guard: starts its interpreter over a shell, then speaks frames. What is said: `jobs.py`."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import threading
import time

from hetrun.errors import HetrunError, LostContactError, PreflightError, StorageError
from hetrun.model import Connection, HostSpec
from hetrun.transport import Channel, Transport
from hetrun.transport.bundle import guard_sources
from hetrun.transport.guard_frames import Frame, FrameReader, Meta, pack

MIN_PYTHON = (3, 10)
BOOT_S = 30.0  # a cold interpreter on a network file system is slow
_ASK_S = 60.0
_STDERR_KEPT = 4096

# Runs under any Python, so that one which is too old can still say so. Reads no byte too many.
_BOOT = """
import os, sys
os.write(1, ("hetrun-python %d.%d.%d %s\\n" % (sys.version_info[:3] + (sys.executable,))).encode())
def take(count):
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            sys.exit(0)
        data += part
    return data
size, nonce = take(32).split()
import json
for name, text in json.loads(take(int(size)).decode()):
    module = sys.modules[name] = type(sys)(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules["hetrun.transport.guard"].main(nonce.decode())
"""

# $1 activation script or "", $2 interpreter, $3 _BOOT. The script's output must not look like ours.
_SHELL = """
if [ -n "$1" ]; then
  [ -r "$1" ] || { echo "hetrun-no activate"; exit 0; }
  . "$1" </dev/null >&2
fi
command -v "$2" >/dev/null 2>&1 || { echo "hetrun-no python"; exit 0; }
exec "$2" -I -c "$3"
"""
HELLO = re.compile(rb"hetrun-(?:python (\d+)\.(\d+)\.(\d+) (.*)|no (\w+))\n")


def shell_text(python: str, activate: str | None, *, boot: str = _BOOT) -> str:
    """Return what /bin/sh gets on stdin to become the guard; vendors' activation scripts expect bash."""
    words = shlex.join(["-c", _SHELL, "hetrun", activate or "", python, boot])
    return f'exec "$({"command -v bash || " if activate else ""}echo /bin/sh)" {words}\n'


def missing(spec: HostSpec, what: str) -> PreflightError:
    """Return the error of a host whose interpreter or activation script is not there."""
    if what == "python":
        return PreflightError(
            f"no interpreter {spec.python!r} there",
            hint="set `python` of the host to an absolute path",
            host=spec.name,
        )
    return PreflightError(
        f"no readable file {spec.activate!r} there",
        hint="correct `activate` of the host",
        host=spec.name,
    )


def too_old(spec: HostSpec, path: str, version: tuple[int, ...]) -> PreflightError:
    """Return the error of an interpreter that cannot run our code."""
    return PreflightError(
        f"python at {path} is {'.'.join(map(str, version))}, need 3.10 or newer",
        hint="set `python` of the host to the interpreter with the vendor's torch",
        host=spec.name,
    )


class GuardLink:
    """One guard. Frames may be read in one thread while another writes."""

    def __init__(self, transport: Transport) -> None:
        """Start it.

        Raises:
            HostError: the host cannot be reached.
            PreflightError: its interpreter is missing, too old or broken.
        """
        self.host = transport.spec.name
        self._spec = transport.spec
        self._nonce = secrets.token_hex(8)
        self._reader = FrameReader(self._nonce)
        self._frames: list[Frame] = []
        self._stderr = b""
        self._write_lock = threading.Lock()
        self._channel: Channel = transport.open_shell()
        self._stderr_thread = threading.Thread(
            target=self._collect_stderr, daemon=True, name=f"stderr of {self.host}"
        )
        self._stderr_thread.start()
        try:
            self.python = self._boot()
        except BaseException:
            self.close()
            raise

    def _boot(self) -> str:
        self._write(shell_text(self._spec.python, self._spec.activate).encode())
        said = b""
        deadline_s = time.monotonic() + BOOT_S
        while not (hello := HELLO.search(said)):
            try:
                part = self._channel.read_stdout(max(0.0, deadline_s - time.monotonic()))
            except TimeoutError as error:
                raise self._unusable(f"did not answer within {BOOT_S:g} s") from error
            if not part:
                raise self._unusable("does not run")
            said += part
        if hello[5]:
            raise missing(self._spec, hello[5].decode())
        version = tuple(int(part) for part in hello.groups()[:3])
        path = hello[4].decode(errors="replace")
        if version < MIN_PYTHON:
            raise too_old(self._spec, path, version)
        sources = json.dumps(guard_sources()).encode()
        header = f"{len(sources)} {self._nonce}".ljust(31) + "\n"
        self._write(header.encode() + sources)
        return path

    def _unusable(self, what: str) -> PreflightError:
        said = self.last_stderr()
        return PreflightError(
            f"interpreter {self._spec.python!r} {what}{': ' + said if said else ''}",
            hint="set `python` of the host to a Python 3.10 or newer, and check `activate`",
            host=self.host,
        )

    def last_stderr(self) -> str:
        """Return the last line that the guard or its shell wrote to stderr."""
        self._stderr_thread.join(0.2)
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    @property
    def noise(self) -> bytes:
        """Bytes on the channel that are not the guard's."""
        return self._reader.noise

    def say(self, meta: Meta, data: bytes = b"") -> None:
        """Send one frame."""
        self._write(pack(self._nonce, meta, data))

    def hear(self, timeout_s: float) -> Frame | None:
        """Return the next frame, None when none came in time.

        Raises:
            LostContactError: the guard or the connection is gone.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._frames:
            try:
                data = self._channel.read_stdout(max(0.0, deadline_s - time.monotonic()))
            except TimeoutError:
                return None
            if not data:
                said = self.last_stderr()
                raise LostContactError(
                    f"the guard ended{': ' + said if said else ''}", host=self.host
                )
            try:
                self._frames += self._reader.feed(data)
            except ValueError as error:
                raise LostContactError(
                    f"the guard's words make no sense: {error}", host=self.host
                ) from error
        return self._frames.pop(0)

    def ask(self, meta: Meta, data: bytes = b"", *, answer: str) -> Meta:
        """Send a frame and wait for the one of that kind; a fault that comes instead is raised."""
        self.say(meta, data)
        deadline_s = time.monotonic() + _ASK_S
        while True:
            frame = self.hear(max(0.0, deadline_s - time.monotonic()))
            if frame is None:
                raise LostContactError(f"no answer to {meta['t']} in {_ASK_S:g} s", host=self.host)
            if frame[0]["t"] == "fault":
                raise self.fault(frame[0])
            if frame[0]["t"] == answer:
                return frame[0]

    def fault(self, meta: Meta) -> HetrunError:
        """Turn a fault that the guard reports into the error to raise."""
        kind = StorageError if meta["kind"] == "storage" else PreflightError
        hint = meta["hint"] or (
            "is the disk full, or the folder read-only?" if kind is StorageError else None
        )
        return kind(str(meta["what"]), hint=hint, host=self.host)

    def no_torch(self) -> PreflightError:
        """Return the error of an interpreter without torch."""
        local = self._spec.connection is Connection.LOCAL
        return PreflightError(
            f"no torch under {self.python}",
            hint="pip install 'hetrun[local]'"
            if local
            else "set `python` of the host to the interpreter with the vendor's torch",
            host=self.host,
        )

    def close(self) -> None:
        """Drop the channel; the guard sees the end of its input and ends everything on its host."""
        self._channel.close()

    def _write(self, data: bytes) -> None:
        try:
            with self._write_lock:
                self._channel.write(data)
        except OSError as error:
            raise LostContactError(f"the guard is gone: {error}", host=self.host) from error

    def _collect_stderr(self) -> None:
        while True:
            try:
                data = self._channel.read_stderr(1.0)
            except TimeoutError:
                continue
            except (HetrunError, OSError, ValueError):
                return
            if not data:
                return
            self._stderr = (self._stderr + data)[-_STDERR_KEPT:]
