"""Small readings that all vendors need: numbers with units, PCI addresses, names. Layouts are left to others."""

from __future__ import annotations

import re

from hetrun.model import GIB, MIB

MAX_MEMORY_BYTES = 1 << 42  # 4 TiB: beyond it a number is no device memory
MAX_INDEX = 4096

_BDF = re.compile(
    r"(?<![0-9A-Za-z:.])(?:([0-9a-fA-F]{2,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-9a-fA-F])"
    r"(?![0-9A-Za-z])"
)
_AMOUNT = re.compile(r"\s{0,8}([0-9]{1,18})(?:\.([0-9]{1,9}))?\s{0,4}([A-Za-z]{0,6})\s{0,8}")
_UNITS = {
    "b": 1,
    "byte": 1,
    "bytes": 1,
    "k": 1024,
    "kb": 1024,
    "kib": 1024,
    "kbytes": 1024,
    "m": MIB,
    "mb": MIB,
    "mib": MIB,
    "mbytes": MIB,
    "g": GIB,
    "gb": GIB,
    "gib": GIB,
    "t": 1024 * GIB,
    "tb": 1024 * GIB,
    "tib": 1024 * GIB,
}
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z._+:~()-]{0,79}")
_UNKNOWN = {
    "",
    "-",
    "--",
    "/",
    "n/a",
    "na",
    "none",
    "null",
    "unknown",
    "not supported",
    "not available",
    "notsupported",
    "notavailable",
    "[n/a]",
    "[na]",
    "[not supported]",
    "[not available]",
    "[unknown]",
    "[insufficient permissions]",
    "insufficient permissions",
    "[none]",
}
_BROKEN = {
    "err!",
    "error",
    "[unknown error]",
    "unknown error",
    "[gpu requires reset]",
    "gpu requires reset",
    "[gpu is lost]",
    "gpu is lost",
    "[error]",
    "[reset required]",
}


def is_unknown(text: str) -> bool:
    """True where a cell says in one way or other that there is no value."""
    return text.strip().lower() in _UNKNOWN


def is_broken(text: str) -> bool:
    """True where a cell says that the value could not be read because the device is ill."""
    return text.strip().lower() in _BROKEN


def value(text: object) -> str | None:
    """Return a trimmed scalar as text, None for all the ways in which tools say 'nothing'."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        return None
    trimmed = str(text).strip()
    return None if is_unknown(trimmed) or is_broken(trimmed) else trimmed


def number(text: object) -> int | None:
    """Return a whole number that stands alone (decimal), else None."""
    found = value(text)
    if found is None or len(found) > 18 or not (found.isascii() and found.isdigit()):
        return None
    return int(found)


def index(text: object) -> int | None:
    """Return a device number, None where it is none."""
    found = number(text)
    return found if found is not None and found < MAX_INDEX else None


def bdf(text: object) -> str | None:
    """Return the first PCI address in a text as dddd:bb:dd.f in lower case; the domain may be absent."""
    match = _BDF.search(text[:400]) if isinstance(text, str) else None
    if match is None:
        return None
    domain = int(match[1] or "0", 16)
    if int(match[3], 16) > 0x1F or int(match[4], 16) > 7:
        return None
    return f"{domain:04x}:{match[2]}:{match[3]}.{match[4]}".lower()


def memory(text: object, unit: str | None = None) -> int | None:
    """Return bytes of '81920 MiB', '48GiB', 49152 (in `unit`); None if absent, 0 or absurd.

    Tools say MB and mean MiB. Without a unit in the text and without `unit` there is no answer.
    """
    found = value(text)
    match = _AMOUNT.fullmatch(found) if found is not None and len(found) < 60 else None
    if match is None:
        return None
    scale = _UNITS.get((match[3] or unit or "").lower())
    if scale is None:
        return None
    fraction = int(match[2]) / 10 ** len(match[2]) if match[2] else 0.0
    num_bytes = int(match[1]) * scale + int(fraction * scale)
    return num_bytes if 0 < num_bytes <= MAX_MEMORY_BYTES else None


def version(text: object) -> str | None:
    """Return a version or driver string, None where it is something else."""
    found = value(text)
    return found if found is not None and _VERSION.fullmatch(found) else None


def name(text: object) -> str | None:
    """Return a product name: printable, not too long, with a letter in it."""
    found = value(text)
    if found is None or len(found) > 96 or not found.isprintable() or "\ufffd" in found:
        return None
    return found if any(char.isalpha() for char in found) else None
