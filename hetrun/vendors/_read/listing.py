"""One line per device, as `-L` prints it: 'GPU 0: NAME (UUID: ...)'. Slices stand indented below their device."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import takewhile

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, Partition, ToolAnswer, ToolError
from hetrun.vendors._read.run import ToolRun

_DEVICE = re.compile(r"(?:GPU|XPU|DCU|MLU|GCU)[ #]{1,2}([0-9]{1,3})(?::|\s)\s{0,8}(\S.{0,300})")
_UUID = re.compile(  # in brackets, or bare at the end of the line
    r"\(UUID: ([0-9A-Za-z-]{8,60})\)|(?<!UUID:)\s((?:GPU|XPU)-[0-9a-f]{8}-[0-9a-f-]{27})$"
)
_SLICE = re.compile(
    r"\s{1,8}MIG (\S{1,40})\s{1,20}Device\s{1,8}([0-9]{1,3}): \(UUID: (MIG-[0-9A-Za-z/-]{8,90})\)"
)
_CUT = re.compile(r"(?:GPU|XPU|DCU|MLU|GCU)[ #]{1,2}[0-9]{1,3}(?:\s|:|$)|\s{1,8}MIG\s[0-9]")


def read_listing(run: ToolRun) -> ToolAnswer | None:
    """Read such lines; None if there is none. A line that stops early counts as a loss, not as a device."""
    devices: list[FoundDevice] = []
    num_broken = 0
    above: FoundDevice | None = None
    is_whole = True
    for line in run.lines:
        match, part = _DEVICE.fullmatch(line.rstrip()), _SLICE.fullmatch(line.rstrip())
        is_whole = match is not None or part is not None or not line.strip()
        if match is not None:
            above = _device(int(match[1]), match[2])
            devices += [above] if above else []
            num_broken += above is None
        elif part is not None and above is not None:
            slices = (
                *above.partitions,
                Partition(profile=part[1], ordinal=int(part[2]), uuid=part[3]),
            )
            above = devices[-1] = replace(above, partitions=slices)
        elif _CUT.match(line):
            num_broken += 1
            above = above if line.startswith(" ") else None
    if not devices and not num_broken:
        return None
    warnings = ["mig_enabled"] if any(device.partitions for device in devices) else []
    warnings += ["output_unterminated"] if run.open_end and devices and not is_whole else []
    return ToolAnswer(
        devices=tuple(devices),
        error=ToolError.PARTIAL_DEVICE_ERROR if num_broken else None,
        warnings=tuple(warnings),
    )


def _device(number: int, rest: str) -> FoundDevice | None:
    """Split 'NAME [address] [state] (UUID: ...)'; None if neither id nor address is whole."""
    uuid, bus_id = _UUID.search(rest), text.bdf(rest)
    if uuid is None and bus_id is None:
        return None
    before = rest[: uuid.start()] if uuid else rest
    words = list(takewhile(lambda word: text.bdf(word) is None, before.split()))
    return FoundDevice(
        index=number,
        model=text.name(" ".join(words)),
        bus_id=bus_id,
        uuid=(uuid[1] or uuid[2]) if uuid else None,
    )
