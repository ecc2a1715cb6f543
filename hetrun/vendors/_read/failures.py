"""Error texts to error classes, in the words that all vendors share. A vendor's own words stand in its file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import LostDevice, ToolError
from hetrun.vendors._read.run import MAX_LINE, ToolRun

_MAX_LINES = 400  # a tool that fails says so early, or at the very end

_SHARED_LIB = (
    "error while loading shared libraries",
    "cannot open shared object file",
    "couldn't find libnvidia-ml",
    "could not find libnvidia-ml",
    "symbol lookup error",
    "undefined symbol:",
    "shared library not found",
    "wrong elf class",
    "failed to load lib",
    "unable to load lib",
    "cannot load lib",
    "could not load lib",
    "no module named",
)
_MISMATCH = ("version mismatch", "versions do not match")
_DEVICE_LOST = (
    "unable to determine the device handle for gpu",
    "gpu is lost",
    "fallen off the bus",
    "device is lost",
)
_DRIVER = (
    "couldn't communicate with the",
    "driver not initialized",
    "driver not loaded",
    "driver is not loaded",
    "driver is not running",
    "driver not found",
    "driver not running",
    "no driver",
    "_no_driver",
    "not found in modules",
    "module not loaded",
    "module is not loaded",
    "driver is not installed",
    "driver not installed",
)
_BUSY = (
    "device or resource busy",
    "device is busy",
    "resource busy",
    "is being used by",
    "already in use",
)
_PERMISSION = (
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
)
_USAGE = (
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
    "exec format error",
)
_MISSING_AFTER = (  # what shells say after the name of a command that they do not find
    "command not found",
    "not found",
    "no such file or directory",
    "is not recognized as",
    "executable file not found",
    "未找到命令",
    "找不到命令",
    "没有那个文件或目录",
    "没有这个文件或目录",
    "コマンドが見つかりません",
    "kommando nicht gefunden",
    "commande introuvable",
    "orden no encontrada",
    "команда не найдена",
)
_MISSING_BEFORE = ("command not found", "unknown command")
_QUOTES = " '\"`:\u2018\u2019\u201c\u201d\uff1a"  # the last is a full-width colon
_NO_DEVICE = re.compile(
    r"\b(?:no|not find any|not found any|0|zero)\b[^.:;,]{0,40}"
    r"\b(?:device|gpu|gcu|card|npu|mlu|dcu|hcu|xpu|accelerator|chip|board)s?\b"
    r"[^.:;,]{0,30}\b(?:found|detected|discovered|present|available|attached|specified)\b"
    r"|\bno (?:supported )?(?:device|gpu|accelerator|card|board|npu|dcu|hcu)s?[.!]?\s{0,4}$"
    r"|\b(?:can ?not|could not|couldn't|unable to|failed to) find\b[^.:;,]{0,40}"
    r"\b(?:device|gpu|gcu|card|npu|mlu|dcu|hcu|xpu|accelerator)s?\b"
    r"|_no_device\b|\bno device discovered\b|\bfailed to find any\b[^.:;,]{0,30}\bdevice"
)
_NOT_LOADED = re.compile(r"\b(?:unable to|failed to|cannot|can't|could not|couldn't) load\b")
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
    """True where a shell says, in one of some languages, that it knows no such command."""
    for line in telling_lines(run)[:20]:
        for tool in tools:
            before, name, after = line.rpartition(tool)
            if name and (
                after.lstrip(_QUOTES).startswith(_MISSING_AFTER)
                or before.rstrip(_QUOTES).endswith(_MISSING_BEFORE)
            ):
                return True
    return False


def _has(*parts: str) -> Callable[[str], bool]:
    return lambda line: any(part in line for part in parts)


# The first rule that holds for any line gives the class: most telling first.
_RULES: tuple[tuple[ToolError, Callable[[str], bool]], ...] = (
    (ToolError.SHARED_LIB_MISSING, _has(*_SHARED_LIB)),
    (
        ToolError.SHARED_LIB_MISSING,
        lambda line: "librar" in line and _NOT_LOADED.search(line[:400]) is not None,
    ),
    (ToolError.DRIVER_MISMATCH, _has(*_MISMATCH)),
    (ToolError.DEVICE_LOST, _has(*_DEVICE_LOST)),
    (ToolError.DRIVER_MISSING, _has(*_DRIVER)),
    (
        ToolError.DRIVER_MISSING,
        lambda line: "/dev/" in line and "no such file or directory" in line,
    ),
    (
        ToolError.DEVICE_ACCESS_LOST,
        lambda line: "failed to initialize" in line and "unknown error" in line,
    ),
    (ToolError.DEVICE_BUSY, _has(*_BUSY)),
    (ToolError.PERMISSION_DENIED, _has(*_PERMISSION)),
    (ToolError.NO_DEVICES, lambda line: _NO_DEVICE.search(line[:400]) is not None),
    (ToolError.TOOL_USAGE, _has(*_USAGE)),
    (ToolError.TOOL_USAGE, lambda line: line.startswith("usage:")),
)


def failure(lines: Sequence[str], own: Sequence[tuple[str, ToolError]]) -> ToolError | None:
    """Return the class of the most telling error text, a vendor's own words first."""
    for part, error in own:
        if any(part in line for line in lines):
            return error
    for error, holds in _RULES:
        if any(holds(line) for line in lines):
            return error
    return None


def lost_devices(lines: Sequence[str]) -> tuple[LostDevice, ...]:
    """Return the devices that the tool names as gone; the address may be glued to 'GPU'."""
    found: list[LostDevice] = []
    for line in lines:
        if not any(part in line for part in _DEVICE_LOST) or "[gpu is lost]" in line:
            continue  # the latter is a cell of a row that has a number
        match = _LOST.search(line)
        device = LostDevice(
            index=int(match[1]) if match and match[1] else None,
            bus_id=text.bdf(match[2]) if match else None,
        )
        if device not in found:
            found.append(device)
    return tuple(found)
