"""Vendor tools' answers, the PCI bus and device nodes -> the devices that a host offers. Reading a tool is left to `vendors/`.

The PCI bus is the anchor: a device that it shows and no tool offers is a warning that names it, never silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetrun.model import Device, HostSpec, Quantity, Source
from hetrun.probe.answer import Answer, last_line, plain
from hetrun.probe.doubts import (
    bus_warnings,
    first,
    node_warnings,
    pci_functions,
    tool_warnings,
)
from hetrun.probe.links import numa_nodes
from hetrun.probe.script import CPU, tool_sections
from hetrun.probe.slices import (
    complete,
    instance_warnings,
    instances,
    part_warnings,
    with_shares,
)
from hetrun.probe.system import find_sdks
from hetrun.vendors import FoundDevice, ToolAnswer, ToolError, Vendor, read_tool

MAX_DEVICES = 512
UNKNOWN_MODEL = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a host offers, and what is wrong with it."""

    devices: tuple[Device, ...] = ()
    warnings: tuple[str, ...] = ()
    is_bare: bool = False  # neither a tool nor the bus shows any


def emulated_devices(spec: HostSpec) -> tuple[Device, ...]:
    """Return the devices that a host plays."""
    chips = [chip for chip in spec.emulate for _ in range(chip.num_devices)]
    return tuple(
        Device(
            index=index,
            vendor=chip.vendor,
            model=chip.model,
            memory=Quantity(value=chip.memory_bytes, source=Source.MODELLED),
            emulated=chip,
        )
        for index, chip in enumerate(chips)
    )


def cpu_devices(
    spec: HostSpec, *, model: str | None, memory_bytes: int | None
) -> tuple[Device, ...]:
    """Return equal shares of the processor."""
    share = memory_bytes // spec.cpu_devices or None if memory_bytes else None
    why = f"one of {spec.cpu_devices} equal shares of the host's memory"
    source = Source.ASSUMED if share is None else Source.MEASURED
    return tuple(
        Device(
            index=index,
            vendor=CPU,
            model=model or UNKNOWN_MODEL,
            memory=Quantity(value=share, source=source, why=why if share else "no /proc/meminfo"),
        )
        for index in range(spec.cpu_devices)
    )


def accelerators(
    spec: HostSpec, answer: Answer, vendors: Mapping[str, Vendor], *, memory_bytes: int | None
) -> Found:
    """Return the accelerators of a host, in the order of vendors' names and their tools' numbers."""
    bus = _on_bus(answer, vendors)
    sdks, nodes = find_sdks(answer), numa_nodes(answer)
    owner = {bus_id: name for name, functions in bus.items() for bus_id in functions}
    devices: list[Device] = []
    warnings: list[str] = []
    for name, vendor in sorted(vendors.items()):
        if name == CPU or not vendor.probe_commands:
            continue
        functions = bus.get(name, {})
        best, words, told = _best(spec, answer, vendor)
        sdk = " ".join(filter(None, (told, sdks.get(name)))) or None
        # A look-alike tool may list another vendor's devices: the bus knows whose they are.
        found = [item for item in best.devices if owner.get(item.bus_id or "", name) == name]
        unified_bytes = memory_bytes if best.memory_fallback else None
        offered: list[Device] = []
        for item in found:
            place = _place(item.bus_id, vendor, functions)
            device = _device(
                item,
                vendor,
                device_id=functions.get(place),
                unified_bytes=unified_bytes,
                sdk=sdk,
                numa_node=nodes.get(place),
            )
            is_split = item.partitions or item.sliced
            offered += instances(device, item) if is_split else (device,)
        shares, told_shares = with_shares(vendor, offered)
        devices += shares
        is_only_clue = not bus and not devices
        warnings += tool_warnings(
            vendor, best, words, functions=functions, found=found, is_only_clue=is_only_clue
        )
        warnings += [*instance_warnings(vendor, found), *told_shares]
        if functions or found:
            warnings += part_warnings(vendor, answer, found)
            warnings += bus_warnings(vendor, answer, found)
            warnings += node_warnings(vendor, answer, found)
    if len(devices) > MAX_DEVICES:
        warnings.append(f"{len(devices)} devices; only the first {MAX_DEVICES} are offered")
    numbered = [replace(device, index=index) for index, device in enumerate(devices[:MAX_DEVICES])]
    is_bare = not devices and not bus
    return Found(devices=tuple(numbered), warnings=tuple(warnings), is_bare=is_bare)


