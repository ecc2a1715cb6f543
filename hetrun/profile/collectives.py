"""Measures a group of ranks on one or two hosts: all-reduce over sizes, and one message between the first two.

The hosts run `hetrun.runtime.collectivebench` with the worker bundle. Ranks that cannot meet say why, and that is
kept; ranks that met and then failed are an error. Curves and links are made of it in `curves.py`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetrun.errors import HetrunError, HostError, JobError
from hetrun.model import CurvePoint, Device, HostFacts, LinkKind
from hetrun.profile.links import NeededLink
from hetrun.profile.pairs import (
    LOOPBACK,
    PORT_TRIES,
    PORTS,
    Effort,
    check_answers,
    data_address,
)
from hetrun.strictyaml import to_noun
from hetrun.transport import Transport
from hetrun.transport.fanout import on_all
from hetrun.transport.jobs import run_module
from hetrun.vendors import get_vendor

COLLECTIVE_MODULE = "hetrun.runtime.collectivebench"
HOST_MEMORY = "gloo"  # what runs use between any two devices
MAX_RANKS = 8  # of one host
OTHER_HOST = "the other host: "  # begins a reason that is not the answering host's own
_CONNECT_S = 20.0
_START_S = 60.0  # torch and a vendor's driver may take their time
_DEADLINE_S = 60.0

Member = tuple[HostFacts, Device | None]  # a device's rank, or None for one in host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Ranks that are measured together, in order; those of a host stand together, on two hosts at most."""

    backend: str
    members: tuple[Member, ...]

    @property
    def hosts(self) -> tuple[HostFacts, ...]:
        """Its hosts, that of rank 0 first."""
        return tuple({host.spec.name: host for host, _ in self.members}.values())

    @property
    def is_native(self) -> bool:
        """True where ranks hold their tensors on devices."""
        return self.members[0][1] is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamResult:
    """Medians of rank 0, or `why` there are none."""

    team: Team
    addresses: tuple[str, ...]
    all_reduce: tuple[CurvePoint, ...] = ()
    p2p: tuple[CurvePoint, ...] = ()
    why: str = ""


def host_memory_team(a: HostFacts, b: HostFacts) -> Team:
    """Two ranks whose tensors are in host memory, as gradients are while they are added up."""
    return Team(backend=HOST_MEMORY, members=((a, None), (b, None)))


def native_team(needed: NeededLink) -> Team | None:
    """Return the devices of one vendor that its own library can join, None where there are not two of them.

    Inside a host all of them, MAX_RANKS at most; inside an island the first of each host of the first pair.
    """
    if needed.kind is LinkKind.ACROSS or not needed.is_of_accelerators:
        return None
    a, b = needed.pairs()[0]
    members: list[Member]
    if needed.kind is LinkKind.INSIDE_HOST:
        own = [device for device in a.devices if device.vendor == needed.a]
        members = [(a, device) for device in own[:MAX_RANKS]]
    else:
        members = [
            (host, next(device for device in host.devices if device.vendor == needed.a))
            for host in (a, b)
        ]
    return Team(backend=get_vendor(needed.a).collective_backend, members=tuple(members))


def measure_team(team: Team, effort: Effort) -> TeamResult:
    """Let the team's ranks meet and add up.

    A vendor's library that fails says why, since other ways are left; host memory is the last one.

    Raises:
        HetrunError: a host cannot be reached; host memory: either end failed. Names the hosts and addresses.
    """
    hosts = team.hosts
    names = tuple(host.spec.name for host in hosts)
    addresses = _addresses(hosts)
    files = {
        name: {"collective.json": json.dumps(request).encode()}
        for name, request in team_requests(team, addresses, effort).items()
    }

    def run(transport: Transport) -> Mapping[str, bytes]:
        limit_s = 2 * _CONNECT_S + _START_S + _DEADLINE_S + 20.0
        return run_module(
            transport, COLLECTIVE_MODULE, files[transport.spec.name], timeout_s=limit_s
        )

    answers = on_all([host.spec for host in hosts], run)
    results = [
        read_team(team, addresses, name, answer)
        for name, answer in answers.items()
        if not isinstance(answer, HetrunError)
    ]
    refused = [result for result in results if result.why]
    if refused:
        return next((result for result in refused if OTHER_HOST not in result.why), refused[0])
    failed = [answer for answer in answers.values() if isinstance(answer, HetrunError)]
    if team.is_native and failed and not isinstance(failed[0], HostError):
        why = f"{failed[0].host}: {failed[0].message}"
        return TeamResult(team=team, addresses=addresses, why=why)
    check_answers(names, addresses, answers)
    return results[0]


