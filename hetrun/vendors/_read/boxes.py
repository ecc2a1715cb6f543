"""Tables drawn with `|`, `+` and `-`, as nvidia-smi and its look-alikes print them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.run import ToolRun

PAIR = re.compile(  # used / total
    r"(?<![0-9.])[0-9]{1,12}\s{0,4}(?:[KMG]i?[Bb])?\s{0,4}/\s{0,12}([0-9]{1,12}\s{0,4}[KMG]i?[Bb])\b"
)
_INDEX = re.compile(r"([0-9]{1,4})(?:\s{1,8}|$)")
_ROW_START = re.compile(r"\s{0,8}\|\s{1,8}[0-9]{1,4}\s{1,8}\S")
_PERSISTENCE = ("On", "Off", "N/A", "ERR!", "WDDM", "TCC", "MCDM")
_BORDER = frozenset("+-=|")


def cells(line: str) -> tuple[str, ...] | None:
    """Split '| a | b |' into trimmed cells; None if the line is not a whole row."""
    stripped = line.strip()
    if len(stripped) < 3 or not (stripped.startswith("|") and stripped.endswith("|")):
        return None
    return tuple(cell.strip() for cell in stripped[1:-1].split("|"))


def is_border(line: str) -> bool:
    """True for lines such as '+-----+-----+' or '|=====|'."""
    stripped = line.strip()
    return len(stripped) > 3 and set(stripped) <= _BORDER


def banner(lines: Sequence[str], *labels: str) -> str | None:
    """Return the version after the first of these labels ('Driver Version:') in the first lines."""
    for label in labels:
        for line in lines[:40]:
            at = line.lower().find(label.lower())
            words = line[at + len(label) :].replace("|", " ").split() if at >= 0 else []
            whole = "|" in line[at + len(label) :] or len(words) > 1 or line is not lines[-1]
            if words and whole:
                return text.version(words[0])
    return None


def read_smi(run: ToolRun, *, driver: str | None) -> ToolAnswer | None:
    """Read a table whose records start with 'index name | bus id' and hold 'used / total' memory.

    A record counts only if it is whole: closed lines, a bus id and, in the line below, the memory.
    """
    devices: list[FoundDevice] = []
    warnings: list[str] = []
    num_broken = 0
    records, is_open = _records(run.lines)
    for record in records:
        found = _device(record)
        if found is None:
            num_broken += 1
            continue
        mig = any(row[-1] == "Enabled" and not any(row[:-1]) for row in record[2:])
        devices.append(replace(found, driver=driver, sliced=mig))
        warnings += _bad_cells(record, found.index)
        warnings += ["mig_enabled"] if mig else []
    if not devices and not num_broken:
        return None
    if any(device.memory_bytes is None for device in devices):
        warnings.append("memory_unknown")
    torn = run.open_end and run.lines[-1:] and run.lines[-1].startswith("|")
    if devices and (is_open or (torn and not run.lines[-1].endswith("|"))):
        warnings.append("output_unterminated")
    error = ToolError.PARTIAL_DEVICE_ERROR if num_broken else None
    return ToolAnswer(devices=tuple(devices), error=error, warnings=tuple(warnings))


def _records(lines: Sequence[str]) -> tuple[list[list[tuple[str, ...]]], bool]:
    """Return the rows of each device, and whether the last one lacks the border below it.

    An unclosed row ends its record and leaves it short.
    """
    records: list[list[tuple[str, ...]]] = []
    is_open = False
    for line in lines:
        row = None if is_border(line) else cells(line)
        if row is not None and row[0].startswith(("Process", "Compute Process")):
            break
        if row is None:
            is_open = is_open and not line.strip()
            if _ROW_START.match(line) and not is_border(line):
                records.append([])  # a device's line that stops before its last bar
        elif is_open:
            records[-1].append(row)
        elif len(row) >= 2 and _INDEX.match(row[0]) and text.bdf(row[1]):
            records.append([row])
            is_open = True
    return records, is_open


def _device(rows: Sequence[Sequence[str]]) -> FoundDevice | None:
    """Return the device of one record, None if its memory line is missing or cut."""
    if len(rows) < 2 or len(rows[0]) != len(rows[1]):
        return None
    number = _INDEX.match(rows[0][0])
    if number is None or not _tells_memory(rows[1]):
        return None
    pairs = [pair for cell in rows[1] if (pair := PAIR.search(cell))]
    model = _model(rows[0][0][number.end() :].strip())
    ill = any("ERR!" in cell for row in rows[:2] for cell in row)
    return FoundDevice(
        index=int(number[1]),
        model=text.name(model),
        memory_bytes=text.memory(pairs[0][1]) if pairs else None,
        bus_id=text.bdf(rows[0][1]),
        model_truncated=model.endswith("..."),
        health="err" if ill else None,
    )


def _tells_memory(row: Sequence[str]) -> bool:
    return any(PAIR.search(cell) for cell in row) or any(
        text.is_unknown(cell) or text.is_broken(cell) for cell in row[1:]
    )


def _model(cell: str) -> str:
    """Take the persistence mode off the end of the name's cell."""
    words = cell.split()
    while len(words) > 1 and words[-1] in _PERSISTENCE:
        words = words[:-1]
    return " ".join(words)


def _bad_cells(rows: Sequence[Sequence[str]], number: int) -> list[str]:
    """Name the ERR! fields that matter; a fan that cannot be read is normal on passive cards."""
    below = rows[1]
    fields = []
    usage, slash, cap = below[0].rpartition("/")
    # fan, temperature, performance state, then power
    if slash and ("ERR!" in usage.split()[3:] or "ERR!" in cap):
        fields.append("power")
    if len(below) > 1 and "ERR!" in below[1]:
        fields.append("memory")
    if len(below) > 2 and "ERR!" in below[2]:
        fields.append("utilization")
    return [f"field_error:{field}:{number}" for field in fields]
