"""Where a vendor's tool, the PCI bus and the device nodes do not agree: said with the lost address and the next step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from hetrun.probe.answer import Answer, plain
from hetrun.vendors import FoundDevice, ToolAnswer, ToolError, Vendor

MAX_NAMED = 8
_PCI_LINE = re.compile(r"([0-9a-f:.]{4,20}) 0x([0-9a-f]{4}) 0x([0-9a-f]{4}) 0x([0-9a-f]{6})")

# Of a tool on a host whose bus shows no accelerator at all, these say nothing new: nothing is there.
_NO_NEWS = (ToolError.TOOL_MISSING, ToolError.NO_DEVICES, ToolError.TOOL_USAGE)


def pci_functions(answer: Answer) -> Iterator[tuple[str, str, str, str]]:
    """Yield (bus id, vendor id, device id, class) of all functions on the PCI bus."""
    for line in answer.section("pci").lines:
        if match := _PCI_LINE.fullmatch(line.strip().lower()):
            bus_id, maker, device_id, kind = match.groups()
            yield bus_id, maker, device_id, kind


def tool_warnings(
    vendor: Vendor,
    best: ToolAnswer,
    words: str | None,
    *,
    functions: Mapping[str, str],
    found: Sequence[FoundDevice],
    is_only_clue: bool,
) -> list[str]:
    """Say what a tool complains about, and which devices of the bus it does not show.

    `is_only_clue`: nothing else on the host speaks of an accelerator.
    """
    warnings: list[str] = []
    missing = best.error is ToolError.TOOL_MISSING
    is_heard = bool(functions) or (bool(best.devices) and not missing)
    if best.error is not None and (is_heard or (is_only_clue and best.error not in _NO_NEWS)):
        said = f" (it says: {words})" if words and not missing else ""
        tools = " or ".join(vendor.tools)
        warnings.append(f"{vendor.title}: {tools}: {best.error}{said}; {best.error.hint}")
    shown = {item.bus_id for item in found if item.bus_id}
    lost = [bus_id for bus_id in functions if bus_id not in shown]
    num_unnamed = sum(item.bus_id is None for item in found)
    if functions and len(lost) > num_unnamed:
        where = f"; not shown: {some(lost)}" if shown or not found else ""
        warnings.append(
            f"{vendor.title}: {len(functions)} on the PCI bus, {len(found)} in its tool{where}"
        )
    return warnings


def bus_warnings(vendor: Vendor, answer: Answer, found: Sequence[FoundDevice]) -> list[str]:
    """Say which devices of a tool are not on the bus, where the bus can be seen at all."""
    on_bus = {bus_id for bus_id, _, _, _ in pci_functions(answer)}
    if vendor.partitions_by_function:
        on_bus |= {item.bus_id for item in found if item.bus_id and first(item.bus_id) in on_bus}
    ghosts = sorted({item.bus_id for item in found if item.bus_id} - on_bus)
    if not on_bus or not ghosts:
        return []
    what = f"{vendor.title}: its tool shows {some(ghosts)}, which the PCI bus does not"
    return [f"{what}; is this a container with another view of /sys?"]


def node_warnings(vendor: Vendor, answer: Answer, found: Sequence[FoundDevice]) -> list[str]:
    """Say which device nodes this user cannot open, or that there are too few or none."""
    if not vendor.device_nodes:
        return []
    nodes = matching_nodes(answer, vendor.device_nodes)
    if not nodes:
        patterns = ", ".join(vendor.device_nodes)
        return [
            f"{vendor.title}: no device node ({patterns}); is the driver loaded, the container given it?"
        ]
    warnings = []
    closed = [
        plain(f"{path} ({words[1]} {words[3]} {words[4]})", max_chars=100) or ""
        for path, words in nodes.items()
        if words[0] == "closed"
    ]
    if closed:
        what = f"{vendor.title}: this user may not open {some(closed)}"
        warnings.append(f"{what}; add it to that group")
    numbered = [node for node in vendor.device_nodes if "[0-9]" in node and "/dri/" not in node]
    num_nodes = sum(any(fnmatchcase(path, node) for node in numbered) for path in nodes)
    num_boards = len({item.bus_id or item.index for item in found})
    if numbered and num_nodes < num_boards:
        what = f"{vendor.title}: {num_boards} in its tool, {num_nodes} device nodes"
        warnings.append(f"{what}; give the container all of them, or load the driver again")
    return warnings


def first(bus_id: str) -> str:
    """Return the address of function 0 of the same PCI device."""
    return f"{bus_id.rpartition('.')[0]}.0"


def matching_nodes(answer: Answer, patterns: Sequence[str]) -> dict[str, list[str]]:
    """Return path -> words of the line (open or closed, then `ls -l`) of the device nodes that match."""
    nodes: dict[str, list[str]] = {}
    for line in answer.section("nodes").lines:
        words = line.split()
        if len(words) >= 6 and any(fnmatchcase(words[-1], pattern) for pattern in patterns):
            nodes[words[-1]] = words
    return nodes


def some(names: Sequence[str]) -> str:
    """Join the first names; an ellipsis stands for the others."""
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
