"""MetaX GPUs, as `mx-smi` (or its rebrand `ht-smi`) shows them. No JSON is known; the table has three layouts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.blocks import complete_lines, pair, read_blocks
from hetrun.vendors._read.boxes import PAIR, banner
from hetrun.vendors._read.listing import read_listing
from hetrun.vendors._read.pairs import read_pairs
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor

_NUMBERED = re.compile(r"([0-9]{1,3})(?:\s{1,20}(\S.{0,80}))?")
_BLOCK = re.compile(r"GPU#([0-9]{1,3})\s{1,12}(\S{1,40}(?: \S{1,40})?)\s{1,12}(\S{10,16})")
_PERSISTENCE = ("On", "Off")


def parse(run: ToolRun) -> ToolAnswer:
    """Read the table, `--show-memory` or `-L`."""
    answer = _table(run) or _memory_blocks(run) or read_listing(run) or ToolAnswer()
    driver = banner(run.lines, "Kernel Mode Driver Version:")
    maca = banner(run.lines, "MACA Version:")
    devices = tuple(replace(device, driver=driver) for device in answer.devices)
    sdk = {"maca": maca} if maca and devices else {}
    told = _told(run.lines)
    missing = told is not None and told != len(devices) and bool(devices)
    error = ToolError.PARTIAL_DEVICE_ERROR if missing else answer.error
    return replace(answer, devices=devices, sdk=sdk, error=error)


def _told(lines: Sequence[str]) -> int | None:
    """Return how many devices the tool says there are ('Attached GPUs : 8')."""
    pairs = (found for line in lines[:40] if (found := pair(line)))
    return next((text.number(value) for key, value in pairs if key == "attached gpus"), None)


def _table(run: ToolRun) -> ToolAnswer | None:
    """Read pairs of lines. Up to 2.2.6 'GPU name | bus | ..', from 2.2.9 'Board name | GPU | bus | ..'."""
    answer = read_pairs(
        run.lines,
        is_first=lambda row: len(row) >= 3 and _bus_at(row) is not None,
        join=_device,
        end="Process",
    )
    if answer is None:
        return None
    unknown = any(device.memory_bytes is None for device in answer.devices)
    return replace(answer, warnings=("memory_unknown",) if unknown else ())


def _bus_at(row: Sequence[str]) -> int | None:
    return next((at for at, cell in enumerate(row) if at and text.bdf(cell)), None)


def _device(above: Sequence[str], below: Sequence[str] | None) -> FoundDevice | None:
    """Join the two lines; the device number is in the cell before the bus address."""
    at = _bus_at(above)
    if at is None or below is None or len(below) != len(above):
        return None
    named, numbered = _NUMBERED.fullmatch(above[0]), _NUMBERED.fullmatch(above[at - 1])
    memory = PAIR.search(below[at])
    if named is None or numbered is None or (memory is None and not text.is_unknown(below[at])):
        return None
    words = (named[2] or "").split()
    words = words[:-1] if words and words[-1] in _PERSISTENCE else words
    return FoundDevice(
        index=int(numbered[1]),
        model=text.name(" ".join(words)),
        memory_bytes=text.memory(memory[1]) if memory else None,
        bus_id=text.bdf(above[at]),
    )


def _memory_blocks(run: ToolRun) -> ToolAnswer | None:
    """Read `--show-memory`: blocks 'GPU#0 name bus', sizes in KBytes."""
    _, blocks = read_blocks(complete_lines(run), "GPU#")
    devices = []
    for block in blocks:
        title = _BLOCK.match(block.title)
        total = text.memory(block.get("vram total", "vis_vram total", "total"), "KB")
        if title is not None and total is not None and text.bdf(title[3]):
            device = FoundDevice(
                index=int(title[1]),
                model=text.name(title[2]),
                memory_bytes=total,
                bus_id=text.bdf(title[3]),
            )
            devices.append(device)
    return ToolAnswer(devices=tuple(devices)) if devices else None


_L, _NONE = Confidence.LOW, Confidence.UNKNOWN
_PATHS = ("/usr/bin", "/opt/mxdriver/bin", "/opt/maca/bin")

VENDOR = Vendor(
    name="metax",
    title="MetaX",
    parse=parse,
    tools=("mx-smi", "ht-smi"),
    probe_commands=(
        ProbeCommand("mx-smi", _PATHS),
        ProbeCommand("ht-smi", _PATHS),
        ProbeCommand("mx-smi -L", _PATHS),
    ),
    torch_device="cuda",
    torch_plugin=None,
    collective_backend="nccl",
    collective_family="mccl-metax",
    visible_devices_env="CUDA_VISIBLE_DEVICES",
    nic_env={"MCCL_SOCKET_IFNAME": "{nic}"},
    container_devices_env=("METAX_VISIBLE_DEVICES",),
    pci_ids=PciIds(vendors=("9999",), company="metax", devices={"0a01": "C500", "4040": "C500X"}),
    device_nodes=("/dev/mxcd", "/dev/mxgd", "/dev/dri/renderD*"),
    kernel_modules=("metax",),
    topology_command=ProbeCommand("mx-smi topo -m", _PATHS),
    sdk_roots=("/opt/maca",),
    sdk_env=("MACA_PATH",),
    models=(
        Chip("C500", ("c500", "mxc500"), 65536, 240, 1.8, _L, "derived from INT8", "fp16"),
        Chip("C500X", ("c500x",), None, None, None, _NONE, "not published"),
        Chip("C550", ("c550", "mxc550"), 65536, None, 1.8, _NONE, "sources conflict"),
        Chip("C600 sub device", ("c600",), 73728, None, None, _NONE, "one report"),
    ),
    unverified=(
        "nic_env whether it can ask for an exact name",
        "pci_ids.devices of C500X",
        "container_devices_env",
        "probe_commands.paths",
    ),
    notes=(
        "The device number is the GPU column, not the board.",
        "A shared slice (sGPU) shows its quota as memory.",
        "MACA_PATH must be set; MACA_VISIBLE_DEVICES is another name of the variable.",
    ),
)
