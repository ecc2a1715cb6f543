"""How fast ranks on one or two hosts add up: `python -m hetrun.runtime.collectivebench JOBDIR`, started by profile on each.

Reads JOBDIR/collective.json, writes JOBDIR/out/collective.json. Two hosts find each other as `linkbench.py` does; the
first then opens torch's store, on its data address alone, and tells the other the port. Each rank runs in a process of
its own (`... JOBDIR RANK PORT FD`), since the variable that selects a device must be set before torch is imported;
what it measures stands in `collectives.py`. The hosts stay in contact, so that either ends soon after the other.

What keeps ranks from meeting, such as a missing torch, plug-in or backend, is an answer (`why`), not a failure.
"""

from __future__ import annotations

import array
import fcntl
import importlib.metadata
import importlib.util
import ipaddress
import json
import os
import re
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hetrun.errors import ConfigError, JobError
from hetrun.greeting import receive
from hetrun.model import CurvePoint
from hetrun.runtime.handshake import Appointment, await_client, find_server, listen
from hetrun.runtime.job import decode, read_json
from hetrun.runtime.process import leave, measuring

_LENGTH = struct.Struct("!H")
_SIOCGIFCONF = 0x8912
_GRACE_S = 5.0  # for the ranks here, once one failed or the other host is gone
_POLL_S = 0.1
_MAX_BYTES = 1 << 30
_NO_TORCH = "its interpreter has no torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank on this host, with the torch names of its device and the variable that selects it."""

    rank: int
    torch_device: str = "cpu"
    torch_plugin: str | None = None
    visible_env: str | None = None
    visible_id: str | None = None
    index: int = 0  # among the devices that the process sees
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRequest(Appointment):
    """collective.json: the ranks of this host, where they meet the others, and how much to measure.

    The server is the host of rank 0, the client the other one, if any; a rank waits for another one for `connect_s` too.
    """

    backend: str  # name in torch.distributed
    world_size: int
    seats: tuple[Seat, ...]
    p2p: bool  # also one message between ranks 0 and 1
    sizes: tuple[int, ...]  # bytes, ascending
    min_repeats: int
    max_repeats: int
    budget_s: float  # of repeats for one size
    start_s: float  # until all ranks have their torch and device
    deadline_s: float  # of what is measured

    def __post_init__(self) -> None:
        if not self.sizes or not all(4 <= size <= _MAX_BYTES for size in self.sizes):
            raise ValueError(f"sizes {list(self.sizes)[:5]}, need 4 to {_MAX_BYTES}")
        if not self.seats or not all(0 <= seat.rank < self.world_size for seat in self.seats):
            raise ValueError(f"{len(self.seats)} ranks here, of {self.world_size} in all")
        Appointment.__post_init__(self)  # super() finds no class with slots

    @property
    def is_alone(self) -> bool:
        """True where all ranks are on this host."""
        return len(self.seats) == self.world_size

    @property
    def is_server(self) -> bool:
        """True on the host of rank 0."""
        return any(seat.rank == 0 for seat in self.seats)

    @property
    def own_addr(self) -> str:
        """The data address of this host."""
        return self.server_addr if self.is_server else self.client_addr


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveResult:
    """out/collective.json: medians of rank 0, or why the ranks could not meet."""

    all_reduce: tuple[CurvePoint, ...] = ()  # every rank gives so many bytes
    p2p: tuple[CurvePoint, ...] = ()  # one way
    why: str = ""


def main() -> int:
    """Run the ranks of this host, or the one that the arguments name; return the exit code."""
    return measuring(_main)


def _main(arguments: Sequence[str]) -> None:
    match arguments:
        case [folder]:
            request = _request(Path(folder))
            result = run(Path(folder), request)
            out = Path(folder) / "out"
            out.mkdir(exist_ok=True)
            (out / "collective.json").write_text(json.dumps(asdict(result), allow_nan=False))
        case [folder, rank, port, fd] if rank.isdecimal() and port.isdecimal():
            _run_rank(Path(folder), int(rank), port=int(port), fd=int(fd))
        case _:
            raise ConfigError(f"got arguments {list(arguments)}, need the job directory")


