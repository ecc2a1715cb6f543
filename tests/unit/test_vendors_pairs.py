"""Two rows are one device: whole pairs are devices, everything else of a device is a broken one."""

from __future__ import annotations

import pytest

from hetrun.vendors import FoundDevice, ToolError
from hetrun.vendors._read.pairs import Row, read_pairs

FIRST, SECOND = "| 0 name | bus |", "| used | total |"


def join(above: Row, below: Row | None) -> FoundDevice | None:
    whole = below is not None and below[0] == "used"
    return FoundDevice(index=int(above[0].split()[0]), model=above[0].split()[1]) if whole else None


def found(*lines: str) -> tuple[int, ToolError | None] | None:
    answer = read_pairs(lines, is_first=lambda row: row[0][:1].isdigit(), join=join, end="Process")
    return None if answer is None else (len(answer.devices), answer.error)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((FIRST, SECOND, FIRST, SECOND), (2, None)),
        ((FIRST, SECOND, FIRST), (1, ToolError.PARTIAL_DEVICE_ERROR)),
        ((FIRST, FIRST, SECOND), (0, ToolError.PARTIAL_DEVICE_ERROR)),
        ((FIRST, SECOND, "| 1 na"), (1, ToolError.PARTIAL_DEVICE_ERROR)),
        ((FIRST, SECOND, "| Process | id |", FIRST), (1, None)),
        (("+-----+", "| Name | Bus |"), None),
    ],
)
def test_only_whole_pairs_are_devices(
    lines: tuple[str, ...], expected: tuple[int, ToolError | None] | None
) -> None:
    assert found(*lines) == expected
