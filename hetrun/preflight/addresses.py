"""Which address of each host carries training traffic. What a host itself says to that is checked by its guard."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetrun.errors import PreflightError
from hetrun.model import Connection, HostSpec
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
