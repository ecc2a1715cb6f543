"""How fast one TCP stream is between two hosts: `python -m hetrun.runtime.linkbench JOBDIR`, started by profile on both.

Reads JOBDIR/link.json, writes JOBDIR/out/link.json (both ends, with what they saw). The server listens on its
data address at the first free port of a random list, the client comes from its own data address. Each proves
to the other that it holds the one-time token of the request, which never travels: no stranger is measured, and
none can measure. Standard library only.

For each size n and each direction: seconds from the first byte sent until one byte has come back, less half of
the shortest round trip. A size's figure is the median of its repeats. Sizes end early where a message would take
longer than the budget.
"""

from __future__ import annotations

import json
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from hetrun.errors import ConfigError, JobError
from hetrun.greeting import receive
from hetrun.runtime.handshake import Appointment, await_client, find_server
from hetrun.runtime.job import decode, read_json
from hetrun.runtime.process import measuring

_HEADER = struct.Struct("!BQ")  # what to do, how many bytes
_CHUNK_BYTES = 1 << 20
_LONGEST_MESSAGE_S = 1.5
_MIN_SIZES = 5
_WARM_UP_S = 0.05
_MAX_BYTES = 1 << 30


class Role(str, Enum):
    """Which end this process is; a host that talks to itself is both."""

    SERVER = "server"
    CLIENT = "client"
    BOTH = "both"


class Do(int, Enum):
    """What the server is asked."""

    TAKE = 0  # so many bytes, then answer one
    GIVE = 1  # so many bytes
    END = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRequest(Appointment):
    """link.json: which end, where, and how much."""

    role: Role
    sizes: tuple[int, ...]  # bytes, ascending
    min_repeats: int
    max_repeats: int
    budget_s: float  # of repeats for one size and direction, once there are min_repeats
    deadline_s: float  # of all

    def __post_init__(self) -> None:
        if not self.sizes or not all(1 <= size <= _MAX_BYTES for size in self.sizes):
            raise ValueError(f"sizes {list(self.sizes)[:5]}, need 1 to {_MAX_BYTES}")
        Appointment.__post_init__(self)  # super() finds no class with slots


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTiming:
    """Median seconds, one way, of messages of one size: to the server, and from it."""

    num_bytes: int
    to_s: float
    from_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkResult:
    """out/link.json of the client."""

    round_trip_s: float  # of one byte, or of the smallest size if that was quicker
    timings: tuple[SizeTiming, ...]


def main() -> int:
    """Play one end, or both; return the exit code."""
    return measuring(_main)


def _main(arguments: Sequence[str]) -> None:
    match arguments:
        case [folder]:
            _run(Path(folder))
        case [folder, "server"]:
            serve(_request(Path(folder)))
        case _:
            raise ConfigError(f"got arguments {list(arguments)}, need the job directory")


def _request(folder: Path) -> LinkRequest:
    path = folder / "link.json"
    return decode(LinkRequest, read_json(path), where=str(path))


def _run(folder: Path) -> None:
    request = _request(folder)
    out = folder / "out"
    out.mkdir(exist_ok=True)
    if request.role is Role.SERVER:
        serve(request)
        return
    server = None
    if request.role is Role.BOTH:
        command = [sys.executable, "-m", "hetrun.runtime.linkbench", str(folder), "server"]
        server = subprocess.Popen(command)
    try:
        result = measure(request)
    finally:
        if server is not None:
            with suppress(subprocess.TimeoutExpired):
                server.wait(timeout=2.0)
            server.kill()
            server.wait()
    (out / "link.json").write_text(json.dumps(asdict(result), allow_nan=False))


# --- the server -------------------------------------------------------------------------------------------


def serve(request: LinkRequest) -> None:
    """Answer one client that holds the token, until it says so or the time is up.

    Raises:
        PreflightError: the address is not one of this host, or all ports are taken.
        JobError: no client in time, or it broke off.
    """
    with await_client(request) as stream:
        _answer(stream, request)