def _request(folder: Path) -> CollectiveRequest:
    path = folder / "collective.json"
    return decode(CollectiveRequest, read_json(path), where=str(path))


def run(folder: Path, request: CollectiveRequest) -> CollectiveResult:
    """Meet the other host, if there is one, and run the ranks of this one to their end.

    Raises:
        PreflightError: the address is not one of this host, or all ports are taken.
        JobError: no other host in time, or a rank here or there ended before its time.
    """
    why = "" if importlib.util.find_spec("torch") else _NO_TORCH
    with _other_host(request) as stream, _store(request) as listener:
        port = listener.getsockname()[1] if listener else 0
        if stream is not None:
            mine = {"port": str(port), "why": why, "torch": _torch_version()}
            theirs = _exchange(stream, mine)
            why = why or why_not_meet(mine["torch"], theirs)
            port = port or int(theirs["port"])
        if why:
            return CollectiveResult(why=why)
        return _run_ranks(folder, request, port=port, listener=listener, stream=stream)


@contextmanager
def _other_host(request: CollectiveRequest) -> Iterator[socket.socket | None]:
    if request.is_alone:
        yield None
        return
    meet = await_client if request.is_server else find_server
    with closing(meet(request)) as stream:
        stream.settimeout(request.connect_s)
        yield stream


def _store(
    request: CollectiveRequest,
) -> closing[socket.socket] | nullcontext[None]:
    """Listen for torch's store on the data address alone; torch by itself listens on all of them."""
    if not request.is_server:
        return nullcontext(None)
    return closing(listen(request.server_addr, request.ports))


def _exchange(stream: socket.socket, mine: Mapping[str, object]) -> dict[str, str]:
    """Tell the other host a few words and hear its own."""
    data = json.dumps(mine).encode()
    try:
        stream.sendall(_LENGTH.pack(len(data)) + data)
        (size,) = _LENGTH.unpack(receive(stream, _LENGTH.size))
        theirs = json.loads(receive(stream, size))
    except (OSError, ValueError) as error:
        raise JobError(f"the other host broke off: {error}") from error
    return {key: str(theirs[key]) for key in ("port", "why", "torch")}


def why_not_meet(torch: str, theirs: Mapping[str, str]) -> str:
    """Return why ranks here cannot meet those of the other host, "" if they can.

    Gloo's keys in the store changed in 2.6: both sides would sit out their whole timeout.
    """
    if theirs["why"]:
        return f"the other host: {theirs['why']}"
    known = [release for text in (torch, theirs["torch"]) if (release := _release(text))]
    if len({release < (2, 6) for release in known}) > 1:
        return f"torch {torch} cannot meet torch {theirs['torch']} of the other host"
    return ""


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # a vendor's own build
        return ""


