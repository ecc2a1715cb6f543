"""csv as nvidia-smi and its look-alikes print it. Which fields a vendor asks for is decided in its file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.failures import failure, telling_lines
from hetrun.vendors._read.run import ToolRun

# spelling in the query or header -> attribute
_FIELDS = {
    "index": "index",
    "gpu_index": "index",
    "name": "model",
    "gpu_name": "model",
    "product_name": "model",
    "uuid": "uuid",
    "gpu_uuid": "uuid",
    "pci.bus_id": "bus_id",
    "gpu_bus_id": "bus_id",
    "bus_id": "bus_id",
    "pci.bus": "bus",
    "memory.total": "memory",
    "driver_version": "driver",
    "mig.mode.current": "mig",
    "module_id": "module_id",
    "health": "health",
}
_UUID = re.compile(r"(?:[A-Z]{2,5}-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_PRODUCT = re.compile(r"(?=.{0,60}[0-9])[A-Z][\w()./+-]{1,30}(?: [\w()./+-]{1,30}){0,6}(?<![.:])")
_ROW_START = re.compile(r"\s{0,8}[0-9]{1,4}\s{0,4},")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Columns (attribute names, "" for those not needed) and the rows under them."""

    columns: tuple[str, ...]
    asked: tuple[str, ...]  # the columns' own names
    rows: tuple[tuple[str, ...], ...]
    unit: str | None  # of memory, where the cells hold bare numbers
    num_broken: int = 0


def _attribute(field: str) -> str:
    return _FIELDS.get(field, "")


def _header(cells: Sequence[str]) -> tuple[str, ...] | None:
    """Return the field names if these cells are a header, such as 'index, memory.total [MiB]'."""
    names = tuple(cell.split("[", 1)[0].strip().lower() for cell in cells)
    known = [name for name in names if _attribute(name)]
    return names if len(known) >= 2 or (known and len(names) == 1) else None


def _unit(cells: Sequence[str]) -> str | None:
    """Return the unit that a header gives to memory.total."""
    for cell in cells:
        if cell.strip().lower().startswith("memory.total") and "[" in cell:
            return cell.split("[", 1)[1].rstrip("] ")
    return None


def _guess(rows: Sequence[Sequence[str]]) -> tuple[str, ...] | None:
    """Name the columns by what stands in them, where neither command nor header does."""
    width = len(rows[0]) if rows else 0
    columns = []
    for at in range(width):
        cells = [row[at] for row in rows if len(row) == width]
        columns.append(_column_kind(cells, first=at == 0))
    return tuple(columns) if columns.count("index") == 1 and columns.count("model") == 1 else None


def _column_kind(cells: Sequence[str], *, first: bool) -> str:
    if first:
        return "index" if all(text.index(cell) is not None for cell in cells) else ""
    if all(text.bdf(cell) for cell in cells):
        return "bus_id"
    if all(_UUID.fullmatch(cell) for cell in cells):
        return "uuid"
    if all(
        text.memory(cell) for cell in cells
    ):  # only with its unit: a bare number may be used memory
        return "memory"
    if all(cell[:1].isalpha() and text.name(cell) for cell in cells):
        return "model"
    return ""


def _table(run: ToolRun) -> _Table | None:
    """Find header and rows between whatever else the tool prints."""
    fields: tuple[str, ...] = run.fields
    unit = "MiB" if "nounits" in " ".join(run.words) else None
    numbered = not fields or "index" in map(_attribute, fields)
    rows: list[tuple[str, ...]] = []
    for line in run.lines:
        cells = tuple(cell.strip() for cell in line.split(","))
        if len(cells) == 1 and len(fields) != 1:
            continue
        header = None if rows else _header(cells)
        if header is not None:
            fields, unit = header, _unit(cells) or unit
            numbered = "index" in map(_attribute, fields)
        elif _ROW_START.match(line) if numbered else _is_row(cells, fields, run):
            rows.append(cells)
    columns = tuple(map(_attribute, fields)) if fields else _guess(rows)
    if not rows or columns is None:
        return None
    # no host has as many devices: what comes after is counted as broken
    full = tuple(row for row in rows[: text.MAX_INDEX] if len(row) == len(columns))
    return _Table(
        columns=columns,
        asked=fields or columns,
        rows=full,
        unit=unit,
        num_broken=len(rows) - len(full),
    )


def _is_row(cells: Sequence[str], fields: Sequence[str], run: ToolRun) -> bool:
    """True for as many cells as were asked for. A cell alone may be a sentence: it has to look like a product.

    Where the tool complains of anything, it is taken for a sentence.
    """
    if len(cells) != len(fields) or len(cells) > 1:
        return len(cells) == len(fields)
    is_named = _attribute(fields[0]) == "model" and _PRODUCT.fullmatch(cells[0]) is not None
    return is_named and not run.rc and failure(telling_lines(run), ()) is None


