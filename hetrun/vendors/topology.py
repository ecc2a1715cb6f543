"""What joins the chips of a host: the matrix that the tools of many vendors print. Asking for it is left to probe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hetrun.vendors._read import text
from hetrun.vendors._read.run import MAX_LINE, clean

MAX_COLUMNS = 160
_SPLIT_NAME = re.compile(r"\b(GPU|XPU|NPU|MLU|Device)[ #]([0-9]{1,3}(?:/[0-9]{1,2})?)(?![\w.:])")
_CHIP = re.compile(r"(?:GPU|XPU|NPU|MLU|DCU|HCU|GCU|Device)([0-9]{1,3})(?:/([0-9]{1,2}))?")
_NIC = re.compile(r"NIC[0-9]{1,3}|[a-z][a-z0-9_.-]{1,40}[0-9]")  # NIC0, or a port's own name
_LEGEND = re.compile(r"\s{0,20}(NIC[0-9]{1,3})\s{0,4}:\s{0,4}([A-Za-z][A-Za-z0-9_.-]{1,63})\s*")
_BUS = re.compile(r"\s{0,8}(?:GPU|DCU|HCU)\s?\[([0-9]{1,3})\]\s{0,8}:\s{0,4}PCI Bus:(.{1,40})")
_WORD = re.compile(r"[A-Z]{2,5}[0-9]{0,2}\*?")  # NV18, PIX, PXB, PHB, NODE, SYS, MX, XGMI, XL*


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipLink:
    """Two chips by their tool's numbers, a < b, and the tool's word for what lies between them."""

    a: int
    b: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NicPlace:
    """A chip by its tool's number, a network port by its own name, and the tool's word for what lies between."""

    chip: int
    nic: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What one matrix tells. `bus_ids` is there where the tool printed the chips' addresses beside it."""

    links: tuple[ChipLink, ...] = ()
    nics: tuple[NicPlace, ...] = ()
    chips: frozenset[int] = frozenset()
    bus_ids: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    """A row or column: a chip (and its tile), or a port."""

    chip: int | None = None
    tile: int | None = None
    nic: str | None = None


_Cells = dict[tuple[_Place, _Place], str]


def read_topology(output: str | bytes) -> Topology:
    """Read the first matrix that holds words; pairs whose two cells differ or are no word stay unknown. Never raises.

    Cells are read by their place: up to the last chip or port, no cell of a row holds a blank. A matrix of
    numbers (weights, hops) is passed over. Tiles of a chip are joined where they agree on the chips' link.
    """
    # what stands behind the last line's end may be cut inside a word
    lines = [line for line in clean(output)[0].split("\n")[:-1] if len(line) <= MAX_LINE]
    names = {match[1]: match[2] for line in lines if (match := _LEGEND.fullmatch(line))}
    bus_ids = {
        int(match[1]): bus_id
        for line in lines
        if (match := _BUS.fullmatch(line)) and (bus_id := text.bdf(match[2]))
    }
    for cells in _matrices(lines):
        links, nics = _links(cells), _nics(cells, names)
        if links or nics:
            chips = frozenset(row.chip for row, _ in cells if row.chip is not None)
            return Topology(links=links, nics=nics, chips=chips, bus_ids=bus_ids)
    return Topology()


def _matrices(lines: list[str]) -> Iterator[_Cells]:
    """Yield the cells of each matrix: a line of names, then rows up to an empty line."""
    columns: list[_Place] = []
    cells: _Cells = {}
    for line in lines:
        words = _SPLIT_NAME.sub(r"\1\2", line.replace("|", " ")).split()
        places = [place for word in words[: MAX_COLUMNS + 1] if (place := _place(word))]
        first = _place(words[0]) if words else None
        if _is_header(words):
            if cells:
                yield cells
            columns, cells = list(_names(words[:MAX_COLUMNS])), {}
        elif first is not None and first.chip is not None and columns.count(first) != 1:
            columns, cells = [], {}  # the line of names lacks one: no cell can be placed
        elif columns and first is not None and len(places) == 1:
            for column, word in zip(columns, words[1:], strict=False):
                cells.setdefault((first, column), word)
        elif cells and not words:
            yield cells
            columns, cells = [], {}
    if cells:
        yield cells


def _is_header(words: list[str]) -> bool:
    names = list(_names(words[:2]))
    return len(names) == 2 and names[0].chip is not None


def _names(words: list[str]) -> Iterator[_Place]:
    """Yield the places that the words name, up to the first that names none."""
    for word in words:
        place = _place(word)
        if place is None:
            return
        yield place


def _place(word: str) -> _Place | None:
    match = _CHIP.fullmatch(word)
    if match is not None:
        return _Place(chip=int(match[1]), tile=None if match[2] is None else int(match[2]))
    return _Place(nic=word) if _NIC.fullmatch(word) else None


def _links(cells: _Cells) -> tuple[ChipLink, ...]:
    """Return the pairs of chips on whose link all cells that are about it agree."""
    words: dict[tuple[int, int], list[str | None]] = {}
    for (row, column), word in cells.items():
        if row.chip is None or column.chip is None or row.chip >= column.chip:
            continue
        is_told = cells.get((column, row)) == word and _WORD.fullmatch(word)
        words.setdefault((row.chip, column.chip), []).append(word if is_told else None)
    found = []
    for (a, b), told in words.items():
        # Between tiles, a star stands for a way over another tile: the direct one joins the chips.
        direct = {word for word in told if word is None or not word.endswith("*")} or set(told)
        kind = direct.pop() if len(direct) == 1 else None
        if kind is not None:
            found.append(ChipLink(a=a, b=b, kind=kind.rstrip("*")))
    return tuple(found)


def _nics(cells: _Cells, names: Mapping[str, str]) -> tuple[NicPlace, ...]:
    """Return what lies between chips and ports; where ports have rows of their own, those must say the same."""
    has_rows = any(row.nic for row, _ in cells)
    found: dict[tuple[int, str], set[str]] = {}
    for (row, column), word in cells.items():
        if row.chip is None or column.nic is None:
            continue
        name = names.get(column.nic, column.nic)
        told = found.setdefault((row.chip, name), set())
        told.update((word, cells.get((column, row), "" if has_rows else word)))
    return tuple(
        NicPlace(chip=chip, nic=nic, kind=kind)
        for (chip, nic), told in found.items()
        if len(told) == 1 and _WORD.fullmatch(kind := next(iter(told))) and "*" not in kind
    )
