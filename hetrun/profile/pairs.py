"""Measures the network between two hosts: one TCP stream over their data addresses, as gloo would use.

Both ends run `hetrun.runtime.linkbench` with the worker bundle. A measurement that fails is an error that names
both ends; it is never replaced by an assumption.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetrun.errors import HetrunError, JobError, PreflightError
from hetrun.model import Connection, CurvePoint, HostFacts
from hetrun.profile.links import data_nic
from hetrun.strictyaml import to_noun
from hetrun.transport import Transport
from hetrun.transport.fanout import on_all
from hetrun.transport.jobs import run_module
from hetrun.transport.ssh_target import resolve_chain

log = logging.getLogger(__name__)

LINK_MODULE = "hetrun.runtime.linkbench"
LOOPBACK = "127.0.0.1"
SIZES = tuple(1 << power for power in range(10, 27, 2))  # 1 KiB to 64 MiB
QUICK_SIZES = tuple(1 << power for power in range(10, 25, 2))  # to 16 MiB
GLANCE_SIZES = (1 << 10, 1 << 20, 4 << 20)  # of the pairs that are compared with the measured one
PORTS = range(20000, 32768)  # below the range that the kernel gives to outgoing connections
PORT_TRIES = 5
_CONNECT_S = 20.0
_DEADLINE_S = 90.0
_HINT = (
    "does a firewall stand between them? `data_addr` or `nic` in the inventory chooses the addresses;"
    " a link declared under `links:` is not measured"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is spent on a pair."""

    sizes: tuple[int, ...]
    min_repeats: int
    max_repeats: int
    budget_s: float  # for one size and direction


