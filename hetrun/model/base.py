"""What all nouns share: the base class, checks that say what they got, and quantities with a source.

Runs on Python 3.10 with nothing but the standard library, like the whole package, since it travels to workers.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

SCHEMA_VERSION = 1
GIB = 1 << 30
MIB = 1 << 20

# Inside [] of a pattern: what text from others must not bring to a terminal or a page. C0 and C1 controls but newline
# and tab, lone surrogates, bidi overrides and isolates, the byte order mark.
UNPRINTABLE = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\u200e\u200f\ufeff"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Noun:
    """Base of all dataclasses here: when pydantic loads a file, it refuses unknown keys, inf and nan."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, str | bool]] = {
        "extra": "forbid",
        "allow_inf_nan": False,
    }


def check_name(what: str, name: str) -> None:
    """Refuse a name that could mean something to a shell, a path or a table.

    Raises:
        ValueError: the name is not letters, digits, `.`, `_`, `-` (63 at most).
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r}: need letters, digits, '.', '_' or '-', at most 63")


def check_text(what: str, text: str | None) -> None:
    """Refuse empty text and control characters (newlines too); None passes."""
    if text is not None and (not text or _CONTROL.search(text)):
        raise ValueError(f"{what} {text!r}: need text without control characters")


def check_host_address(what: str, address: str | None) -> None:
    """Accept an IP address (no zone) or a host name of letters, digits, '.', '_' and '-'."""
    if address is None:
        return
    if address.lower().startswith("fe80"):
        raise ValueError(
            f"{what} {address!r}: a link-local address means another host on every NIC"
        )
    try:
        ipaddress.ip_address(address)
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", address):
            raise ValueError(f"{what} {address!r}: need a host name or an IP address") from None


def need(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


class Source(str, Enum):
    """Where a number comes from, best first. `modelled` figures belong to emulated chips or to simulation."""

    MEASURED = "measured"
    MODELLED = "modelled"
    SPEC = "spec"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity(Noun):
    """A number with its source; `value` is None where nobody knows it, and `why` may say why."""

    value: float | None
    source: Source
    why: str = ""