def _answer(stream: socket.socket, request: LinkRequest) -> None:
    _tune(stream)
    stream.settimeout(request.deadline_s)
    buffer = bytearray(_CHUNK_BYTES)
    chunk = memoryview(bytes(_CHUNK_BYTES))
    try:
        while True:
            what, size = _HEADER.unpack(receive(stream, _HEADER.size))
            if what == Do.END:
                return
            if size > _MAX_BYTES:
                raise JobError(f"asked for {size} bytes, {_MAX_BYTES} at most")
            if what == Do.TAKE:
                _drain(stream, size, buffer)
                stream.sendall(b"\1")
            else:
                _send(stream, size, chunk)
    except OSError as error:
        raise JobError(f"the client broke off: {error}") from error


# --- the client -------------------------------------------------------------------------------------------


def measure(request: LinkRequest) -> LinkResult:
    """Find the server, then time all sizes both ways.

    Raises:
        JobError: no server that holds the token in time, or it broke off.
    """
    started_s = time.monotonic()
    stream = find_server(request)
    try:
        with stream:
            _tune(stream)
            stream.settimeout(request.deadline_s)
            result = _time_all(stream, request, started_s)
            stream.sendall(_HEADER.pack(Do.END, 0))
    except OSError as error:
        raise JobError(f"the server at {request.server_addr} broke off: {error}") from error
    return result


def _time_all(stream: socket.socket, request: LinkRequest, started_s: float) -> LinkResult:
    buffer, chunk = bytearray(_CHUNK_BYTES), memoryview(bytes(_CHUNK_BYTES))

    def give(size: int) -> None:
        stream.sendall(_HEADER.pack(Do.TAKE, size))
        _send(stream, size, chunk)
        receive(stream, 1)

    def take(size: int) -> None:
        stream.sendall(_HEADER.pack(Do.GIVE, size))
        _drain(stream, size, buffer)

    def median_s(action: Callable[[int], None], size: int) -> float:
        return _median_s(lambda: action(size), request)

    _warm_up(give, take)
    round_trips_s = [median_s(give, 1)]
    seen: list[tuple[int, float, float]] = []
    for size in request.sizes:
        seen.append((size, median_s(give, size), median_s(take, size)))
        next_s = 4 * max(seen[-1][1:])
        spent_s = time.monotonic() - started_s
        turns_s = 2 * (1 + request.min_repeats) * next_s
        if len(seen) >= _MIN_SIZES and (
            next_s > _LONGEST_MESSAGE_S or spent_s + turns_s > request.deadline_s / 2
        ):
            break
    round_trips_s.append(median_s(give, 1))
    round_trip_s = min(*round_trips_s, *(min(times) for _, *times in seen))
    return LinkResult(
        round_trip_s=round_trip_s,
        timings=tuple(
            SizeTiming(
                num_bytes=size, to_s=to_s - round_trip_s / 2, from_s=from_s - round_trip_s / 2
            )
            for size, to_s, from_s in seen
        ),
    )


def _warm_up(give: Callable[[int], None], take: Callable[[int], None]) -> None:
    """Let processor clocks rise and both ends get into their loops."""
    until_s = time.monotonic() + _WARM_UP_S
    while time.monotonic() < until_s:
        give(1)
        take(1)


def _median_s(action: Callable[[], None], request: LinkRequest) -> float:
    """Run once unmeasured, so that the stream's window has opened, then until the budget is spent."""
    action()
    repeats: list[float] = []
    while len(repeats) < request.min_repeats or (
        len(repeats) < request.max_repeats and sum(repeats) < request.budget_s
    ):
        start_s = time.perf_counter()
        action()
        repeats.append(time.perf_counter() - start_s)
    return statistics.median(repeats)


# --- both -------------------------------------------------------------------------------------------------


def _tune(stream: socket.socket) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(stream: socket.socket, size: int, chunk: memoryview) -> None:
    left = size
    while left:
        part = min(left, len(chunk))
        stream.sendall(chunk[:part])
        left -= part


def _drain(stream: socket.socket, size: int, buffer: bytearray) -> None:
    view = memoryview(buffer)
    left = size
    while left:
        got = stream.recv_into(view[: min(left, len(view))])
        if not got:
            raise ConnectionResetError("closed in the middle of a message")
        left -= got


if __name__ == "__main__":
    sys.exit(main())
