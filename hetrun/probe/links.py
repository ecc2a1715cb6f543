"""What joins devices to each other and to the network: RDMA ports, GPUDirect modules, matrices and ports of the tools.

Which of it a run uses is left to launch and to the collective libraries; what is not told stays unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hetrun.model import Device, DeviceLink, DevicePort, HostSpec, NicLink, RdmaNic
from hetrun.probe.answer import Answer, plain
from hetrun.probe.doubts import some
from hetrun.probe.script import ports_sections, topology_sections
from hetrun.vendors import Topology, Vendor, read_ports, read_topology, rocev2_gids

MAX_PORTS = 256
MAX_MODULES = 16
MIN_LOCKED_BYTES = (
    1 << 30
)  # RDMA pins its buffers; less stops most jobs at their first registration
_RATE = re.compile(r"([0-9]{1,5}(?:\.[0-9])?) Gb/sec")
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NODE_LINE = re.compile(r"([0-9a-f:.]{4,20}) ([0-9]{1,4})")


def find_rdma(answer: Answer) -> tuple[RdmaNic, ...]:
    """Return the RDMA ports in the kernel's order, each with its RoCE v2 address."""
    gids = {(port.dev, port.port): port for port in rocev2_gids(answer.section("gids").text)}
    found = []
    for line in answer.section("rdma").lines[:MAX_PORTS]:
        words = line.split("\t")
        if len(words) != 8 or not re.fullmatch(r"[0-9]{1,3}", words[1]):
            continue
        device, port, layer, state, rate, nic, bus_id, node = words
        gid = gids.get((device, int(port)))
        told = _RATE.match(rate)
        found.append(
            RdmaNic(
                device=plain(device, max_chars=64) or "?",
                port=int(port),
                link_layer=plain(layer, max_chars=32),
                active=state.endswith("ACTIVE"),
                rate_gbps=float(told[1]) if told else None,
                nic=plain(nic, max_chars=32),
                bus_id=bus_id if _BUS_ID.fullmatch(bus_id) else None,
                numa_node=int(node) if re.fullmatch(r"[0-9]{1,4}", node) else None,
                gid_index=gid.rocev2_gid_index if gid else None,
                addr=gid.ip if gid else None,
            )
        )
    return tuple(found)


def find_peer_memory(answer: Answer) -> tuple[str, ...]:
    """Return the loaded modules that let a NIC reach device memory, by the names the kernel shows."""
    names = (plain(line, max_chars=64) for line in answer.section("peers").lines[:MAX_MODULES])
    return tuple(sorted({name.replace("-", "_") for name in names if name}))


def numa_nodes(answer: Answer) -> dict[str, int]:
    """Return bus id -> NUMA node of the functions that have one."""
    lines = (_NODE_LINE.fullmatch(line.strip()) for line in answer.section("numa").lines)
    return {line[1]: int(line[2]) for line in lines if line}


@dataclass(frozen=True, slots=True)
class Matrix:
    """What one vendor's tool tells of its chips, and which of the host's devices they are (by the tool's number)."""

    topology: Topology
    devices: Mapping[int, int]


def find_matrices(
    spec: HostSpec,
    answer: Answer,
    vendors: Mapping[str, Vendor],
    devices: Sequence[Device],
) -> tuple[Matrix, ...]:
    """Return the vendors' matrices that are about devices which the host offers."""
    found = []
    for section in topology_sections(spec, vendors):
        output = answer.section(section.section)
        mine = [d for d in devices if d.vendor == section.vendor and d.emulated is None]
        topology = read_topology(output.stdout) if mine and output.rc == 0 else Topology()
        if numbers := _numbers(topology, mine):
            found.append(Matrix(topology, numbers))
    return tuple(found)


def _numbers(topology: Topology, devices: Sequence[Device]) -> dict[int, int]:
    """Return a matrix's number -> `Device.index`: by address where both are told, else by the tool's number.

    A matrix that lacks a number of a device counts in another way than the list of devices: it says nothing.
    """
    if topology.bus_ids:
        places = Counter(device.bus_id for device in devices)
        by_bus = {d.bus_id: d.index for d in devices if d.bus_id and places[d.bus_id] == 1}
        return {
            number: by_bus[bus_id]
            for number, bus_id in topology.bus_ids.items()
            if bus_id in by_bus
        }
    known = {d.vendor_index: d.index for d in devices if d.vendor_index is not None}
    return known if known.keys() <= topology.chips else {}


def find_device_links(matrices: Sequence[Matrix]) -> tuple[DeviceLink, ...]:
    """Return what the vendors' tools say of pairs of devices that the host offers."""
    return tuple(
        DeviceLink(a=min(pair), b=max(pair), kind=link.kind)
        for matrix in matrices
        for link in matrix.topology.links
        if link.a in matrix.devices and link.b in matrix.devices
        for pair in [(matrix.devices[link.a], matrix.devices[link.b])]
    )


def find_told_nics(matrices: Sequence[Matrix], ports: Collection[str]) -> tuple[NicLink, ...]:
    """Return what the vendors' tools say of ports that are there and devices that the host offers."""
    return tuple(
        NicLink(nic=place.nic, device=matrix.devices[place.chip], kind=place.kind, by_tool=True)
        for matrix in matrices
        for place in matrix.topology.nics
        if place.nic in ports and place.chip in matrix.devices
    )


def find_device_ports(
    spec: HostSpec,
    answer: Answer,
    vendors: Mapping[str, Vendor],
    devices: Sequence[Device],
) -> tuple[DevicePort, ...]:
    """Return the ports inside devices that the host offers."""
    found = []
    for section in ports_sections(spec, vendors):
        mine = {d.vendor_index: d.index for d in devices if d.vendor == section.vendor}
        for port in read_ports(answer.section(section.section).stdout):
            if port.chip in mine:
                index = mine[port.chip]
                found.append(DevicePort(device=index, address=port.address, up=port.up))
    return tuple(found)


def port_warnings(ports: Sequence[DevicePort]) -> list[str]:
    """Say which ports inside devices cannot be used."""
    warnings = []
    down = [str(port.device) for port in ports if port.up is False]
    if down:
        what = f"RoCE port inside device {some(down)}: link down"
        warnings.append(f"{what}; look at its cable, optical module and switch port")
    bare = [str(port.device) for port in ports if port.address is None]
    if bare:
        what = f"RoCE port inside device {some(bare)}: no address"
        warnings.append(f"{what}; set one (hccn_tool -i N -ip -s address A netmask M)")
    return warnings


def rdma_warnings(rdma: Sequence[RdmaNic], max_locked_bytes: int | None) -> list[str]:
    """Say what keeps RDMA ports from being used."""
    warnings = []
    down = [f"{nic.device}/{nic.port}" for nic in rdma if not nic.active]
    if down:
        warnings.append(
            f"RDMA: {', '.join(down[:8])} not active; look at its cable and switch port"
        )
    lost = [
        f"{nic.device}/{nic.port}"
        for nic in rdma
        if nic.active and nic.link_layer == "Ethernet" and nic.gid_index is None
    ]
    if lost:
        what = f"RDMA: {', '.join(lost[:8])} has no RoCE v2 address"
        warnings.append(f"{what}; give its network interface an IP address")
    if rdma and max_locked_bytes is not None and 0 <= max_locked_bytes < MIN_LOCKED_BYTES:
        what = f"RDMA: processes may lock {max_locked_bytes >> 10} KiB of memory only"
        warnings.append(f"{what}; set `ulimit -l unlimited` (limits.conf, or --ulimit memlock=-1)")
    return warnings
