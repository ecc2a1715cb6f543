"""What joins the chips of a host: the matrix that `topo -m` of several vendors prints. Asking for it is left to probe."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetrun.vendors._read.run import MAX_LINE, clean

MAX_CHIPS = 64
_CHIP = re.compile(r"GPU#?([0-9]{1,3})")
_WORD = re.compile(r"[A-Z]{2,5}[0-9]{0,2}")  # NV18, PIX, PXB, PHB, NODE, SYS, MX, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipLink:
    """Two chips by their tool's numbers, a < b, and the tool's word for what lies between them."""

    a: int
    b: int
    kind: str


def read_topology(output: str | bytes) -> tuple[ChipLink, ...]:
    """Read a matrix; pairs whose two cells differ or are no word stay unknown. Never raises.

    Cells are read by their place: up to the last chip, no cell of a row holds a blank.
    """
    columns: list[int | None] = []
    cells: dict[tuple[int, int], str] = {}
    for line in clean(output)[0].split("\n"):
        words = line.split() if len(line) <= MAX_LINE else []
        numbers = [_number(word) for word in words]
        if len(numbers) >= 2 and numbers[0] is not None and numbers[1] is not None:
            columns = numbers[: MAX_CHIPS + 1]
        elif numbers and numbers[0] is not None and columns:
            for number, word in zip(columns, words[1:], strict=False):
                if number is not None:
                    cells.setdefault((numbers[0], number), word)
        elif cells and not words:
            break  # a legend, or a second matrix that means something else
    found = []
    for (a, b), word in cells.items():
        if a < b and cells.get((b, a)) == word and _WORD.fullmatch(word):
            found.append(ChipLink(a=a, b=b, kind=word))
    return tuple(found)


def _number(word: str) -> int | None:
    match = _CHIP.fullmatch(word)
    return int(match[1]) if match else None