def _addresses(hosts: tuple[HostFacts, ...]) -> tuple[str, ...]:
    if len(hosts) == 1:
        return (LOOPBACK,)
    a, b = hosts
    return data_address(a, b), data_address(b, a)


def team_requests(
    team: Team, addresses: tuple[str, ...], effort: Effort
) -> dict[str, dict[str, Any]]:
    """Return what each host is told, as JSON values: random ports and a token that counts once."""
    seats: dict[str, list[dict[str, Any]]] = {host.spec.name: [] for host in team.hosts}
    for rank, (host, device) in enumerate(team.members):
        own = seats[host.spec.name]
        own.append({"rank": rank, **({} if device is None else _device_seat(device, len(own)))})
    shared = {
        "backend": team.backend,
        "world_size": len(team.members),
        "server_addr": addresses[0],
        "client_addr": addresses[-1],
        "ports": [secrets.choice(PORTS) for _ in range(PORT_TRIES)],
        "token": secrets.token_hex(32),
        "p2p": team.is_native,
        "sizes": list(effort.sizes),
        "min_repeats": effort.min_repeats,
        "max_repeats": effort.max_repeats,
        "budget_s": effort.budget_s,
        "connect_s": _CONNECT_S,
        "start_s": _START_S,
        "deadline_s": _DEADLINE_S,
    }
    return {name: {**shared, "seats": own} for name, own in seats.items()}


def _device_seat(device: Device, number: int) -> dict[str, Any]:
    """`number` counts the host's ranks; it is torch's number of the device where nothing hides the others."""
    vendor = get_vendor(device.vendor)
    is_hidden = vendor.visible_devices_env is not None and device.visible_id is not None
    return {
        "torch_device": vendor.torch_device,
        "torch_plugin": vendor.torch_plugin,
        "visible_env": vendor.visible_devices_env,
        "visible_id": device.visible_id,
        "index": 0 if is_hidden else number,
        "env": dict(vendor.extra_env),
    }


def read_team(
    team: Team, addresses: tuple[str, ...], host: str, files: Mapping[str, bytes]
) -> TeamResult:
    """Return what one host answered; figures come from that of rank 0.

    Raises:
        JobError: the answer is missing or damaged.
    """
    is_first = host == team.hosts[0].spec.name
    try:
        answer = json.loads(files["collective.json"])
        why = answer["why"]
        curves = {
            what: tuple(to_noun(CurvePoint, point) for point in answer[what])
            for what in ("all_reduce", "p2p")
        }
        wanted = ("all_reduce", "p2p") if team.is_native else ("all_reduce",)
        if not isinstance(why, str):
            raise TypeError(f"why is {why!r}")
        if is_first and not why and any(len(curves[what]) < 2 for what in wanted):
            raise ValueError("no figures")
        for points in curves.values():
            sizes = [point.num_bytes for point in points]
            if sizes != sorted(set(sizes)):
                raise ValueError(f"sizes {sizes}")
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise JobError(
            f"the ranks' bench answered in a wrong way: {str(error)[:300]}", host=host
        ) from error
    said = f"{host}: {why[:300]}" if why else ""
    return TeamResult(team=team, addresses=addresses, why=said, **curves)
