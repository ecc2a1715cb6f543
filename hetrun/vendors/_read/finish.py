"""From a parser's answer to the final one: error class, sane and unique devices, no wrong device in silence."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hetrun.vendors._read.answer import FoundDevice, LostDevice, ToolAnswer, ToolError
from hetrun.vendors._read.failures import failure, lost_devices, missing_tool, telling_lines
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Vendor

log = logging.getLogger(__name__)

_TIMEOUT_CODES = (124, 137, 143)  # timeout(1), killed, terminated
# of a vendor's library that says no more: most often there is no driver behind it
_NOT_STARTED = ("failed to initialize", "initialization failed", "failed to init ")
_CRASH_CODES = (132, 134, 135, 136, 139)


def read(vendor: Vendor, run: ToolRun) -> ToolAnswer:
    """Read one run of a vendor's tool."""
    answer = _unique(_parsed(vendor, run))
    lines = telling_lines(run)
    if answer.devices or answer.cpu is not None:
        answer = _with_devices(answer, run, lines)
        if any(device.model is None for device in answer.devices):
            answer = replace(answer, warnings=(*answer.warnings, "model_unknown"))
    else:
        answer = _without_devices(vendor, run, answer, lines)
    if run.cut:
        answer = replace(answer, warnings=(*answer.warnings, "output_cut"))
        if answer.devices and answer.error is None:
            answer = replace(answer, error=ToolError.PARTIAL_DEVICE_ERROR)
    devices = tuple(
        replace(device, visible_id=visible_id(vendor, device)) for device in answer.devices
    )
    return replace(answer, devices=devices, warnings=tuple(dict.fromkeys(answer.warnings)))


def _parsed(vendor: Vendor, run: ToolRun) -> ToolAnswer:
    """Call the vendor's parser; a mistake in it must not cost the answers of all other hosts and tools."""
    try:
        return vendor.parse(run)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        log.exception("%s: the parser failed on the output of %s", vendor.name, run.words)
        return ToolAnswer(error=ToolError.TOOL_USAGE, warnings=("parser_failed",))


def visible_id(vendor: Vendor, device: FoundDevice) -> str | None:
    """Return what the vendor's visible-devices variable takes for this device; None if it needs a slice."""
    if device.visible_id is not None:
        return device.visible_id
    if device.partitions or device.sliced:
        return None  # the whole device cannot be used
    if vendor.visible_devices_id == "module_id":
        return None if device.module_id is None else str(device.module_id)
    if vendor.visible_devices_id == "cores":
        return None  # only the parser knows them
    return device.uuid if vendor.visible_devices_id == "uuid" else str(device.index)


def _unique(answer: ToolAnswer) -> ToolAnswer:
    """Keep one device per index; where two differ under one index, neither can be believed."""
    devices = list(dict.fromkeys(answer.devices))
    counts = Counter(device.index for device in devices)
    kept = tuple(device for device in devices if counts[device.index] == 1)
    if len(kept) == len(devices):
        return replace(answer, devices=kept)
    twice = sorted(number for number, count in counts.items() if count > 1)
    return replace(
        answer,
        devices=kept,
        error=ToolError.PARTIAL_DEVICE_ERROR,
        warnings=(*answer.warnings, *(f"index_twice:{number}" for number in twice)),
    )


def _with_devices(answer: ToolAnswer, run: ToolRun, lines: Sequence[str]) -> ToolAnswer:
    """Some devices are there: add what was lost, or that the tool did not come to its end."""
    lost: tuple[LostDevice, ...] = answer.lost or lost_devices(lines)
    error, warnings = answer.error, answer.warnings
    if lost:
        error = ToolError.PARTIAL_DEVICE_LOST
    elif run.rc in _TIMEOUT_CODES:
        error = ToolError.TIMEOUT
    elif run.rc:
        warnings = (*warnings, f"exit_code:{run.rc}")
    return replace(answer, error=error, lost=lost, warnings=warnings)


def _without_devices(
    vendor: Vendor, run: ToolRun, answer: ToolAnswer, lines: Sequence[str]
) -> ToolAnswer:
    """Name the reason; warn where the tool said something that is not understood here."""
    error = _why_none(vendor, run, answer, lines)
    warnings = answer.warnings
    if error is None:
        error = ToolError.TOOL_USAGE
        warnings = (*warnings, "tool_crashed" if run.rc in _CRASH_CODES else "output_unreadable")
    lost = lost_devices(lines) if error is ToolError.DEVICE_LOST else ()
    return replace(answer, error=error, warnings=warnings, lost=lost)


def _why_none(
    vendor: Vendor, run: ToolRun, answer: ToolAnswer, lines: Sequence[str]
) -> ToolError | None:
    """Return the reason for an answer without devices, None if nothing tells it."""
    found = failure(lines, vendor.errors)
    if run.rc == 127 or missing_tool(run, vendor.tools):
        return found if found is ToolError.SHARED_LIB_MISSING else ToolError.TOOL_MISSING
    if run.rc in _TIMEOUT_CODES:
        return ToolError.TIMEOUT
    if run.rc == 126:
        return found or ToolError.PERMISSION_DENIED
    if found is not None or answer.error is not None:
        return found or answer.error
    if run.rc is not None and run.rc in vendor.rc_errors:
        return vendor.rc_errors[run.rc]
    if any(part in line for line in lines for part in _NOT_STARTED):
        return ToolError.DRIVER_MISSING
    silent = not run.stdout.strip() and not run.stderr.strip() and not run.rc
    return ToolError.NO_DEVICES if silent or _only_header(run) else None


def _only_header(run: ToolRun) -> bool:
    """True for a csv query that printed its header and no row."""
    lines = [line for line in run.lines if line.strip()]
    return bool(run.fields) and len(lines) == 1 and lines[0].lower().startswith(run.fields[0])
