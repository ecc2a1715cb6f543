"""RoCE ports that sit inside devices, as `hccn_tool` tells of them. Asking every device is left to probe."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from hetrun.vendors._read.run import MAX_LINE, clean

_DEVICE = re.compile(r"device ([0-9]{1,3})")
_ADDRESS = re.compile(r"ipaddr\s{0,4}:\s{0,4}([0-9a-fA-F.:]{2,45})(?:\s.{0,80})?")
_LINK = re.compile(r"link status\s{0,4}:\s{0,4}(UP|DOWN)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipPort:
    """The port of one device by its tool's number; None where the tool does not tell."""

    chip: int
    address: str | None = None
    up: bool | None = None


def read_ports(output: str | bytes) -> tuple[ChipPort, ...]:
    """Read, under each line 'device N', lines 'ipaddr:..' and 'link status: UP'. Never raises.

    A device about which the tool says neither is left out.
    """
    found: dict[int, tuple[str | None, bool | None]] = {}
    number = None
    for line in clean(output)[0].split("\n"):
        stripped = line.strip() if len(line) <= MAX_LINE else ""
        if match := _DEVICE.fullmatch(stripped):
            number = int(match[1])
        elif number is not None:
            address, up = found.get(number, (None, None))
            if match := _ADDRESS.fullmatch(stripped):
                found[number] = (address or _usable(match[1]), up)
            elif match := _LINK.fullmatch(stripped):
                found[number] = (address, match[1].upper() == "UP" if up is None else up)
    return tuple(ChipPort(chip=chip, address=a, up=up) for chip, (a, up) in found.items())


def _usable(word: str) -> str | None:
    """Return an address that is one; 0.0.0.0 stands for none."""
    try:
        address = ipaddress.ip_address(word)
    except ValueError:
        return None
    return None if address.is_unspecified else str(address)
