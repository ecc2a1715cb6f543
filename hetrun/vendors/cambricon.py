"""Cambricon MLUs, as `cnmon` shows them. Its JSON goes to a file in the working directory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.blocks import Block, complete_lines, read_blocks
from hetrun.vendors._read.boxes import PAIR, banner
from hetrun.vendors._read.jsontext import documents, inside, items
from hetrun.vendors._read.pairs import read_pairs
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor

_CARD = re.compile(r"([0-9]{1,3})\s{1,12}(\S{1,12})\s{1,12}(\S{1,40})\s{1,30}(v?[0-9]\S{0,20})")
_IN_ROW = re.compile(r"\bv([0-9]{1,3}\.[0-9.]{1,20})\b")


def parse(run: ToolRun) -> ToolAnswer:
    """Read cnmon_info.json, the table, or `cnmon info` text."""
    return _json(run) or _table(run) or _text(run) or ToolAnswer()


def _json(run: ToolRun) -> ToolAnswer | None:
    for document in documents(run):
        cards = inside(document, "CnmonInfo")
        if not isinstance(cards, list):
            continue
        devices = [device for card in items(cards) if (device := _json_device(card))]
        if not cards:
            return ToolAnswer(error=ToolError.NO_DEVICES)
        broken = len(devices) < len(cards)
        return ToolAnswer(
            devices=tuple(devices),
            error=ToolError.PARTIAL_DEVICE_ERROR if broken else None,
            warnings=_warnings(devices),
        )
    return None


def _warnings(devices: Sequence[FoundDevice]) -> tuple[str, ...]:
    unknown = any(device.memory_bytes is None for device in devices)
    return ("memory_unknown",) if unknown else ()


def _json_device(card: Mapping[str, object]) -> FoundDevice | None:
    number = text.index(card.get("CardNum", card.get("Slot")))
    if number is None:
        return None
    pci = [
        str(inside(card, "PCI", key) or "0") for key in ("DomainID", "Bus", "Device", "Function")
    ]
    address = f"{pci[0].zfill(4)}:{pci[1].zfill(2)}:{pci[2].zfill(2)}.{pci[3]}"
    driver = card.get("DriverVersion", card.get("Driver"))
    return FoundDevice(
        index=number,
        model=text.name(card.get("ProductName")),
        memory_bytes=text.memory(inside(card, "PhysicalMemUsage", "Total"), "MiB"),
        driver=text.version(driver.lstrip("v")) if isinstance(driver, str) else None,
        bus_id=text.bdf(address) if inside(card, "PCI", "Bus") is not None else None,
        uuid=text.value(card.get("UUID")),
    )


def _table(run: ToolRun) -> ToolAnswer | None:
    """Read pairs of lines 'card VF name firmware | bus or driver | ..' and '.. | used / total | ..'."""
    driver = (banner(run.lines, "Driver v") or "").lstrip("v") or None
    answer = read_pairs(
        run.lines,
        is_first=lambda row: len(row) >= 3 and _CARD.fullmatch(row[0]) is not None,
        join=lambda above, below: _device(above, below, driver),
        end="Process",
    )
    return answer and replace(answer, warnings=_warnings(answer.devices))


def _device(
    above: Sequence[str], below: Sequence[str] | None, driver: str | None
) -> FoundDevice | None:
    """Join the two lines. The firmware stands beside the name; v4 has the driver in the row, not the bus."""
    card = _CARD.fullmatch(above[0])
    if card is None or below is None or len(below) != len(above):
        return None
    memory = PAIR.search(below[1])
    if memory is None and not text.is_unknown(below[1]):
        return None
    in_row = _IN_ROW.search(above[1])
    return FoundDevice(
        index=int(card[1]),
        model=text.name(card[3]),
        memory_bytes=text.memory(memory[1]) if memory else None,
        driver=in_row[1] if in_row else driver,
        bus_id=text.bdf(above[1]),
    )


def _text(run: ToolRun) -> ToolAnswer | None:
    """Read `cnmon info`: blocks 'Card 0', physical and virtual memory apart."""
    _, blocks = read_blocks(complete_lines(run), "Card ")
    devices = [device for block in blocks if (device := _text_device(block))]
    if not devices:
        return None
    broken = len(devices) < len(blocks)
    return ToolAnswer(
        devices=tuple(devices),
        error=ToolError.PARTIAL_DEVICE_ERROR if broken else None,
        warnings=_warnings(devices),
    )


def _text_device(block: Block) -> FoundDevice | None:
    number = text.index(block.title.partition(" ")[2].rstrip(":"))
    model = text.name(block.get("product name"))
    physical = [key for key in block.pairs if key.startswith("physical") and key.endswith("/total")]
    if number is None or model is None:
        return None
    return FoundDevice(
        index=number,
        model=model,
        memory_bytes=text.memory(block.get(*physical)),
        driver=text.version((block.get("driver", "driver version") or "").lstrip("v")),
        uuid=text.value(block.get("uuid")),
    )


_M, _NONE = Confidence.MEDIUM, Confidence.UNKNOWN

VENDOR = Vendor(
    name="cambricon",
    title="Cambricon",
    parse=parse,
    tools=("cnmon",),
    probe_commands=(
        ProbeCommand("cnmon", ("/usr/bin",)),
        ProbeCommand(
            '( d=$(mktemp -d) && cd "$d" && cnmon info -m -j >/dev/null && cat cnmon_info.json; '
            'rc=$?; cd /; rm -rf "$d"; exit $rc )',
            ("/usr/bin",),
        ),
        ProbeCommand("cnmon info", ("/usr/bin",)),
    ),
    torch_device="mlu",
    torch_plugin="torch_mlu",
    collective_backend="cncl",
    collective_family="cncl",
    visible_devices_env="MLU_VISIBLE_DEVICES",
    container_devices_env=("CAMBRICON_VISIBLE_DEVICES",),
    pci_ids=PciIds(
        vendors=("cabc",), company="cambricon", devices={"0270": "MLU270-S4", "0370": "MLU370-S4"}
    ),
    device_nodes=("/dev/cambricon_dev[0-9]*", "/dev/cambricon_ctl"),
    kernel_modules=("cambricon_drv",),
    topology_command=ProbeCommand("cnmon topo -m", ("/usr/bin",)),
    peer_memory_modules=("cambricon_peermem",),
    sdk_roots=("/usr/local/neuware",),
    sdk_env=("NEUWARE_HOME",),
    models=(
        Chip("MLU370-X8 device", ("mlu370-x8",), 23374, 48, 0.307, _M, "press, half of a card"),
        Chip("MLU370-X4", ("mlu370-x4",), 23308, None, None, _NONE, "memory from tool output"),
        Chip("MLU370-S4", ("mlu370-s4",), None, None, None, _NONE, "not published"),
        Chip("MLU590-M9", ("mlu590-m9",), 98304, None, None, _NONE, "sources say 314 or 345"),
        Chip("MLU590-M9D", ("mlu590-m9d", "mlu590-m9dg"), 81920, None, None, _NONE, "one report"),
        Chip("MLU590-H8", ("mlu590-h8",), None, None, None, _NONE, "not published"),
    ),
    unverified=("topology_command the layout of its matrix",),
    notes=(
        "An MLU370-X8 board is two devices.",
        "The version beside the name is firmware, not driver.",
    ),
)
