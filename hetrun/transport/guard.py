"""Talks to the controller from a host: takes files and orders on stdin, starts the job, streams what it writes.

Ends the job when stdin closes or nothing came for the lease. Holding the job's processes together is left to
`guard_init.py`. Needs Python 3.10 and the standard library; sent as source and run by `BOOT` of `jobs.py`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hetrun.transport.guard_frames import FrameReader, Meta, pack
from hetrun.transport.guard_host import (
    HostFaultError,
    boot_and_net,
    bundle_path,
    data_address,
    find_torch,
    free_port,
    has_bundle,
    keep_bundle,
    new_job_folder,
    open_base,
)
from hetrun.transport.guard_init import SUBREAPER, Agent, Job, adopt_orphans, modes
from hetrun.transport.guard_logs import Cap
from hetrun.transport.guard_proc import descendants
from hetrun.transport.guard_progress import Progress
from hetrun.transport.guard_sweep import note_guard, sweep

_POLL_S = 0.05
_CHUNK = 1 << 16
_OUT_HIGH = 1 << 19  # bytes waiting for the controller above which files are not read further
_LAG_MAX = 4 << 20  # a log that is read slower than it is written is skipped to its end
_KEPT_LAG = 1 << 16
_LAST_WORDS_S = 10.0  # to hand over what is left in the files
_ABANDONED_GRACE_S = 1.0  # for ranks to end by themselves when the controller is gone
JOB_FOLDER = "@JOBDIR"  # stands for the job's folder in arguments


class _GoneError(Exception):
    """The controller closed the channel, or its lease lapsed."""


class _Tail:
    """One growing file of the job. Logs may be skipped when they grow too fast, events never."""

    def __init__(self, path: Path, name: str, lossy: bool) -> None:
        self.path = path
        self.name = name
        self._lossy = lossy
        self._at = 0
        self._cap = Cap(path) if lossy else None

    def read(self) -> tuple[Meta, bytes] | None:
        """Return the next piece, None when there is none now."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return None
        if self._cap is not None:
            with contextlib.suppress(OSError):  # a disk that is full just now: next time
                self._cap.cut(size)
        dropped = 0
        if self._lossy and size - self._at > _LAG_MAX:
            dropped = size - _KEPT_LAG - self._at
            self._at += dropped
        if size <= self._at:
            return None
        with self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read(_CHUNK)
        self._at += len(data)
        return {"t": "chunk", "file": self.name, "dropped": dropped}, data


