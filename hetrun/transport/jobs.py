"""A job on a host: code and files there, one agent process under the guard, its output and end back here.

`run_module` is the simple form, for one module and its result; `launch/` drives `HostJob` itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetrun.errors import HangError, JobError, LostContactError
from hetrun.transport import Transport
from hetrun.transport.bundle import Bundle, build_bundle
from hetrun.transport.guard import JOB_FOLDER
from hetrun.transport.guard_frames import Frame, Meta
from hetrun.transport.guard_link import GuardLink

__all__ = ["JOB_FOLDER", "HostJob", "JobSetup", "Ready", "describe_exit", "run_module"]

PING_S = 2.0
LEASE_S = 15.0
_PREPARE_LEASE_S = 300.0  # nobody pings before the job starts, which may wait for slower hosts
_NUM_LAST_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetup:
    """What a guard must know before the job."""

    run_id: str
    bundle: Bundle
    lease_s: float = LEASE_S
    env: Mapping[str, str] = field(default_factory=dict)
    need_torch: bool = False
    data_addr: str | None = None  # numeric
    data_name: str | None = None  # a name that must mean data_addr there too
    nic: str | None = None
    user_namespace: bool = False  # only where the job opens no device driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What the guard answered: its folder, the host's torch, where training traffic goes."""

    folder: str
    python: str
    torch: str | None
    addr: str | None
    nic: str | None
    boot: str


class HostJob:
    """One job on one host, from its guard's start to the end of its last process."""

    def __init__(self, transport: Transport, setup: JobSetup) -> None:
        """Start the guard, check the host, ship the bundle.

        Raises:
            HostError: unreachable.
            PreflightError: interpreter, torch, address or folder do not fit.
        """
        self._link = GuardLink(transport)
        self.host = self._link.host
        try:
            self.ready = self._prepare(transport, setup)
        except BaseException:
            self.close()
            raise

    def _prepare(self, transport: Transport, setup: JobSetup) -> Ready:
        answer = self._link.ask(
            {
                "t": "hello",
                "run_id": setup.run_id,
                "sha256": setup.bundle.sha256,
                "lease_s": max(setup.lease_s, _PREPARE_LEASE_S),
                "env": dict(setup.env),
                "need_torch": setup.need_torch,
                "data_addr": setup.data_addr,
                "data_name": setup.data_name,
                "nic": setup.nic,
                "user_namespace": setup.user_namespace,
                "work_dir": transport.spec.work_dir,
            },
            answer="ready",
        )
        if setup.need_torch and not answer["torch"]:
            raise self._link.no_torch()
        if not answer["has_bundle"]:
            self._link.ask({"t": "bundle"}, setup.bundle.data, answer="stored")
        return Ready(
            python=self._link.python,
            **{key: answer[key] for key in ("folder", "torch", "addr", "nic", "boot")},
        )

    def clock(self) -> list[tuple[float, float, float]]:
        """Return three samples of (its wall clock, ours when asked, ours when answered)."""
        samples = []
        for number in range(3):
            sent_s = time.time()
            answer = self._link.ask({"t": "ping", "n": number}, answer="pong")
            samples.append((float(answer["wall_s"]), sent_s, time.time()))
        return samples

    def put(self, path: str, data: bytes) -> None:
        """Write a file below the job's folder, mode 0600."""
        self._link.ask({"t": "put", "path": path}, data, answer="stored")

    def free_port(self, addr: str, ports: Sequence[int]) -> int:
        """Return the first of these ports that is free on the host."""
        answer = self._link.ask({"t": "port", "addr": addr, "ports": list(ports)}, answer="port")
        return int(answer["port"])

    def start(
        self, args: Sequence[str], env: Mapping[str, str], *, ranks: Sequence[int] = ()
    ) -> None:
        """Run the host's interpreter with these arguments; `@JOBDIR` stands for the job's folder."""
        self._link.say(
            {
                "t": "start",
                "args": list(args),
                "env": dict(env),
                "ranks": list(ranks),
                "folders": ["events", "logs", "out"],
            }
        )

    def hear(self, timeout_s: float) -> Frame | None:
        """Return the next frame of the guard, None when none came in time."""
        return self._link.hear(timeout_s)

    def ping(self, number: int) -> None:
        """Ask for a sign of life, and give one."""
        self._link.say({"t": "ping", "n": number})

    def lease(self, lease_s: float) -> None:
        """Set how long the guard lives without a word from here."""
        self._link.say({"t": "lease", "lease_s": lease_s})

    def stop(self, grace_s: float) -> None:
        """Ask all processes of the job to end, and kill what is left after the grace."""
        self._link.say({"t": "order", "order": {"t": "stop", "grace_s": grace_s}})

    def signal_ranks(self, number: int) -> None:
        """Send a signal to all ranks that still run."""
        self._link.say({"t": "order", "order": {"t": "signal", "number": number}})

    def ask_states(self) -> None:
        """Ask for the kernel's state of each rank; it comes as a frame."""
        self._link.say({"t": "order", "order": {"t": "states"}})

    def fetch(self, folder: str) -> dict[str, bytes]:
        """Return the files of one folder of the job."""
        files: dict[str, bytes] = {}
        self._link.say({"t": "fetch", "folder": folder})
        while True:
            frame = self._link.hear(60.0)
            if frame is None:
                raise LostContactError(f"no answer to fetch of {folder}", host=self.host)
            meta, data = frame
            if meta["t"] == "fault":
                raise self._link.fault(meta)
            if meta["t"] == "file":
                files[meta["name"]] = data
            if meta["t"] == "fetched":
                return files

    def fault(self, meta: Meta) -> Exception:
        """Return the error to raise for a fault frame."""
        return self._link.fault(meta)

    def goodbye(self, *, keep: bool) -> None:
        """End the guard in order; `keep` leaves the job's folder (but its secrets) on the host."""
        self._link.ask({"t": "bye", "keep": keep}, answer="bye")

    def close(self) -> None:
        """Drop the channel; whatever still runs there ends."""
        self._link.close()


