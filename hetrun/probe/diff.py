"""What changed between two probes of an inventory: hosts, devices, software, links, warnings. Pure.

What changes by itself (clock, free disk, a container's memory by less than a hundredth) is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from hetrun.model import Device, Facts, HostFacts, Nic, RdmaNic

MEMORY_SHARE = 0.01  # the kernel's total moves a little from boot to boot


class ChangeKind(str, Enum):
    """Which way a fact went."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One line of a comparison, such as host a1, changed, "torch 2.5.1 -> 2.6.0"."""

    kind: ChangeKind
    host: str
    what: str


def compare(old: Facts, new: Facts) -> tuple[Change, ...]:
    """Return all changes, hosts in the order of the new facts, then those that are gone."""
    before = {host.spec.name: host for host in old.hosts}
    after = {host.spec.name: host for host in new.hosts}
    found: list[Change] = []
    for name, host in after.items():
        if name in before:
            found += _host(before[name], host)
        else:
            what = host.error or _counted(host)
            found.append(Change(kind=ChangeKind.ADDED, host=name, what=f"new host: {what}"))
    for name, host in before.items():
        if name not in after:
            what = f"no longer in the inventory; had {_counted(host)}"
            found.append(Change(kind=ChangeKind.REMOVED, host=name, what=what))
    return tuple(found)


def _host(old: HostFacts, new: HostFacts) -> Iterator[Change]:
    name = new.spec.name
    if new.error is not None:
        if new.error != old.error:
            what = f"answers no longer: {new.error}" if old.error is None else new.error
            yield Change(kind=ChangeKind.CHANGED, host=name, what=what)
        return
    if old.error is not None:
        what = f"answers again: {_counted(new)}"
        yield Change(kind=ChangeKind.CHANGED, host=name, what=what)
        return
    for text in _software(old, new):
        yield Change(kind=ChangeKind.CHANGED, host=name, what=text)
    yield from _devices(name, old.devices, new.devices)
    yield from _ports(name, old, new)
    for kind, sign, warnings in (
        (ChangeKind.ADDED, "new", set(new.warnings) - set(old.warnings)),
        (ChangeKind.REMOVED, "gone", set(old.warnings) - set(new.warnings)),
    ):
        for warning in sorted(warnings):
            yield Change(kind=kind, host=name, what=f"warning {sign}: {warning}")


def _counted(host: HostFacts) -> str:
    kinds: dict[str, int] = {}
    for device in host.devices:
        kind = f"{device.vendor} {device.model or 'unknown model'}"
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "no device"


def _software(old: HostFacts, new: HostFacts) -> Iterator[str]:
    """Yield what is told of the host as a whole."""
    fields: tuple[tuple[str, Callable[[HostFacts], object]], ...] = (
        ("kernel", lambda host: host.kernel),
        ("processor", lambda host: host.cpu_model),
        ("cores", lambda host: host.num_cores),
        ("Python", lambda host: host.python_version),
        ("torch", lambda host: host.torch_version or host.torch_error),
        ("GPUDirect", lambda host: ", ".join(host.peer_memory)),
        ("open files", lambda host: host.max_open_files),
        ("locked memory", lambda host: host.max_locked_bytes),
    )
    for what, read in fields:
        if read(old) != read(new):
            yield f"{what} {_word(read(old))} -> {_word(read(new))}"
    if _moved(old.memory_bytes, new.memory_bytes):
        yield f"memory {_gib(old.memory_bytes)} -> {_gib(new.memory_bytes)}"


def _devices(host: str, old: Sequence[Device], new: Sequence[Device]) -> Iterator[Change]:
    """Yield devices that came and went, and what changed about those that stayed."""
    shared = _shared_places(old) | _shared_places(new)
    before, after = _by_key(old, shared), _by_key(new, shared)
    for key in [*after, *(key for key in before if key not in after)]:
        was, now = before.get(key), after.get(key)
        if was is None and now is not None:
            yield Change(kind=ChangeKind.ADDED, host=host, what=f"new device: {_named(now)}")
        elif now is None and was is not None:
            yield Change(kind=ChangeKind.REMOVED, host=host, what=f"device gone: {_named(was)}")
        elif was is not None and now is not None:
            for text in _device(was, now):
                yield Change(kind=ChangeKind.CHANGED, host=host, what=f"{_named(now)}: {text}")