class Guard:
    """One job on one host."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._reader = FrameReader(nonce)
        self._out = bytearray()
        self._lease_s = 30.0
        self._heard_s = time.monotonic()
        self._base = Path()
        self._folder: Path | None = None
        self._sha256 = ""
        self._env: dict[str, str] = {}
        self._job: Job | None = None
        self._modes: list[str] = []
        self._agent: Agent | None = None
        self._ranks: list[int] = []
        self._tails: dict[str, _Tail] = {}
        self._progress: Progress | None = None
        self._leave = False
        self._ended = False
        self._keep = True
        self._alive_s = 0.0

    def run(self) -> None:
        """Serve until the controller says goodbye or is gone."""
        try:
            while not (self._leave and not self._out):
                self._turn()
        except _GoneError:
            self._abandon()
        finally:
            self._end_job()
            self._tidy()

    def _turn(self) -> None:
        reading = [0] if self._job is None else [0, self._job.reports]
        writing = [1] if self._out else []
        self._say_alive()
        readable, writable, _ = select.select(reading, writing, [], _POLL_S)
        if writable:
            self._flush()
        if self._job is not None and self._job.reports in readable:
            self._take_reports()
        if 0 in readable:
            self._hear()
        elif time.monotonic() - self._heard_s > self._lease_s:
            raise _GoneError
        if len(self._out) < _OUT_HIGH:
            self._pump()

    def _say_alive(self) -> None:
        """Tell the job's first process, which ends the job should this one be stopped (SIGSTOP, a debugger)."""
        if self._job is not None and time.monotonic() - self._alive_s > 1.0:
            self._alive_s = time.monotonic()
            self._job.order(t="alive", for_s=self._lease_s + _LAST_WORDS_S)

    def _hear(self) -> None:
        data = os.read(0, 1 << 20)
        if not data:
            raise _GoneError
        self._heard_s = time.monotonic()
        for meta, body in self._reader.feed(data):
            try:
                getattr(self, f"_on_{meta['t']}")(meta, body)
            except HostFaultError as fault:
                self._say(
                    {"t": "fault", "kind": fault.kind, "what": str(fault), "hint": fault.hint}
                )
            except OSError as error:
                what = f"{error.filename or 'host'}: {error.strerror or error}"
                self._say({"t": "fault", "kind": "storage", "what": what, "hint": ""})

    def _say(self, meta: Meta, data: bytes = b"") -> None:
        self._out += pack(self._nonce, meta, data)

    def _flush(self) -> None:
        try:
            sent = os.write(1, self._out[: 1 << 18])
        except BlockingIOError:
            return
        except OSError as error:
            raise _GoneError from error
        del self._out[:sent]

    # What the controller asks for, one method per frame.

    def _on_hello(self, meta: Meta, _: bytes) -> None:
        """Make the job's folder and tell what kind of place this is."""
        self._lease_s = meta["lease_s"]
        environ = {**os.environ, **meta["env"]}
        self._base = open_base(meta["work_dir"], dict(os.environ))
        self._folder, _lock = new_job_folder(self._base, meta["run_id"])
        note_guard(self._folder)
        self._sha256 = meta["sha256"]
        self._env = environ
        self._modes = modes(os.geteuid(), meta["user_namespace"])
        torch = find_torch(environ, self._folder) if meta["need_torch"] else None
        addr, nic = None, None
        if meta["data_addr"] or meta["nic"]:
            addr, nic = data_address(meta["data_addr"], meta["nic"], meta["data_name"])
        self._say(
            {
                "t": "ready",
                "folder": str(self._folder),
                "torch": torch,
                "addr": addr,
                "nic": nic,
                "boot": boot_and_net(),
                "has_bundle": has_bundle(self._base, self._sha256),
            }
        )

    def _on_sweep(self, meta: Meta, _: bytes) -> None:
        base = open_base(meta["work_dir"], dict(os.environ))
        self._say({"t": "swept", **sweep(base, meta["run_id"])})

    def _on_bundle(self, _: Meta, data: bytes) -> None:
        keep_bundle(self._base, self._sha256, data)
        self._say({"t": "stored"})

    def _on_put(self, meta: Meta, data: bytes) -> None:
        path = self._inside(meta["path"])
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(data)  # 0600 by the umask
        self._say({"t": "stored"})

    def _on_port(self, meta: Meta, _: bytes) -> None:
        self._say({"t": "port", "port": free_port(meta["addr"], meta["ports"])})

    def _on_start(self, meta: Meta, _: bytes) -> None:
        """Start this interpreter with the given arguments."""
        bundle = str(bundle_path(self._base, self._sha256))
        path = [bundle, self._env.get("PYTHONPATH", "")]
        env = {**self._env, **meta["env"], "PYTHONPATH": os.pathsep.join(filter(None, path))}
        args = [arg.replace(JOB_FOLDER, str(self._folder)) for arg in meta["args"]]
        for folder in meta["folders"]:
            self._inside(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ranks = meta["ranks"]
        self._agent = Agent([sys.executable, *args], env, str(self._folder), len(self._ranks))
        self._tails = {"agent": _Tail(self._inside("agent.log"), "agent", lossy=True)}
        for rank in self._ranks:
            name = f"events/rank-{rank:04}.jsonl"
            self._tails[name] = _Tail(self._inside(name), name, lossy=False)
        self._progress = Progress(self._inside("progress"), self._ranks)
        self._try_next_mode()

    def _on_ping(self, meta: Meta, _: bytes) -> None:
        self._say({"t": "pong", "n": meta["n"], "wall_s": time.time()})

    def _on_lease(self, meta: Meta, _: bytes) -> None:
        self._lease_s = meta["lease_s"]

    def _on_order(self, meta: Meta, _: bytes) -> None:
        if self._job is not None:
            self._job.order(**meta["order"])

    def _on_fetch(self, meta: Meta, _: bytes) -> None:
        """Send the files of one folder."""
        folder = self._inside(meta["folder"])
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                if path.is_file() and not path.is_symlink():
                    self._say({"t": "file", "name": path.name}, path.read_bytes())
        self._say({"t": "fetched"})

    def _on_bye(self, meta: Meta, _: bytes) -> None:
        self._keep = meta["keep"]
        self._end_job()
        self._tidy()
        self._say({"t": "bye"})
        self._leave = True

    def _inside(self, name: str) -> Path:
        if self._folder is None:
            raise HostFaultError("no folder yet", kind="bug")
        path = (self._folder / name).resolve()
        if self._folder.resolve() not in path.parents:
            raise HostFaultError(f"{name} lies outside the job's folder", kind="bug")
        return path

    # The job.

    def _try_next_mode(self) -> None:
        if self._agent is None or not self._modes:
            raise HostFaultError("no way to start a job here", "look at the host's process limits")
        self._job = Job(self._modes.pop(0), self._agent)

    def _take_reports(self) -> None:
        job = self._job
        reports = job.read() if job else None
        if job is None or reports is None:
            self._init_died()
            return
        for report in reports:
            if report["t"] == "refused":
                job.close(5.0)
                os.close(job.reports)
                self._say({"t": "note", "what": f"no {job.mode}: {report['why']}"})
                self._try_next_mode()
                return
            if report["t"] in ("rank", "agent"):
                self._pump_all()  # its last words go first
            if report["t"] == "rank":
                report["rank"] = self._ranks[int(str(report["local_rank"]))]
            if report["t"] == "empty":
                self._ended = True
            self._say(report)

    def _init_died(self) -> None:
        """The job's first process is gone without a word: nothing it held may stay."""
        job, self._job = self._job, None
        if job is None:
            return
        job.close(1.0)
        os.close(job.reports)
        if self._ended:
            return
        self._ended = True
        left = _kill_below(os.getpid(), 5.0)
        self._pump_all()
        self._say({"t": "lost", "wall_s": time.time()})
        self._say({"t": "empty", "left": left})

    def _end_job(self) -> None:
        if self._job is None:
            return
        self._job.order(t="stop", grace_s=_ABANDONED_GRACE_S)
        self._job.close(_ABANDONED_GRACE_S + 6.0)
        if self._job.mode == SUBREAPER:
            _kill_below(os.getpid(), 5.0)
        self._job = None

    def _abandon(self) -> None:
        """Keep the reason on the host, and tell the controller in case it only slept."""
        why = f"heard nothing from the controller for {time.monotonic() - self._heard_s:.1f} s"
        self._say({"t": "note", "what": why})
        with contextlib.suppress(_GoneError):
            self._flush()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / "why").write_text(why + "\n")

    def _tidy(self) -> None:
        """Remove what may hold secrets, and all of it if the controller has everything."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._folder if not self._keep else self._folder / "env")

    # What the job writes.

    def _pump(self) -> int:
        """Queue one piece of each file; return how many had one."""
        self._find_logs()
        moved = self._progress.news(time.monotonic()) if self._progress else []
        if moved:
            self._say({"t": "progress", "ranks": moved})
        pieces = [piece for tail in self._tails.values() if (piece := tail.read())]
        for meta, data in pieces:
            self._say(meta, data)
        return len(pieces)

    def _pump_all(self) -> None:
        """Queue all that is there now, at the pace of the controller, within a deadline."""
        deadline_s = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline_s:
            if len(self._out) < _OUT_HIGH:
                if not self._pump():
                    return
            else:
                select.select([], [1], [], _POLL_S)
                self._flush()

    def _find_logs(self) -> None:
        """Torchrun names its folders itself: logs/<run id>_<random>/attempt_0/<local rank>/std*.log."""
        if self._folder is None or len(self._tails) >= 1 + 3 * len(self._ranks):
            return
        for path in self._folder.glob("logs/*/attempt_0/*/std*.log"):
            name = f"{path.parent.name}/{path.stem}"
            if name not in self._tails and fnmatch.fnmatch(name, "[0-9]*/std*"):
                rank = self._ranks[int(path.parent.name)]
                self._tails[name] = _Tail(path, f"logs/rank-{rank:04}.{path.stem}", lossy=True)


def _kill_below(root: int, timeout_s: float) -> list[int]:
    """Kill all descendants; return those that would not die."""
    deadline_s = time.monotonic() + timeout_s
    while left := descendants(root):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        if time.monotonic() > deadline_s:
            return left
        time.sleep(0.02)
    return []


def _end(*_: Any) -> None:
    raise _GoneError


def main(nonce: str) -> None:
    """Run as the process that `jobs.py` started; stdin, stdout and stderr are its channel."""
    os.umask(0o077)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        adopt_orphans()  # of the job's first process, should it be killed
    os.set_blocking(1, False)
    Guard(nonce).run()
