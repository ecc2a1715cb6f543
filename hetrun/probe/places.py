"""How near network ports are to devices: as the vendor's tool says, else from the PCI paths and NUMA nodes of the kernel.

Words as the tools' legends define them: PIX at most one bridge between, PXB several, PHB the host bridge, NODE the
same NUMA node, SYS another one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from hetrun.model import Device, HostFacts, Nic, NicLink, RdmaNic
from hetrun.probe.answer import Answer
from hetrun.probe.doubts import first

MAX_NIC_LINKS = 4096
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ORDER = (
    ("PIX", "SPB"),
    ("PXB", "MPB"),
    ("PHB",),
    ("NODE",),
    ("SYS", "SOC"),
)  # of one tool, and old words
_RANK = {word: rank for rank, words in enumerate(_ORDER) for word in words}


def find_nic_links(
    answer: Answer,
    devices: Sequence[Device],
    told: Sequence[NicLink],
    *,
    ports: Mapping[str, tuple[str | None, int | None]],
) -> tuple[NicLink, ...]:
    """Return what lies between each port and each device; `ports` is name -> (bus id, NUMA node).

    What a tool told of a port and a device is not computed again. Pairs about which nothing is known are left out.
    """
    known = {(link.nic, link.device) for link in told}
    paths, nodes = _paths(answer), _nodes(answer)
    found = list(told)
    for name, (bus_id, node) in ports.items():
        for device in devices:
            if device.bus_id is None or (name, device.index) in known:
                continue
            place = device.bus_id if device.bus_id in paths else first(device.bus_id)
            kind = _between(paths.get(bus_id or ""), paths.get(place))
            if kind is None:
                kind = _by_node(nodes.get(bus_id or "", node), device.numa_node)
            if kind is not None:
                found.append(NicLink(nic=name, device=device.index, kind=kind))
    return tuple(found[:MAX_NIC_LINKS])


def port_places(
    rdma: Sequence[RdmaNic], nics: Sequence[Nic]
) -> dict[str, tuple[str | None, int | None]]:
    """Return name -> (bus id, NUMA node) of RDMA devices, and of interfaces that belong to none of them."""
    places: dict[str, tuple[str | None, int | None]] = {
        port.device: (port.bus_id, port.numa_node) for port in rdma
    }
    taken = {port.nic for port in rdma}
    return places | {
        nic.name: (nic.bus_id, None) for nic in nics if nic.bus_id and nic.name not in taken
    }


def nearest_nics(host: HostFacts, device: int) -> tuple[str, tuple[str, ...]] | None:
    """Return (word, names) of the RDMA ports nearest to a device; None where nothing is known."""
    rdma = {port.device for port in host.rdma}
    links = [
        link
        for link in host.nic_links
        if link.device == device and link.nic in rdma and link.kind in _RANK
    ]
    if not links:
        return None
    best = min(links, key=lambda link: _RANK[link.kind])
    return best.kind, tuple(link.nic for link in links if link.kind == best.kind)


def last_function(path: str) -> str | None:
    """Return the PCI function to which a path below /sys/devices leads, None for a virtual device."""
    parts = [part for part in path.split("/") if _ADDRESS.fullmatch(part)]
    return parts[-1] if parts else None


def _paths(answer: Answer) -> dict[str, tuple[str, ...]]:
    """Return bus id -> the way from the host bridge to it, such as (pci0000:4a, 0000:4a:02.0, 0000:4b:00.0)."""
    found = {}
    for parts in _split(answer.section("paths").lines):
        found[parts[-1]] = parts
    return found


def _split(lines: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for line in lines:
        parts = line.strip().split("/")
        roots = [at for at, part in enumerate(parts) if part.startswith("pci")]
        if roots and _ADDRESS.fullmatch(parts[-1]) and len(parts) < 64:
            # what stands before the bridge tells platforms with several domains apart
            yield ("/".join(parts[: roots[0] + 1]), *parts[roots[0] + 1 :])


def _nodes(answer: Answer) -> dict[str, int]:
    """Return bus id -> NUMA node, for functions that are no RDMA port."""
    lines = (line.split() for line in answer.section("numa").lines)
    return {
        words[0]: int(words[1])
        for words in lines
        if len(words) == 2 and re.fullmatch(r"[0-9]{1,4}", words[1])
    }


def _between(a: tuple[str, ...] | None, b: tuple[str, ...] | None) -> str | None:
    """Return PIX, PXB or PHB for two ways below one host bridge, else None."""
    if a is None or b is None or a[0] != b[0]:
        return None
    num_shared = 0
    for left, right in zip(a[:-1], b[:-1], strict=False):
        if left != right:
            break
        num_shared += 1
    if num_shared == 1:
        return "PHB"
    # a switch is one bridge upstream, which they share, and one downstream port for each
    return "PIX" if max(len(a), len(b)) - num_shared - 1 <= 1 else "PXB"


def _by_node(a: int | None, b: int | None) -> str | None:
    if a is None or b is None:
        return None
    return "NODE" if a == b else "SYS"