def _shared_places(devices: Sequence[Device]) -> set[tuple[str, str | None]]:
    """Return the places on the bus where several chips of one board sit."""
    counts = Counter((device.vendor, device.bus_id) for device in devices)
    return {place for place, count in counts.items() if count > 1}


def _by_key(
    devices: Sequence[Device], shared: set[tuple[str, str | None]]
) -> dict[tuple[object, ...], Device]:
    """Name a device by what stays with it: its uuid, else its place on the bus, else its number.

    The vendor's own number tells chips apart that share a place.
    """
    found: dict[tuple[object, ...], Device] = {}
    for device in devices:
        number = device.index if device.vendor_index is None else device.vendor_index
        place: object = device.bus_id
        if place is None or (device.vendor, device.bus_id) in shared:
            place = (device.bus_id, number)
        found[(device.vendor, device.uuid or place)] = device
    return found


def _device(old: Device, new: Device) -> Iterator[str]:
    pairs = (
        ("model", old.model, new.model),
        ("driver", old.driver, new.driver),
        ("SDK", old.sdk, new.sdk),
        ("bus address", old.bus_id, new.bus_id),
        ("number", old.vendor_index, new.vendor_index),
    )
    for what, was, now in pairs:
        if was != now:
            yield f"{what} {_word(was)} -> {_word(now)}"
    if old.memory.value != new.memory.value:
        yield f"memory {_gib(old.memory.value)} -> {_gib(new.memory.value)}"


def _ports(host: str, old: HostFacts, new: HostFacts) -> Iterator[Change]:
    """Yield changes of interfaces with an address, of RDMA ports and of ports inside devices."""
    before = {**_nics(old.nics), **_rdma(old.rdma), **_inside(old)}
    after = {**_nics(new.nics), **_rdma(new.rdma), **_inside(new)}
    for name in [*after, *(name for name in before if name not in after)]:
        was, now = before.get(name), after.get(name)
        if was == now:
            continue
        kind = ChangeKind.CHANGED
        if was is None or now is None:
            kind = ChangeKind.ADDED if was is None else ChangeKind.REMOVED
        yield Change(kind=kind, host=host, what=f"{name}: {_word(was)} -> {_word(now)}")


def _nics(nics: Sequence[Nic]) -> dict[str, str]:
    found = {}
    for nic in nics:
        if nic.addresses:
            speed = "" if nic.speed_mbps is None else f", {nic.speed_mbps} Mbit/s"
            mtu = "" if nic.mtu is None else f", MTU {nic.mtu}"
            state = "" if nic.up else ", down"
            found[nic.name] = " ".join(nic.addresses) + speed + mtu + state
    return found


def _rdma(ports: Sequence[RdmaNic]) -> dict[str, str]:
    found = {}
    for port in ports:
        parts = [port.link_layer or "RDMA", "active" if port.active else "down"]
        if port.rate_gbps is not None:
            parts.append(f"{port.rate_gbps:g} Gbit/s")
        if port.gid_index is not None:
            parts.append(f"gid {port.gid_index} {port.addr}")
        found[f"{port.device}/{port.port}"] = ", ".join(parts)
    return found


def _inside(host: HostFacts) -> dict[str, str]:
    states = {True: "up", False: "down", None: "state not told"}
    return {
        f"RoCE inside device {port.device}": f"{port.address or 'no address'}, {states[port.up]}"
        for port in host.device_ports
    }


def _named(device: Device) -> str:
    where = device.bus_id or f"number {device.index}"
    return f"{device.vendor} {device.model or 'unknown model'} at {where}"


def _moved(old: int | None, new: int | None) -> bool:
    if old is None or new is None:
        return old is not new
    return abs(new - old) > MEMORY_SHARE * old


def _gib(num_bytes: float | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / (1 << 30):.1f} GiB"


def _word(value: object) -> str:
    return "unknown" if value is None or value == "" else str(value)