def _place(bus_id: str | None, vendor: Vendor, functions: Mapping[str, str]) -> str:
    """Return the address under which the bus knows a device: that of its board for a partition."""
    if bus_id and vendor.partitions_by_function and bus_id not in functions:
        return first(bus_id)
    return bus_id or ""


def _on_bus(answer: Answer, vendors: Mapping[str, Vendor]) -> dict[str, dict[str, str]]:
    """Return vendor -> bus id -> device id of all accelerators on the PCI bus."""
    found: dict[str, dict[str, str]] = {}
    for bus_id, maker, device_id, kind in pci_functions(answer):
        for name, vendor in vendors.items():
            if vendor.pci_ids.is_accelerator(maker, device_id, kind):
                found.setdefault(name, {})[bus_id] = device_id
                break
    return found


def _best(
    spec: HostSpec, answer: Answer, vendor: Vendor
) -> tuple[ToolAnswer, str | None, str | None]:
    """Return the answer of a vendor's commands that tells most, the tool's last words, and the SDK any of them names.

    Devices count more than no devices, no error more than an error, any error more than a missing tool.
    """
    best = ToolAnswer(error=ToolError.TOOL_MISSING)
    best_rank = (False, False, False)
    words = None
    sdk: dict[str, str] = {}
    every: list[FoundDevice] = []
    for tool in tool_sections(spec, {vendor.name: vendor}):
        section = answer.section(tool.section)
        if section.rc is None:
            continue
        read = read_tool(
            vendor.name,
            tool.command.command,
            stdout=section.stdout,
            stderr=section.stderr,
            rc=section.rc,
        )
        sdk |= read.sdk
        every += read.devices
        missing = read.error is ToolError.TOOL_MISSING
        rank = (bool(read.devices), read.error is None, not missing)
        if rank > best_rank:
            best, best_rank = read, rank
            words = last_line(section.stderr) or last_line(section.stdout)
    told = " ".join(f"{key} {value}" for key, value in sdk.items())
    best = replace(best, devices=complete(best.devices, every))
    return best, words, plain(told, max_chars=96)


def _device(
    found: FoundDevice,
    vendor: Vendor,
    *,
    device_id: str | None,
    unified_bytes: int | None,
    sdk: str | None,
    numa_node: int | None,
) -> Device:
    """Return a tool's device as a fact; what the tool does not tell comes from published tables, and says so."""
    listed = vendor.pci_ids.devices.get(device_id or "")
    model = plain(found.model, max_chars=64) or listed or UNKNOWN_MODEL
    chip = vendor.find_model(found.model) or vendor.find_model(listed)
    if found.memory_bytes:  # none at all is no size
        memory = Quantity(value=found.memory_bytes, source=Source.MEASURED)
    elif unified_bytes:
        why = "the device shares the host's memory"
        memory = Quantity(value=unified_bytes, source=Source.ASSUMED, why=why)
    elif chip is not None and chip.memory_bytes is not None:
        memory = Quantity(value=chip.memory_bytes, source=Source.SPEC, why=f"as {chip.name} has it")
    else:
        memory = Quantity(value=None, source=Source.ASSUMED, why="its tool does not tell")
    return Device(
        index=0,
        vendor=vendor.name,
        model=model,
        memory=memory,
        vendor_index=found.index,
        driver=plain(found.driver, max_chars=64),
        bus_id=plain(found.bus_id, max_chars=32),
        uuid=plain(found.uuid, max_chars=96),
        visible_id=plain(found.visible_id, max_chars=96),
        sdk=sdk,
        numa_node=numa_node,
    )
