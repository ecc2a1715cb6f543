"""Error texts to error classes, in the words that all vendors share. A vendor's own words stand in its file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import LostDevice, ToolError
from hetrun.vendors._read.run import MAX_LINE, ToolRun

_MAX_LINES = 400  # a tool that fails says so early, or at the very end

# Lower-case parts of a line, most telling first: the first class that matches any line is the answer.
_TEXTS: tuple[tuple[ToolError, tuple[str, ...]], ...] = (
    (
        ToolError.SHARED_LIB_MISSING,
        (
            "error while loading shared libraries",
            "cannot open shared object file",
            "couldn't find libnvidia-ml",
            "could not find libnvidia-ml",
            "symbol lookup error",
            "undefined symbol:",
            "shared library not found",
            "wrong elf class",
        ),
    ),
    (
        ToolError.DRIVER_MISMATCH,
        ("driver/library version mismatch", "version mismatch", "versions do not match"),
    ),
    (
        ToolError.DEVICE_LOST,
        (
            "unable to determine the device handle for gpu",
            "gpu is lost",
            "fallen off the bus",
            "device is lost",
        ),
    ),
    (
        ToolError.DRIVER_MISSING,
        (
            "couldn't communicate with the",
            "driver not initialized",
            "driver not loaded",
            "driver is not loaded",
            "driver is not running",
            "driver not found",
            "driver not running",
            "no driver",
            "not found in modules",
            "module not loaded",
            "module is not loaded",
            "driver is not installed",
            "driver not installed",
        ),
    ),
    (
        ToolError.DEVICE_BUSY,
        (
            "-8020",
            "device or resource busy",
            "device is busy",
            "resource busy",
            "is being used by",
            "already in use",
        ),
    ),
    (
        ToolError.PERMISSION_DENIED,
        (
            "insufficient permission",
            "permission denied",
            "operation not permitted",
            "access denied",
            "root privilege",
            "requires root",
            "must be root",
            "run as root",
            "权限不够",
            "拒绝访问",
            "不允许的操作",
            "权限被拒绝",
            "许可被拒绝",
        ),
    ),
    (
        ToolError.TOOL_USAGE,
        (
            "not_supported: cannot print",
            "no json data to report",
            "is not a valid field to query",
            "invalid combination of input arguments",
            "unrecognized option",
            "unrecognized argument",
            "invalid option",
            "unknown option",
            "unknown command",
            "unknown flag",
            "invalid argument",
            "unsupported option",
            "not a recognized",
            "no such option",
            "option not recognized",
            "flag provided but not defined",
            "unexpected argument",
        ),
    ),
)
_MISSING_TEXTS = (
    "command not found",
    ": not found",
    "unknown command",
    "未找到命令",
    "找不到命令",
    "no such file or directory",
    "没有那个文件或目录",
    "not recognized as",
    "没有这个文件或目录",
)
_NO_DEVICE = re.compile(
    r"\b(?:no|not find any|not found any|0|zero)\b[^.:;,]{0,40}"
    r"\b(?:device|gpu|gcu|card|npu|mlu|dcu|hcu|xpu|accelerator|chip|board)s?\b"
    r"[^.:;,]{0,30}\b(?:found|detected|discovered|present|available|attached|specified)\b"
    r"|\bno (?:supported )?(?:device|gpu|accelerator|card|board|npu|dcu|hcu)s?[.!]?\s{0,4}$"
    r"|\bno device discovered\b|\bfailed to find any\b[^.:;,]{0,30}\bdevice"
)
_LOST = re.compile(
    r"(?:gpu|device|card)\s{0,4}#?(?:([0-9]{1,3})\s{0,2}:\s{0,4})?"
    r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
)


def telling_lines(run: ToolRun) -> list[str]:
    """Return the lines in which a tool says why it failed, lower case."""
    lines: list[str] = []
    for stream in (run.stderr, run.stdout):
        every = [line.strip().lower() for line in stream.split("\n") if len(line) <= MAX_LINE]
        lines += every if len(every) <= _MAX_LINES else every[: _MAX_LINES // 2] + every[-200:]
    return [line for line in lines if line]


def missing_tool(run: ToolRun, tools: Sequence[str]) -> bool:
    """True where a shell says, in whatever language, that it knows no such command."""
    return any(
        any(tool in line for tool in tools) and any(part in line for part in _MISSING_TEXTS)
        for line in telling_lines(run)[:20]
    )


def failure(lines: Sequence[str], own: Sequence[tuple[str, ToolError]]) -> ToolError | None:
    """Return the class of the most telling error text, a vendor's own words first."""
    for part, error in own:
        if any(part in line for line in lines):
            return error
    for error, parts in _TEXTS[:4]:
        if any(part in line for line in lines for part in parts):
            return error
    if any("failed to initialize" in line and "unknown error" in line for line in lines):
        return ToolError.DEVICE_ACCESS_LOST
    for error, parts in _TEXTS[4:6]:
        if any(part in line for line in lines for part in parts):
            return error
    if any(_NO_DEVICE.search(line[:400]) for line in lines):
        return ToolError.NO_DEVICES
    usage = any(part in line for line in lines for part in _TEXTS[6][1])
    usage = usage or any(line.startswith("usage:") for line in lines)
    return ToolError.TOOL_USAGE if usage else None


def lost_devices(lines: Sequence[str]) -> tuple[LostDevice, ...]:
    """Return the devices that the tool names as gone; the address may be glued to 'GPU'."""
    found: list[LostDevice] = []
    for line in lines:
        if not any(part in line for part in _TEXTS[2][1]):
            continue
        match = _LOST.search(line)
        device = LostDevice(
            index=int(match[1]) if match and match[1] else None,
            bus_id=text.bdf(match[2]) if match else None,
        )
        if device not in found:
            found.append(device)
    return tuple(found)
