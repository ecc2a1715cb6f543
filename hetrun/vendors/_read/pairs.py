"""Tables in which two rows in turn are one device. What stands in the two rows is left to the vendor's file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.boxes import cells, is_border

Row = tuple[str, ...]


def read_pairs(
    lines: Sequence[str],
    *,
    is_first: Callable[[Row], bool],
    join: Callable[[Row, Row | None], FoundDevice | None],
    end: str | None = None,
) -> ToolAnswer | None:
    """Join each row that `is_first` with the line below it; a row whose first cell starts with `end` ends the table.

    A pair that `join` refuses, or a device's line that has lost its end, makes the answer a partial one.
    None where there is neither a device nor a broken one.
    """
    devices: list[FoundDevice] = []
    above: Row | None = None
    num_broken = 0
    for line in lines:
        row = None if is_border(line) else cells(line)
        if end is not None and row is not None and row[0].startswith(end):
            break
        if above is not None:
            device = join(above, row)
            devices += [device] if device else []
            num_broken += device is None
            above = None
        elif row is not None and is_first(row):
            above = row
        elif row is None and line.startswith("| ") and line[2:].lstrip()[:1].isdigit():
            num_broken += 1
    num_broken += above is not None
    if not devices and not num_broken:
        return None
    error = ToolError.PARTIAL_DEVICE_ERROR if num_broken else None
    return ToolAnswer(devices=tuple(devices), error=error)
