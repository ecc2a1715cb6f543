"""All hosts of one run at once: connect, check, fill, start, stop. What their frames mean is left to `monitor.py`."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from hetrun.errors import HetrunError, LostContactError
from hetrun.launch.files import HostFiles
from hetrun.model import HostSpec, Plan
from hetrun.preflight.addresses import DataAddress
from hetrun.transport import Transport
from hetrun.transport.bundle import Bundle
from hetrun.transport.connect import open_transport
from hetrun.transport.guard_frames import Frame
from hetrun.transport.jobs import HostJob, JobSetup, Ready
from hetrun.transport.threads import call_all

log = logging.getLogger(__name__)
T = TypeVar("T")

_AT_ONCE = 32
_TICK_S = 0.1
_GOODBYE_S = 15.0
_PORTS = range(20000, 32768)  # below the range that the kernel gives to outgoing connections
_PORT_TRIES = 5


@dataclass(frozen=True, slots=True)
class Heard:
    """One frame of a host, or the error that ended its stream, with the time it came."""

    host: str
    frame: Frame | None
    error: HetrunError | None
    when_s: float  # wall clock


class Hosts:
    """The hosts of one run; `tick` is called while waiting and may raise to leave."""

    def __init__(self, plan: Plan, *, tick: Callable[[], None]) -> None:
        self.heard: queue.Queue[Heard] = queue.Queue(maxsize=4096)
        self._plan = plan
        self._tick = tick
        self._transports: dict[str, Transport] = {
            spec.name: open_transport(spec) for spec in plan.hosts
        }
        self._jobs: dict[str, HostJob] = {}
        self._closed = threading.Event()
        self._readers: list[threading.Thread] = []

    def prepare(
        self,
        run_id: str,
        *,
        bundle: Bundle,
        addresses: Mapping[str, DataAddress],
        done: Callable[[str, Ready], None],
    ) -> dict[str, Ready]:
        """Start a guard on every host and check it; `done` is told as each is ready.

        Raises:
            HetrunError: the first host in order that cannot run its part; the others are listed in it.
        """
        calls = {}
        for spec in self._plan.hosts:
            setup = self._setup(spec, run_id, bundle, addresses[spec.name])
            calls[spec.name] = partial(self._open, spec.name, setup)
        jobs = self._each(calls, lambda host, job: done(host, job.ready))
        return {host: job.ready for host, job in jobs.items()}

    def _setup(self, spec: HostSpec, run_id: str, bundle: Bundle, address: DataAddress) -> JobSetup:
        ranks = [rank for rank in self._plan.split.ranks if rank.host == spec.name]
        return JobSetup(
            run_id=run_id,
            bundle=bundle,
            lease_s=self._plan.recipe.launch.lease_s,
            env=spec.env,
            data_addr=address.addr,
            data_name=address.name,
            nic=address.nic,
            user_namespace=all(rank.torch_device == "cpu" for rank in ranks),
        )

    def _open(self, host: str, setup: JobSetup) -> HostJob:
        job = HostJob(self._transports[host], setup)
        self._jobs[host] = job
        if self._closed.is_set():  # nobody waits for us any more
            self._transports[host].close()
        return job

    def measure_clocks(self, take: Callable[[str, float, float, float], None]) -> None:
        """Ask each host three times for its clock; `take(host, its time, sent, received)`."""
        calls = {host: job.clock for host, job in self._jobs.items()}
        for host, samples in self._each(calls).items():
            for wall_s, sent_s, received_s in samples:
                take(host, wall_s, sent_s, received_s)

    def free_port(self, addr: str) -> int:
        """Find a port on host 0 that nobody listens on."""
        ports = [secrets.choice(_PORTS) for _ in range(_PORT_TRIES)]
        return self._jobs[self._plan.hosts[0].name].free_port(addr, ports)

    def start(self, files: Mapping[str, HostFiles]) -> None:
        """Put each host's files there, then start all; their frames come out of `heard`."""
        self._each({host: partial(self._fill, host, wanted) for host, wanted in files.items()})
        for host, wanted in files.items():
            job = self._jobs[host]
            job.lease(self._plan.recipe.launch.lease_s)
            job.start(wanted.args, wanted.env, ranks=wanted.ranks)
            reader = threading.Thread(
                target=self._read, args=(job,), daemon=True, name=f"frames of {host}"
            )
            reader.start()
            self._readers.append(reader)

    def _fill(self, host: str, wanted: HostFiles) -> None:
        for path, data in wanted.files.items():
            self._jobs[host].put(path, data)

    def _read(self, job: HostJob) -> None:
        """Hand on frames until the host is empty or lost; a full queue slows the host's guard down."""
        while not self._closed.is_set():
            try:
                frame = job.hear(_TICK_S * 5)
            except HetrunError as error:
                self._hand_on(Heard(job.host, None, error, time.time()))
                return
            if frame is not None:
                self._hand_on(Heard(job.host, frame, None, time.time()))
                if frame[0]["t"] == "empty":
                    return

    def _hand_on(self, heard: Heard) -> None:
        while not self._closed.is_set():
            try:
                self.heard.put(heard, timeout=_TICK_S)
            except queue.Full:
                continue
            return

    def tell(self, what: Callable[[HostJob], None], *, but: frozenset[str]) -> list[HetrunError]:
        """Say something to all hosts except those that are lost; return who turned out to be."""
        errors: list[HetrunError] = []
        for host, job in self._jobs.items():
            if host not in but:
                try:
                    what(job)
                except LostContactError as error:
                    errors.append(error)
        return errors

    def goodbye(self, hosts: list[str]) -> list[str]:
        """Let the guards of empty hosts go, secrets removed; return those that did not answer."""
        calls = {host: partial(self._jobs[host].goodbye, keep=True) for host in hosts}
        futures = call_all(calls, at_once=_AT_ONCE)
        wait(futures.values(), timeout=_GOODBYE_S)
        return [host for host, future in futures.items() if not future.done() or future.exception()]

    def close(self) -> None:
        """Drop all connections; what still runs on a host then ends by its guard."""
        self._closed.set()
        calls = {host: transport.close for host, transport in self._transports.items()}
        wait(call_all(calls, at_once=_AT_ONCE).values(), timeout=_GOODBYE_S)

    def _each(
        self,
        calls: Mapping[str, Callable[[], T]],
        done: Callable[[str, T], None] | None = None,
    ) -> dict[str, T]:
        """Call on all hosts, wait for all, then raise the first error with the rest in its message."""
        futures = call_all(calls, at_once=_AT_ONCE)
        names = {future: host for host, future in futures.items()}
        waiting: set[Future[T]] = set(names)
        errors: dict[str, HetrunError] = {}
        while waiting:
            ready, waiting = wait(waiting, timeout=_TICK_S, return_when="FIRST_COMPLETED")
            for future in ready:
                error = future.exception()
                if isinstance(error, HetrunError):
                    errors[names[future]] = error
                elif error is not None:
                    raise error
                elif done:
                    done(names[future], future.result())
            self._tick()
        if errors:
            raise _together([errors[host] for host in calls if host in errors])
        return {host: future.result() for host, future in futures.items()}


def _together(errors: list[HetrunError]) -> HetrunError:
    first, *others = errors
    if others:
        first.message += "".join(f"\nalso {other}" for other in others)
    return first
