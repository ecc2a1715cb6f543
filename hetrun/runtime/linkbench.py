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

import hashlib
import hmac
import json
import logging
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from hetrun.errors import ConfigError, HetrunError, JobError, PreflightError
from hetrun.runtime.job import decode, read_json
from hetrun.runtime.process import die_with_parent

log = logging.getLogger(__name__)

_HEADER = struct.Struct("!BQ")  # what to do, how many bytes
_NONCE_BYTES = 32
_HANDSHAKE_S = 3.0  # a stranger may hold the server up for so long
_RETRY_S = 0.1
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
class LinkRequest:
    """link.json: which end, where, and how much."""

    role: Role
    server_addr: str  # numeric
    client_addr: str  # numeric
    ports: tuple[int, ...]
    token: str  # hex
    sizes: tuple[int, ...]  # bytes, ascending
    min_repeats: int
    max_repeats: int
    budget_s: float  # of repeats for one size and direction, once there are min_repeats
    connect_s: float  # how long the ends wait for each other
    deadline_s: float  # of all

    def __post_init__(self) -> None:
        if not self.sizes or not all(1 <= size <= _MAX_BYTES for size in self.sizes):
            raise ValueError(f"sizes {list(self.sizes)[:5]}, need 1 to {_MAX_BYTES}")
        if not all(1024 <= port < 65536 for port in self.ports):
            raise ValueError(f"ports {list(self.ports)[:5]}, need 1024 to 65535")
        if len(bytes.fromhex(self.token)) < _NONCE_BYTES:
            raise ValueError(f"token is too short, need {_NONCE_BYTES} bytes")


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
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    die_with_parent()
    try:
        match sys.argv[1:]:
            case [folder]:
                _run(Path(folder))
            case [folder, "server"]:
                serve(_request(Path(folder)))
            case arguments:
                raise ConfigError(f"got arguments {arguments}, need the job directory")
    except HetrunError as error:
        log.error("error: %s", error)  # noqa: TRY400 - the message says all
        return 1
    return 0


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
    deadline_s = time.monotonic() + request.connect_s
    with _listen(request) as listener:
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise JobError(
                    f"no client came to {request.server_addr} within {request.connect_s:g} s"
                )
            listener.settimeout(left_s)
            try:
                stream, _ = listener.accept()
            except TimeoutError:
                continue
            with stream:
                if _greet(stream, request.token, mine=b"server", theirs=b"client"):
                    _answer(stream, request)
                    return
                log.warning("a stranger called; not measured")


def _listen(request: LinkRequest) -> socket.socket:
    for port in request.ports:
        listener = socket.socket(_family(request.server_addr), socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((request.server_addr, port))
            listener.listen(4)
        except OSError as error:
            listener.close()
            if isinstance(error, PermissionError) or "in use" not in str(error):
                raise PreflightError(
                    f"cannot listen on {request.server_addr}: {error.strerror}"
                ) from error
            continue
        return listener
    raise PreflightError(f"ports {list(request.ports)} of {request.server_addr} are all taken")


def _answer(stream: socket.socket, request: LinkRequest) -> None:
    _tune(stream)
    stream.settimeout(request.deadline_s)
    buffer = bytearray(_CHUNK_BYTES)
    chunk = memoryview(bytes(_CHUNK_BYTES))
    try:
        while True:
            what, size = _HEADER.unpack(_receive(stream, _HEADER.size))
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
    stream = _find_server(request)
    try:
        with stream:
            _tune(stream)
            stream.settimeout(request.deadline_s)
            result = _time_all(stream, request, started_s)
            stream.sendall(_HEADER.pack(Do.END, 0))
    except OSError as error:
        raise JobError(f"the server at {request.server_addr} broke off: {error}") from error
    return result


def _find_server(request: LinkRequest) -> socket.socket:
    """Try the ports in turn until the one behind it proves that it holds the token."""
    deadline_s = time.monotonic() + request.connect_s
    last = "nobody answered"
    while time.monotonic() < deadline_s:
        for port in request.ports:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            stream = socket.socket(_family(request.server_addr), socket.SOCK_STREAM)
            try:
                stream.settimeout(min(left_s, _HANDSHAKE_S))
                stream.bind((request.client_addr, 0))
                stream.connect((request.server_addr, port))
                if _greet(stream, request.token, mine=b"client", theirs=b"server"):
                    return stream
                last = f"port {port} belongs to somebody else"
            except OSError as error:
                last = error.strerror or str(error)
            stream.close()
        time.sleep(_RETRY_S)
    raise JobError(
        f"from {request.client_addr}, no way to {request.server_addr} within"
        f" {request.connect_s:g} s: {last}"
    )


def _time_all(stream: socket.socket, request: LinkRequest, started_s: float) -> LinkResult:
    buffer, chunk = bytearray(_CHUNK_BYTES), memoryview(bytes(_CHUNK_BYTES))

    def give(size: int) -> None:
        stream.sendall(_HEADER.pack(Do.TAKE, size))
        _send(stream, size, chunk)
        _receive(stream, 1)

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


def _greet(stream: socket.socket, token: str, *, mine: bytes, theirs: bytes) -> bool:
    """Prove that we hold the token and see that the other does: each signs both nonces with its own name."""
    stream.settimeout(_HANDSHAKE_S)
    own = secrets.token_bytes(_NONCE_BYTES)
    try:
        stream.sendall(own)
        other = _receive(stream, _NONCE_BYTES)
        nonces = {mine: own, theirs: other}
        both = nonces[b"client"] + nonces[b"server"]
        stream.sendall(_sign(token, mine + both))
        return hmac.compare_digest(
            _receive(stream, hashlib.sha256().digest_size), _sign(token, theirs + both)
        )
    except OSError:
        return False


def _sign(token: str, text: bytes) -> bytes:
    return hmac.new(bytes.fromhex(token), text, hashlib.sha256).digest()


def _tune(stream: socket.socket) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _family(addr: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in addr else socket.AF_INET


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


def _receive(stream: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = stream.recv(size - len(data))
        if not part:
            raise ConnectionResetError("closed in the middle of a message")
        data += part
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main())
