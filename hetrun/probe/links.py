"""What joins devices to each other and to the network: RDMA ports, GPUDirect modules, the tools' matrices.

Which of it a run uses is left to launch and to the collective libraries; what is not told stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hetrun.model import Device, DeviceLink, HostSpec, RdmaNic
from hetrun.probe.answer import Answer, plain
from hetrun.probe.script import topology_sections
from hetrun.vendors import Vendor, read_topology, rocev2_gids

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


def find_device_links(
    spec: HostSpec,
    answer: Answer,
    vendors: Mapping[str, Vendor],
    devices: Sequence[Device],
) -> tuple[DeviceLink, ...]:
    """Return what the vendors' tools say of pairs of devices that the host offers."""
    found: list[DeviceLink] = []
    for section in topology_sections(spec, vendors):
        output = answer.section(section.section)
        mine = {
            device.vendor_index: device.index
            for device in devices
            if device.vendor == section.vendor and device.emulated is None
        }
        if output.rc != 0 or len(mine) < 2:
            continue
        for link in read_topology(output.stdout):
            if link.a in mine and link.b in mine:
                found.append(DeviceLink(a=mine[link.a], b=mine[link.b], kind=link.kind))
    return tuple(found)


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