FULL = Effort(sizes=SIZES, min_repeats=3, max_repeats=20, budget_s=0.3)
QUICK = Effort(sizes=QUICK_SIZES, min_repeats=2, max_repeats=8, budget_s=0.08)
GLANCE = Effort(sizes=GLANCE_SIZES, min_repeats=2, max_repeats=5, budget_s=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """Seconds one way between two hosts, in the slower direction; the first point is one byte."""

    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    points: tuple[CurvePoint, ...]
    asymmetry: float  # slower direction over the faster, at the largest size
    slower_from: str  # host that sends in the slower direction

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of the largest message."""
        return self.points[-1].num_bytes / self.points[-1].seconds


def measure_pair(a: HostFacts, b: HostFacts, effort: Effort) -> PairResult:
    """Measure between two hosts, or inside one where both are the same.

    Raises:
        HetrunError: either end failed; names both with their addresses.
    """
    is_one = a.spec.name == b.spec.name
    ends = (a,) if is_one else (a, b)
    addresses = (LOOPBACK,) if is_one else (data_address(a, b), data_address(b, a))
    request = link_request(addresses, effort)
    roles = ("both",) if is_one else ("server", "client")
    files = {
        host.spec.name: {"link.json": json.dumps({**request, "role": role}).encode()}
        for host, role in zip(ends, roles, strict=True)
    }

    def run(transport: Transport) -> Mapping[str, bytes]:
        return run_module(
            transport,
            LINK_MODULE,
            files[transport.spec.name],
            timeout_s=_CONNECT_S + 2 * _DEADLINE_S,
        )

    answers = on_all([host.spec for host in ends], run)
    names = tuple(host.spec.name for host in ends)
    check_answers(names, addresses, answers)
    answer = answers[names[-1]]
    if isinstance(answer, HetrunError):  # check_answers raised it
        raise answer
    return read_link(names, addresses, answer)


def link_request(addresses: tuple[str, ...], effort: Effort) -> dict[str, Any]:
    """Return what both ends are told, as JSON values: random ports and a token that counts once."""
    return {
        "server_addr": addresses[0],
        "client_addr": addresses[-1],
        "ports": [secrets.choice(PORTS) for _ in range(PORT_TRIES)],
        "token": secrets.token_hex(32),
        "sizes": list(effort.sizes),
        "min_repeats": effort.min_repeats,
        "max_repeats": effort.max_repeats,
        "budget_s": effort.budget_s,
        "connect_s": _CONNECT_S,
        "deadline_s": _DEADLINE_S,
    }


def check_answers(
    names: tuple[str, ...],
    addresses: tuple[str, ...],
    answers: Mapping[str, Mapping[str, bytes] | HetrunError],
) -> None:
    """Raise one error for whichever ends failed, of the kind of the first."""
    errors = [error for name in names if isinstance(error := answers[name], HetrunError)]
    if not errors:
        return
    ends = [f"{name} ({addr})" for name, addr in zip(names, addresses, strict=True)]
    said = "; ".join(f"{error.host or '?'}: {error.message}" for error in errors)
    kind = type(errors[0])
    raise kind(f"link between {' and '.join(ends)}: {said}", hint=errors[0].hint or _HINT)


def read_link(
    names: tuple[str, ...], addresses: tuple[str, ...], files: Mapping[str, bytes]
) -> PairResult:
    """Return what the client saw, in the direction whose largest message took longer.

    Raises:
        JobError: the answer is missing or damaged.
    """
    try:
        answer = json.loads(files["link.json"])
        timings = answer["timings"]
        ways = {way: float(timings[-1][way]) for way in ("to_s", "from_s")}
        slower = max(ways, key=lambda way: ways[way])
        points = [{"num_bytes": 1, "seconds": answer["round_trip_s"] / 2}] + [
            {"num_bytes": item["num_bytes"], "seconds": item[slower]} for item in timings
        ]
        curve = tuple(to_noun(CurvePoint, point) for point in points)
        asymmetry = max(ways.values()) / min(ways.values())
    except (LookupError, TypeError, ValueError, RecursionError, ZeroDivisionError) as error:
        raise JobError(
            f"the link's client answered in a wrong way: {str(error)[:300]}", host=names[-1]
        ) from error
    return PairResult(
        hosts=names,
        addresses=addresses,
        points=curve,
        asymmetry=asymmetry,
        slower_from=names[-1] if slower == "to_s" else names[0],
    )


# --- addresses --------------------------------------------------------------------------------------------


def data_address(
    host: HostFacts, peer: HostFacts, *, lookup: Callable[[str], str] | None = None
) -> str:
    """Return the numeric address of a host's training traffic, as launch chooses it.

    That is its data_addr, else the address of its nic, else where SSH goes; loopback between two hosts that are
    both this machine.

    Raises:
        PreflightError: there is none, or a name that does not resolve.
    """
    spec = host.spec
    if spec.data_addr is not None:
        return _numeric(spec.data_addr, host=spec.name, lookup=lookup or _lookup)
    if spec.nic is not None:
        nic = data_nic(host)
        if nic is None or nic.name != spec.nic or not nic.addresses:
            raise PreflightError(
                f"its interface {spec.nic} had no address when it was probed",
                hint="correct `nic` of the host, or set its `data_addr`",
                host=spec.name,
            )
        return next((addr for addr in nic.addresses if ":" not in addr), nic.addresses[0])
    if spec.connection is Connection.SSH:
        target = resolve_chain(spec)[-1].addr
        return _numeric(target, host=spec.name, lookup=lookup or _lookup)
    if peer.spec.connection is Connection.LOCAL:
        return LOOPBACK
    raise PreflightError(
        f"this machine, and {peer.spec.name} over SSH: they need an address to reach it by",
        hint=f"set `data_addr` of {spec.name} in the inventory and probe again",
        host=spec.name,
    )


def _numeric(name: str, *, host: str, lookup: Callable[[str], str]) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return lookup(name)
    except OSError as error:
        raise PreflightError(
            f"its data address {name!r} does not resolve here",
            hint="set `data_addr` of the host to a number",
            host=host,
        ) from error


def _lookup(name: str) -> str:
    return str(socket.getaddrinfo(name, None)[0][4][0])