def _release(version: str) -> tuple[int, int] | None:
    """None where a vendor numbers in its own way, which tells nothing."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


# --- the ranks of this host -------------------------------------------------------------------------------


def _run_ranks(
    folder: Path,
    request: CollectiveRequest,
    *,
    port: int,
    listener: socket.socket | None,
    stream: socket.socket | None,
) -> CollectiveResult:
    children: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for seat in request.seats:
            fds = (listener.fileno(),) if listener and seat.rank == 0 else ()
            own = (str(folder), str(seat.rank), str(port), str(fds[0] if fds else -1))
            children[seat.rank] = subprocess.Popen(
                [sys.executable, "-m", "hetrun.runtime.collectivebench", *own],
                env={**os.environ, **_rank_env(request, seat)},
                pass_fds=fds,
            )
        _wait(children, request, stream)
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    paths = [_rank_path(folder, rank) for rank in sorted(children)]
    results = [
        decode(CollectiveResult, read_json(path), where=str(path))
        for path in paths
        if path.exists()
    ]
    refused = [result for result in results if result.why]
    if refused or len(results) == len(children):
        return (refused or results)[0]
    raise JobError(f"{len(children) - len(results)} ranks left no figures")


def _wait(
    children: Mapping[int, subprocess.Popen[bytes]],
    request: CollectiveRequest,
    stream: socket.socket | None,
) -> None:
    """Wait for all; a rank that fails, or another host that ends, leaves the others a moment to end by themselves."""
    limit_s = request.start_s + request.connect_s + request.deadline_s
    deadline_s = time.monotonic() + limit_s
    problem = ""
    while any(child.poll() is None for child in children.values()):
        if time.monotonic() > deadline_s:
            raise JobError(problem or f"no figures within {limit_s:.0f} s")
        if not problem:
            problem = _problem(children, stream)
            if problem:
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)
    failed = [rank for rank, child in children.items() if child.returncode != 0]
    if failed:
        raise JobError(
            problem
            if "other host" in problem
            else f"rank {failed[0]} {_ended(children[failed[0]])}"
        )


def _problem(children: Mapping[int, subprocess.Popen[bytes]], stream: socket.socket | None) -> str:
    for rank, child in children.items():
        if child.poll() not in (None, 0):
            return f"rank {rank} {_ended(child)}"
    if stream is not None and _is_closed(stream):
        return "the other host's part ended before its time"
    return ""


def _ended(child: subprocess.Popen[bytes]) -> str:
    code = child.returncode
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _is_closed(stream: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector, suppress(OSError):
        selector.register(stream, selectors.EVENT_READ)
        return bool(selector.select(0)) and not stream.recv(1, socket.MSG_PEEK)
    return True


def _rank_env(request: CollectiveRequest, seat: Seat) -> dict[str, str]:
    """Return the variables of one rank; the interface is the one of the data address, as in a run."""
    nic = interface_of(request.own_addr)
    env = {"GLOO_SOCKET_IFNAME": nic, "NCCL_SOCKET_IFNAME": f"={nic}"} if nic else {}
    env = {name: value for name, value in env.items() if name not in os.environ} | seat.env
    if seat.visible_env is not None and seat.visible_id is not None:
        env[seat.visible_env] = seat.visible_id
    return env


def interface_of(addr: str) -> str | None:
    """Return the name of the interface that has a numeric address, None where none has."""
    if ":" in addr:
        return _interface_of_ipv6(addr)
    names = array.array("B", bytes(1 << 16))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        ask = struct.pack("iL", len(names), names.buffer_info()[0])
        num_bytes = struct.unpack("iL", fcntl.ioctl(sock, _SIOCGIFCONF, ask))[0]
    size = 40  # of struct ifreq on 64-bit Linux: 16 bytes name, then struct sockaddr_in
    for start in range(0, num_bytes, size):
        entry = names[start : start + size].tobytes()
        if socket.inet_ntoa(entry[20:24]) == addr:
            return entry[:16].split(b"\0")[0].decode().partition(":")[0]
    return None


def _interface_of_ipv6(addr: str) -> str | None:
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            text, *_, name = line.split()
            if ipaddress.ip_address(bytes.fromhex(text)) == ipaddress.ip_address(addr):
                return name
    return None


# --- one rank ---------------------------------------------------------------------------------------------


def _rank_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _run_rank(folder: Path, rank: int, *, port: int, fd: int) -> None:
    request = _request(folder)
    try:
        from hetrun.runtime import (
            collectives,
        )  # torch comes only now, with the environment complete
    except (ImportError, OSError) as error:
        result = CollectiveResult(why=f"its torch cannot be imported: {error}")
    else:
        result = collectives.measure(request, rank, port=port, listen_fd=None if fd < 0 else fd)
    _rank_path(folder, rank).write_text(json.dumps(asdict(result), allow_nan=False))


if __name__ == "__main__":
    leave(main())  # a group that failed has threads that wait for what never comes
