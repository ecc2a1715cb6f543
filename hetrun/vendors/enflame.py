"""Enflame GCUs, as `efsmi` shows them: JSON of newer tools, `-q` text, or a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.blocks import complete_lines, read_blocks
from hetrun.vendors._read.boxes import banner
from hetrun.vendors._read.jsontext import documents, inside, items
from hetrun.vendors._read.pairs import read_pairs
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor

_DEVICE = re.compile(r"([0-9]{1,3})\s{1,20}(\S.{0,60})")
_MEMORY = re.compile(r"\b([0-9]{1,9}\s{0,2}[KMG]i?B)\b")
_SECTIONS = ("device info", "pcie info", "device mem info")


def parse(run: ToolRun) -> ToolAnswer:
    """Read `-q --json-format`, `-q` or the plain table."""
    return _json(run) or _text(run) or _table(run) or ToolAnswer()


def _json(run: ToolRun) -> ToolAnswer | None:
    for document in documents(run):
        listed = inside(document, "devices")
        if isinstance(listed, list):
            numbered = [(text.index(item.get("id")), _flat(item)) for item in items(listed)]
            return _answer(numbered, None, len(listed))
    return None


def _flat(item: Mapping[str, object]) -> dict[str, str]:
    """Write {'Device Mem Info': {'Total Size': 1}} as {'device mem info/total size': '1'}."""
    found: dict[str, str] = {}
    for section, inner in item.items():
        for key, value in inner.items() if isinstance(inner, dict) else ():
            found[f"{section.strip().lower()}/{key.strip().lower()}"] = str(value)
    return found


def _text(run: ToolRun) -> ToolAnswer | None:
    """Read blocks 'DEV ID 0'. Sizes repeat under BAR1 and BAR2: only the memory's own section counts."""
    _, blocks = read_blocks(complete_lines(run), "DEV ID ")
    if not blocks:
        return None
    numbered = [(text.index(block.title[len("DEV ID ") :]), block.pairs) for block in blocks]
    known = [section for section in _SECTIONS if _section(blocks[0].pairs, section)]
    if run.words and not run.has("-d"):
        known = list(_SECTIONS)  # all of them were asked for
    whole = [
        (number, pairs)
        for number, pairs in numbered
        if all(_section(pairs, section) for section in known)
    ]
    return _answer(whole, None, len(numbered))


def _section(pairs: Mapping[str, str], section: str) -> bool:
    return any(key.startswith(section + "/") for key in pairs)


def _answer(
    numbered: Sequence[tuple[int | None, Mapping[str, str]]], driver: str | None, num_told: int
) -> ToolAnswer:
    if num_told == 0:
        return ToolAnswer(error=ToolError.NO_DEVICES)
    devices = [_device(number, pairs, driver) for number, pairs in numbered if number is not None]
    warnings = ["model_unknown"] if any(device.model is None for device in devices) else []
    if any(device.memory_bytes is None for device in devices):
        warnings.append("memory_unknown")
    broken = len(devices) < num_told
    return ToolAnswer(
        devices=tuple(devices),
        error=ToolError.PARTIAL_DEVICE_ERROR if broken else None,
        warnings=tuple(warnings),
    )


def _device(number: int, pairs: Mapping[str, str], driver: str | None) -> FoundDevice:
    pci = [pairs.get(f"pcie info/{key}", "") for key in ("domain", "bus", "dev", "func")]
    size = pairs.get("device mem info/total size", pairs.get("device mem info/mem size"))
    return FoundDevice(
        index=number,
        model=text.name(pairs.get("device info/dev name")),
        memory_bytes=text.memory(size, "MiB"),
        driver=text.version(pairs.get("driver info/ver")) or driver,
        bus_id=text.bdf(f"{pci[0]}:{pci[1]}:{pci[2]}.{pci[3].lstrip('0') or '0'}"),
        uuid=text.value(pairs.get("device info/dev uuid")),
    )


def _table(run: ToolRun) -> ToolAnswer | None:
    """Read pairs of lines 'number name | firmware | bus ECC' and '.. | memory .. | ..'."""
    driver = banner(run.lines, "Driver Ver:")
    return read_pairs(
        run.lines,
        is_first=lambda row: (
            len(row) == 3 and _DEVICE.fullmatch(row[0]) is not None and text.bdf(row[2]) is not None
        ),
        join=lambda above, below: _joined(above, below, driver),
    )


def _joined(
    above: Sequence[str], below: Sequence[str] | None, driver: str | None
) -> FoundDevice | None:
    named = _DEVICE.fullmatch(above[0])
    memory = _MEMORY.search(below[1]) if below is not None and len(below) == len(above) else None
    if named is None or memory is None:
        return None
    return FoundDevice(
        index=int(named[1]),
        model=text.name(named[2]),
        memory_bytes=text.memory(memory[1]),
        driver=driver,
        bus_id=text.bdf(above[2]),
    )


_NONE = Confidence.UNKNOWN

VENDOR = Vendor(
    name="enflame",
    title="Enflame",
    parse=parse,
    tools=("efsmi",),
    probe_commands=(ProbeCommand("efsmi -q", ("/usr/bin",)), ProbeCommand("efsmi", ("/usr/bin",))),
    torch_device="gcu",
    torch_plugin="torch_gcu",
    collective_backend="eccl",
    collective_family="eccl",
    visible_devices_env="TOPS_VISIBLE_DEVICES",
    container_devices_env=("ENFLAME_VISIBLE_DEVICES", "TENCENT_VISIBLE_DEVICES"),
    pci_ids=PciIds(
        vendors=("1e36",),
        company="enflame",
        devices={
            "0021": "T20",
            "0022": "T20",
            "0023": "T21",
            "0024": "T21",
            "8001": "I20",
            "c031": "S30",
            "c032": "S90",
            "c033": "S60G",
            "c035": "S60",
            "c041": "L300",
            "c042": "L600",
        },
    ),
    device_nodes=("/dev/gcu[0-9]*",),
    kernel_modules=("enflame",),
    sdk_roots=("/opt/tops",),
    models=(
        Chip("S60", ("s60", "zixiaoc200"), 49120, None, None, _NONE, "memory with ECC off"),
        Chip("S60G", ("s60g",), None, None, None, _NONE, "not published"),
        Chip("L300", ("l300",), 147456, None, None, _NONE, "memory from tool output"),
        Chip("L600", ("l600",), None, None, None, _NONE, "not published"),
    ),
    unverified=("device_nodes", "kernel_modules", "sdk_roots"),
    notes=(
        "S60 shows 49120 MiB with ECC off and 42976 MiB with ECC on.",
        "A cloud calls the S60 ZIXIAOC200: same chip.",
    ),
)
