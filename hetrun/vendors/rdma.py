"""Which address of an RDMA port to use: RoCE v2 with an IPv4 address. Reading it on the host is left to probe."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from hetrun.vendors._read.answer import RdmaPort
from hetrun.vendors._read.run import MAX_LINE

_GID = re.compile(r"[0-9a-f]{4}(?::[0-9a-f]{4}){7}")  # as the kernel prints it, never shortened
_LINE = re.compile(
    r"(?:/sys)?/class/infiniband/([A-Za-z0-9_.-]{1,64})/ports/([0-9]{1,3})/"
    r"(gid_attrs/types|gids)/([0-9]{1,4}):(.{1,60})"
)


@dataclass(slots=True)
class _Port:
    types: dict[int, str] = field(default_factory=dict)
    gids: dict[int, str] = field(default_factory=dict)


def rocev2_gids(listing: str) -> tuple[RdmaPort, ...]:
    """Read lines 'path:value' of gid types and gids; one answer per port, in their order.

    The index is None where a port has no RoCE v2 address that another host can reach.
    """
    ports: dict[tuple[str, int], _Port] = {}
    for line in listing.split("\n"):
        match = _LINE.fullmatch(line.strip()) if len(line) <= MAX_LINE else None
        if match is not None:
            port = ports.setdefault((match[1], int(match[2])), _Port())
            values = port.types if match[3] == "gid_attrs/types" else port.gids
            values.setdefault(int(match[4]), match[5].strip())
    return tuple(_choose(dev, number, port) for (dev, number), port in ports.items())


def _choose(dev: str, number: int, port: _Port) -> RdmaPort:
    """Take the lowest index with RoCE v2 and IPv4; without IPv4, a global IPv6 address."""
    fallback: tuple[int, str] | None = None
    for index in sorted(port.gids):
        address = _address(port.gids[index]) if port.types.get(index) == "RoCE v2" else None
        if address is None:
            continue
        if address.ipv4_mapped is not None:
            ip = str(address.ipv4_mapped)
            return RdmaPort(dev=dev, port=number, rocev2_gid_index=index, ip=ip)
        if fallback is None and not address.is_link_local:
            fallback = (index, str(address))
    if fallback is not None:
        return RdmaPort(dev=dev, port=number, rocev2_gid_index=fallback[0], ip=fallback[1])
    return RdmaPort(dev=dev, port=number, rocev2_gid_index=None, ip=None)


def _address(gid: str) -> ipaddress.IPv6Address | None:
    """Read a gid; None for empty (all zero) and cut ones."""
    if _GID.fullmatch(gid.lower()) is None:
        return None
    address = ipaddress.IPv6Address(gid)
    return None if int(address) == 0 else address