def run_module(
    transport: Transport,
    module: str,
    files: Mapping[str, bytes],
    *,
    timeout_s: float,
    need_torch: bool = False,
    bundle: Bundle | None = None,
) -> dict[str, bytes]:
    """Run `<python> -m <module> <job folder>` on the host and return the files it left in `out/`.

    Raises:
        HostError: unreachable.
        PreflightError: interpreter missing or too old, or no torch though needed.
        JobError: it failed; the message ends with its last lines.
        HangError: it did not finish in time.
    """
    setup = JobSetup(
        run_id=module.rpartition(".")[2], bundle=bundle or build_bundle(), need_torch=need_torch
    )
    job = HostJob(transport, setup)
    try:
        job.lease(setup.lease_s)
        for path, data in files.items():
            job.put(path, data)
        job.start(["-m", module, JOB_FOLDER], transport.spec.env)
        status, output = _await_end(job, timeout_s)
        if status != 0:
            raise JobError(
                f"{module} {describe_exit(status)}{_last_lines(output)}", host=transport.spec.name
            )
        found = job.fetch("out")
        job.goodbye(keep=False)
        return found
    except TimeoutError as error:
        raise HangError(
            f"{module} did not finish within {timeout_s:g} s",
            hint="look at what the host's devices do",
            host=transport.spec.name,
        ) from error
    finally:
        job.close()


def _await_end(job: HostJob, timeout_s: float) -> tuple[int | None, bytes]:
    """Ping and listen until the job's last process is gone; return its wait status and output."""
    status: int | None = None
    output = b""
    started_s = pinged_s = heard_s = time.monotonic()
    while True:
        frame = job.hear(0.5)
        now_s = time.monotonic()
        if now_s - started_s > timeout_s:
            raise TimeoutError
        if now_s - pinged_s > PING_S:
            job.ping(0)
            pinged_s = now_s
        if frame is None:
            if now_s - heard_s > 2 * LEASE_S:
                raise LostContactError(f"silent for {now_s - heard_s:.0f} s", host=job.host)
            continue
        heard_s = now_s
        meta, data = frame
        if meta["t"] == "fault":
            raise job.fault(meta)
        if meta["t"] == "chunk":
            output = (output + data)[-(1 << 16) :]
        if meta["t"] == "agent":
            status = meta["status"]
        if meta["t"] == "empty":
            return status, output


def describe_exit(status: int | None) -> str:
    """Say in words how a process ended, from its wait status."""
    if status is None:
        return "ended without a trace"
    if status & 0x7F:
        return f"was killed by signal {status & 0x7F}"
    return f"ended with exit code {status >> 8}"


def _last_lines(output: bytes) -> str:
    lines = output.decode(errors="replace").rstrip().splitlines()[-_NUM_LAST_LINES:]
    return ":\n  " + "\n  ".join(lines) if lines else ""