def _open_cell(table: _Table, run: ToolRun) -> str | None:
    """Return the attribute whose value in the last row may be cut short, None if there is none.

    Output that stops without a newline may stop inside a number. The last cell is believed all the
    same if another row shows the same value, or if such a value has a known end.
    """
    if not run.open_end or not table.rows or not run.stdout.endswith(table.rows[-1][-1]):
        return None
    last = table.rows[-1][-1]
    whole = {
        "bus_id": text.bdf(last) is not None,
        "uuid": _UUID.fullmatch(last) is not None,
        "memory": text.memory(last) is not None,  # it has its unit
    }
    if any(row[-1] == last for row in table.rows[:-1]) or whole.get(table.columns[-1]):
        return None
    return table.columns[-1] or None


def read_rows(run: ToolRun, *, want: Sequence[str] = ()) -> ToolAnswer | None:
    """Read a csv answer; None if the output holds no csv of devices.

    `want` names what counts as a loss if it stays unknown ("memory", "model").
    """
    table = _table(run)
    if table is None:
        return None
    numbered = "index" in table.columns
    devices: list[FoundDevice] = []
    warnings: list[str] = [] if numbered else ["index_assumed"]
    num_broken = table.num_broken
    open_cell = _open_cell(table, run)
    for at, row in enumerate(table.rows):
        cells = {column: cell for column, cell in zip(table.columns, row, strict=True) if column}
        if not numbered:
            cells["index"] = str(at)  # rows stand in order of the index
        if open_cell and at == len(table.rows) - 1:
            cells[open_cell] = ""
            warnings.append("output_unterminated")
        device = _device(cells, table.unit)
        if device is None:
            num_broken += 1
            continue
        bad = _bad_fields(table, row)
        warnings += [f"field_error:{field}:{device.index}" for field in bad]
        num_broken += bool(bad)
        warnings += ["mig_enabled"] if device.sliced else []
        devices.append(device)
    warnings += [
        f"{what}_unknown"
        for what in want
        if what in table.columns and any(_missing(device, what) for device in devices)
    ]
    error = ToolError.PARTIAL_DEVICE_ERROR if num_broken else None
    return ToolAnswer(devices=tuple(devices), error=error, warnings=tuple(warnings))


def _missing(device: FoundDevice, what: str) -> bool:
    return (device.memory_bytes if what == "memory" else device.model) is None


def _bad_fields(table: _Table, row: Sequence[str]) -> list[str]:
    """Return the short names of fields that the tool could not read, such as 'power' of power.draw."""
    return [
        field.split(".", 1)[0]
        for field, cell in zip(table.asked, row, strict=True)
        if text.is_broken(cell)
    ]


def _device(cells: Mapping[str, str], unit: str | None) -> FoundDevice | None:
    """Return the device of one row, None if a cell holds something that it cannot hold."""
    number = text.index(cells.get("index"))
    found = {key: read(cells.get(key)) for key, read in _READERS.items()}
    impossible = any(
        found[key] is None and text.value(cells.get(key)) is not None for key in _READERS
    )
    memory = _memory(cells.get("memory"), unit)
    said = text.value(cells.get("memory"))
    if memory is None and said is not None and said.split()[0] != "0":
        impossible = True
    if number is None or impossible:
        return None
    broken = any(text.is_broken(cell) for cell in cells.values())
    return FoundDevice(
        index=number,
        model=found["model"],
        memory_bytes=memory,
        driver=found["driver"],
        bus_id=found["bus_id"],
        uuid=found["uuid"],
        module_id=text.index(cells.get("module_id")),
        health="err" if broken else text.name(cells.get("health")),
        sliced=cells.get("mig", "").lower() == "enabled",
    )


def _memory(cell: str | None, unit: str | None) -> int | None:
    """Bare numbers are MiB where units were asked away; as many digits as bytes need are bytes."""
    found = text.number(cell)
    if found is not None and unit is not None and found >= 1 << 27:
        return text.memory(cell, "B")
    return text.memory(cell, unit)


def _uuid(cell: str | None) -> str | None:
    """Accept any id without spaces."""
    found = text.value(cell)
    return found if found and " " not in found and found.isascii() and len(found) <= 80 else None


_READERS: Mapping[str, Callable[[str | None], str | None]] = {
    "model": text.name,
    "uuid": _uuid,
    "bus_id": text.bdf,
    "driver": text.version,
}
