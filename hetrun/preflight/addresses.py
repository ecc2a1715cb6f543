"""Which address of each host carries training traffic. What a host itself says to that is checked by its guard."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetrun.errors import PreflightError
from hetrun.model import Connection, HostSpec
from hetrun.transport.jobs import Ready
from hetrun.transport.ssh_target import resolve_chain

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAddress:
    """What is known before the host was asked: a numeric address, or only the interface."""

    addr: str | None
    name: str | None  # that the inventory gives; must mean the same address on the host
    nic: str | None


def choose_addresses(
    hosts: Sequence[HostSpec],
    *,
    lookup: Callable[[str], list[str]] | None = None,
    ssh_addr: Callable[[HostSpec], str] | None = None,
) -> dict[str, DataAddress]:
    """Return each host's data address: data_addr, else that of its nic, else where SSH goes.

    Raises:
        PreflightError: a host of this machine among others has none that they could reach.
    """
    all_local = all(spec.connection is Connection.LOCAL for spec in hosts)
    return {
        spec.name: choose_address(spec, all_local=all_local, lookup=lookup, ssh_addr=ssh_addr)
        for spec in hosts
    }


def choose_address(
    spec: HostSpec,
    *,
    all_local: bool,
    lookup: Callable[[str], list[str]] | None = None,
    ssh_addr: Callable[[HostSpec], str] | None = None,
) -> DataAddress:
    """Return the data address of one host; `all_local` says that all hosts of the run are this machine.

    Raises:
        PreflightError: a host of this machine among others has none that they could reach, or a name does not resolve.
        HostError: the ssh configuration cannot be read.
    """
    name = spec.data_addr
    if name is None and spec.nic is None:
        if spec.connection is Connection.SSH:
            name = (ssh_addr or _ssh_addr)(spec)
        elif all_local:
            name = LOOPBACK
        else:
            raise PreflightError(
                "this machine and others over SSH in one run: they need an address to reach it by",
                hint=f"set `data_addr` of {spec.name} in the inventory and plan again",
                host=spec.name,
            )
    addr = _numeric(spec.name, name, lookup or _lookup) if name else None
    return DataAddress(addr=addr, name=spec.data_addr, nic=spec.nic)


def check_together(ready: Mapping[str, Ready]) -> list[str]:
    """Compare what the hosts said about themselves; return warnings.

    Raises:
        PreflightError: addresses that cannot meet, or versions of torch that cannot talk.
    """
    addrs = {host: ipaddress.ip_address(answer.addr or LOOPBACK) for host, answer in ready.items()}
    loopback = [host for host, addr in addrs.items() if addr.is_loopback]
    kernels = {answer.boot for answer in ready.values()}
    if loopback and len(kernels) > 1:
        host = loopback[0]
        raise PreflightError(
            f"its data address {addrs[host]} means another machine on every host",
            hint="set `data_addr` of the host in the inventory and plan again",
            host=host,
        )
    _check_torch({host: answer.torch for host, answer in ready.items() if answer.torch})
    return [
        f"{host}: {addr} is a public address, and torchrun's store knows no password"
        for host, addr in addrs.items()
        if addr.is_global
    ]


def torch_conflict(versions: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a host whose torch cannot meet that of another, and the other; None where all can meet.

    Gloo's keys in the store changed in 2.6: both sides would sit out their whole timeout.
    """
    old = [host for host, text in versions.items() if torch_version(text) < (2, 6)]
    new = [host for host in versions if host not in old]
    return (old[0], new[0]) if old and new else None


def _check_torch(versions: Mapping[str, str]) -> None:
    conflict = torch_conflict(versions)
    if conflict is not None:
        host, other = conflict
        raise PreflightError(
            f"torch {versions[host]} cannot meet torch {versions[other]} on {other}",
            hint="torch before 2.6 talks only to torch before 2.6",
            host=host,
        )


def torch_version(text: str) -> tuple[int, int]:
    """Return major and minor number; a high one where a vendor counts in its own way."""
    parts = text.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return 99, 0  # a vendor's own numbering tells nothing


def _numeric(host: str, name: str, lookup: Callable[[str], list[str]]) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return lookup(name)[0]
    except (OSError, IndexError) as error:
        raise PreflightError(
            f"its data address {name!r} does not resolve here",
            hint="set `data_addr` of the host to a number",
            host=host,
        ) from error


def _lookup(name: str) -> list[str]:
    return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})


def _ssh_addr(spec: HostSpec) -> str:
    return resolve_chain(spec)[-1].addr
