"""Devices that are split: MIG instances are offered in place of their GPU, partitions that share memory get shares of it.

What a tool prints about its partitions is read in `vendors/`. That slices exist and are not offered is said, never silence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hetrun.model import Device, Quantity, Source
from hetrun.probe.answer import Answer, plain
from hetrun.probe.doubts import matching_nodes, some
from hetrun.vendors import FoundDevice, Partition, Vendor

# [compute instance "1c."] slices of the GPU "2g." and memory "20gb", then marks such as "+me"
_PROFILE = re.compile(r"(?:([0-9])c\.)?([0-9])g\.([0-9]{1,4})gb(?:[+-][a-z.]{1,12})?")
_GB = 10**9  # the lower reading: a 10gb instance of an H100 shows 9.5 GiB or more
_SAME = 0.02  # shares of one memory differ less


def complete(
    devices: Sequence[FoundDevice], others: Sequence[FoundDevice]
) -> tuple[FoundDevice, ...]:
    """Return the devices with the partitions that other answers of the same tool know of.

    An answer is about the same device where the uuid is the same, or the number if either tells no uuid.
    """
    return tuple(_completed(device, [o for o in others if _same(device, o)]) for device in devices)


def _same(a: FoundDevice, b: FoundDevice) -> bool:
    return a.uuid == b.uuid if a.uuid and b.uuid else a.index == b.index


def _completed(device: FoundDevice, others: Sequence[FoundDevice]) -> FoundDevice:
    every = (device, *others)
    best = max(every, key=lambda item: sum(part.uuid is not None for part in item.partitions))
    return replace(
        device,
        partitions=best.partitions or next((o.partitions for o in others if o.partitions), ()),
        partition_bytes=next((o.partition_bytes for o in every if o.partition_bytes), ()),
        sliced=any(item.sliced for item in every),
    )


def instances(whole: Device, found: FoundDevice) -> tuple[Device, ...]:
    """Return the MIG instances of a GPU as devices; those whose uuid is not told cannot be selected."""
    told = dict(found.partition_bytes)
    return tuple(
        replace(
            whole,
            model=plain(f"{whole.model} MIG {part.profile or 'instance'}", max_chars=64),
            memory=_memory(part, told.get(part.ordinal)),
            uuid=plain(part.uuid, max_chars=120),
            visible_id=plain(part.uuid, max_chars=120),
            vendor_index=None,  # the tool numbers GPUs
        )
        for part in found.partitions
        if part.uuid is not None
    )


def _memory(part: Partition, told_bytes: int | None) -> Quantity:
    """Return what the tool tells, else what the profile's name says.

    Compute instances share their GPU instance's memory: each gets a share as large as its share of the slices.
    """
    named = _PROFILE.fullmatch((part.profile or "").lower())
    if named is not None and named[1] and int(named[2]):
        num_bytes = int(named[3]) * _GB * int(named[1]) // int(named[2])
        why = "its share of the memory that its profile's name says"
        return Quantity(value=num_bytes or None, source=Source.ASSUMED, why=why)
    if told_bytes:
        return Quantity(value=told_bytes, source=Source.MEASURED)
    if named is not None and int(named[3]):
        why = "as its profile's name says"
        return Quantity(value=int(named[3]) * _GB, source=Source.ASSUMED, why=why)
    return Quantity(value=None, source=Source.ASSUMED, why="its tool does not tell")


def instance_warnings(vendor: Vendor, found: Sequence[FoundDevice]) -> list[str]:
    """Say which split devices offer nothing, and what several instances of one GPU cannot do."""
    split = [item for item in found if item.partitions or item.sliced]
    usable = [sum(part.uuid is not None for part in item.partitions) for item in split]
    warnings = []
    if num_idle := usable.count(0):
        what = f"{num_idle} of {len(found)} devices are split into partitions and not offered"
        warnings.append(
            f"{vendor.title}: {what}: the tool names none that can be selected; make instances, "
            "or switch partitioning off"
        )
    if any(number > 1 for number in usable):
        what = f"{vendor.title}: {max(usable)} instances of one device"
        warnings.append(f"{what}: {vendor.instances_note}" if vendor.instances_note else what)
    return warnings


def with_shares(
    vendor: Vendor, devices: Sequence[Device]
) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """Give partitions that are functions of one PCI device, and each show all of its memory, a share of it.

    Where the chip's size is known and the partitions together show no more, the tool has divided already.
    """
    if not vendor.partitions_by_function:
        return tuple(devices), ()
    boards = Counter(board for item in devices if (board := _board(item)))
    found: list[Device] = []
    shared: set[str] = set()
    for item in devices:
        board, size = _board(item), item.memory.value
        count = boards[board] if board else 1
        chip = vendor.find_model(item.model)
        whole_bytes = chip.memory_bytes if chip else None
        is_all = size and not (whole_bytes and count * size <= whole_bytes * (1 + _SAME))
        if board and count > 1 and is_all:
            shared.add(board)
            why = f"one of {count} partitions that each show the memory of all"
            share = Quantity(value=int(size or 0) // count, source=Source.ASSUMED, why=why)
            item = replace(item, memory=share)
        found.append(item)
    if not shared:
        return tuple(found), ()
    what = f"{vendor.title}: partitions of {some(sorted(shared))} each show the memory of all"
    return tuple(found), (f"{what}; each is offered with an equal share of it",)


def _board(device: Device) -> str | None:
    """Return the PCI address without its function."""
    return device.bus_id.rpartition(".")[0] if device.bus_id else None


def part_warnings(vendor: Vendor, answer: Answer, found: Sequence[FoundDevice]) -> list[str]:
    """Say which smaller parts of devices are there and not offered one by one."""
    warnings = []
    nodes = matching_nodes(answer, vendor.slice_nodes)
    if nodes:
        what = f"{vendor.title}: virtual devices {some(list(nodes))} are there and not offered"
        warnings.append(f"{what}; give them to a container, and list that as a host")
    tiles = sorted({item.tiles for item in found if item.tiles and item.tiles > 1})
    if tiles:
        words = " or ".join(map(str, tiles))
        warnings.append(
            f"{vendor.title}: devices of {words} tiles are offered whole, not by tile; one rank drives all tiles"
        )
    cores = sorted({item.cores for item in found if item.cores and item.cores > 1})
    if cores and vendor.visible_devices_id == "cores":
        words = " or ".join(map(str, cores))
        warnings.append(f"{vendor.title}: devices of {words} cores are offered whole, not by core")
    return warnings
