"""JSON, csv and text of rocm-smi and its forks. Whose card it is decides the PCI scan, not the tool's name."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.blocks import complete_lines
from hetrun.vendors._read.jsontext import documents, record
from hetrun.vendors._read.run import ToolRun

_CARD = re.compile(r"card([0-9]{1,4})")
_LINE = re.compile(r"(?:GPU|DCU|HCU)\s{0,4}\[([0-9]{1,4})\]\s{0,20}:\s{0,20}(.{1,400})")
_MEMORY = re.compile(r"vram total memory \((b|kib|mib|gib)\)")
_HEX = re.compile(r"0x[0-9a-f]{1,8}", re.IGNORECASE)
_NAMES = ("card series", "device name", "card model", "market name", "product name")


def read_rocm(run: ToolRun, *, maker: str, other: str) -> ToolAnswer | None:
    """Read whichever of the three layouts is there; None if it is none of them.

    The same tool serves two makers: cards that name the `other` one and not `maker` are left out.
    """
    cards, driver, num_broken = _json_cards(run), _json_driver(run), 0
    if not cards:
        cards, num_broken = _csv_cards(run)
    if not cards:
        cards, driver = _text_cards(run)
    if not cards and not num_broken:
        return None
    mine = {number: card for number, card in cards.items() if not _is_foreign(card, maker, other)}
    if cards and not mine:
        return ToolAnswer(error=ToolError.NO_DEVICES, warnings=("other_vendor",))
    cards = mine
    devices = tuple(_device(number, card, driver) for number, card in sorted(cards.items()))
    asked = run.has("vram", "--showmeminfo") or any(device.memory_bytes for device in devices)
    warnings = []
    if asked and any(device.memory_bytes is None for device in devices):
        warnings.append("memory_unknown")
    if any(device.model is None for device in devices):
        warnings.append("model_unknown")
    error = ToolError.PARTIAL_DEVICE_ERROR if num_broken else None
    return ToolAnswer(devices=devices, error=error, warnings=tuple(warnings))


def read_concise(run: ToolRun) -> ToolAnswer | None:
    """Read the table that the tools print without options: a number in front, shares in percent at the end.

    It tells neither model nor memory size.
    """
    devices: list[FoundDevice] = []
    is_table = False
    for line in complete_lines(run):
        words = line.split()
        if words[:1] in (["GPU"], ["HCU"], ["DCU"], ["Device"]) and len(words) > 4:
            is_table = "VRAM%" in words
        elif is_table and len(words) > 4 and words[-1].endswith("%"):
            number = text.index(words[0])
            devices += [] if number is None else [FoundDevice(index=number)]
    if not devices:
        return None
    return ToolAnswer(devices=tuple(devices), warnings=("model_unknown", "memory_unknown"))


def _is_foreign(card: Mapping[str, str], maker: str, other: str) -> bool:
    named = card.get("card vendor", "").lower()
    return other in named and maker not in named


def _lower(card: Mapping[str, object]) -> dict[str, str]:
    """Trim and lower the keys; values that say nothing are left out."""
    found: dict[str, str] = {}
    for key, raw in card.items():
        value = text.value(raw)
        if value is not None and key.strip():
            found.setdefault(key.strip().lower(), value)
    return found


def _json_cards(run: ToolRun) -> dict[int, dict[str, str]]:
    cards: dict[int, dict[str, str]] = {}
    for document in documents(run):
        for key, card in record(document).items():
            match = _CARD.fullmatch(key.strip())
            if match and isinstance(card, dict) and card:
                cards.setdefault(int(match[1]), {}).update(_lower(card))
    return cards


def _json_driver(run: ToolRun) -> str | None:
    for document in documents(run):
        driver = _lower(record(record(document).get("system"))).get("driver version")
        if driver:
            return text.version(driver)
    return None


def _csv_cards(run: ToolRun) -> tuple[dict[int, dict[str, str]], int]:
    """Read csv: header 'device,...', rows 'cardN,...'. The vendor's own comma is not quoted."""
    header: list[str] = []
    cards: dict[int, dict[str, str]] = {}
    num_broken = 0
    for line in complete_lines(run):
        if line.lower().startswith("device,"):
            header = [cell.strip().lower() for cell in line.split(",")]
        elif header and _CARD.match(line):
            cells = _cells(line, header)
            match = _CARD.fullmatch(cells[0].strip()) if cells else None
            if match is None:
                num_broken += 1
                continue
            pairs = dict(zip(header[1:], cells[1:], strict=True))
            cards.setdefault(int(match[1]), {}).update(_lower(pairs))
    return cards, num_broken


def _cells(line: str, header: Sequence[str]) -> list[str]:
    """Split one row; too many cells are put back together under 'card vendor'. Empty if it does not fit."""
    try:
        cells = next(csv.reader([line]))
    except csv.Error:
        return []
    extra = len(cells) - len(header)
    if extra > 0 and "card vendor" in header:
        at = header.index("card vendor")
        cells[at : at + extra + 1] = [",".join(cells[at : at + extra + 1])]
    return cells if len(cells) == len(header) else []


def _text_cards(run: ToolRun) -> tuple[dict[int, dict[str, str]], str | None]:
    """Read lines such as 'GPU[0] : Card series: Z100L'."""
    cards: dict[int, dict[str, str]] = {}
    driver = None
    for line in complete_lines(run):
        match = _LINE.match(line)
        if match is None:
            if line.lower().startswith("driver version"):
                driver = text.version(line.partition(":")[2])
            continue
        key, colon, value = match[2].partition(":")
        if colon:
            cards.setdefault(int(match[1]), {}).update(_lower({key: value}))
    return cards, driver


def _device(number: int, card: Mapping[str, str], driver: str | None) -> FoundDevice:
    memory = None
    for key, value in card.items():
        match = _MEMORY.fullmatch(key)
        if match:
            memory = text.memory(value, match[1])
    names = (text.name(card.get(key)) for key in _NAMES)
    return FoundDevice(
        index=number,
        model=next((name for name in names if name and not _HEX.fullmatch(name)), None),
        memory_bytes=memory,
        driver=driver,
        bus_id=text.bdf(card.get("pci bus")),
        uuid=card.get("unique id"),
        arch=text.name(card.get("gfx version")),
    )
