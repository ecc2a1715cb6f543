"""Kunlunxin XPUs, as their `xpu_smi` shows them. Intel has another tool of the same name; the PCI scan tells."""

from __future__ import annotations

import re
from dataclasses import replace

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.blocks import read_smi_text, read_smi_xml
from hetrun.vendors._read.boxes import banner, read_smi
from hetrun.vendors._read.listing import read_listing
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor

_WORDS = re.compile(r'"([^"]{0,80})"(?=\s|$)|(\S{1,80})')
_XRE = re.compile(r"XPU-RT Version\s{0,40}: {1,4}([0-9][0-9.]{0,20})\s")
_INDEX, _TOTAL, _MODEL = 2, 18, 21  # places in a line of `-m`, from 0


def parse(run: ToolRun) -> ToolAnswer:
    """Read `-m` lines, XML, the table (whose second memory pair is the L3 cache), `-q` or `-L`."""
    answer = (
        _lines(run)
        or read_smi_xml(run)
        or read_smi(run, driver=banner(run.lines, "Driver Version:"))
        or read_smi_text(run, "XPU ")
        or read_listing(run)
        or ToolAnswer()
    )
    xre = _XRE.search(run.stdout) if answer.devices else None
    return replace(answer, sdk={"xre": xre[1]}) if xre else answer


def _lines(run: ToolRun) -> ToolAnswer | None:
    """Read one line per device: fields by place, the model in quotes."""
    devices: list[FoundDevice] = []
    num_broken = 0
    for line in run.lines:
        first = line.partition(" ")[0]
        if text.bdf(first) is None or len(line.split()) < 3:
            continue
        device = _line(line)
        devices += [device] if device else []
        num_broken += device is None
    if not devices and not num_broken:
        return None
    error = ToolError.PARTIAL_DEVICE_ERROR if num_broken else None
    return ToolAnswer(devices=tuple(devices), error=error)


def _line(line: str) -> FoundDevice | None:
    words = list(_WORDS.finditer(line))
    if len(words) <= _MODEL or words[_MODEL][1] is None:
        return None
    number, memory = text.index(words[_INDEX][2]), text.memory(words[_TOTAL][2], "MiB")
    if number is None or memory is None:
        return None
    return FoundDevice(
        index=number,
        model=text.name(words[_MODEL][1]),
        memory_bytes=memory,
        bus_id=text.bdf(words[0][2]),
    )


_L = Confidence.LOW
_PATHS = ("/usr/local/bin", "/usr/local/xpu/bin", "/usr/local/xpu-*/bin")

VENDOR = Vendor(
    name="kunlunxin",
    title="Kunlunxin",
    parse=parse,
    tools=("xpu_smi", "xpu-smi"),
    probe_commands=(
        ProbeCommand("xpu_smi", _PATHS),
        ProbeCommand("xpu_smi -m", _PATHS),
        ProbeCommand("xpu-smi", _PATHS),
    ),
    torch_device="cuda",
    torch_plugin=None,
    collective_backend="nccl",
    collective_family="bkcl",
    visible_devices_env="CUDA_VISIBLE_DEVICES",
    nic_env={"BKCL_SOCKET_IFNAME": "{nic}"},
    pci_ids=PciIds(
        vendors=("1d22",),
        company="kunlunxin",
        devices={"3684": "Kunlun", "3685": "Kunlun2 VF", "3688": "P800"},
        classes=("0300", "0302", "0380", "1200", "07"),
        skip={"1380": "storage"},
    ),
    device_nodes=("/dev/xpu[0-9]*", "/dev/xpuctrl"),
    kernel_modules=("kunlun",),
    topology_command=ProbeCommand("xpu-smi topo -m", _PATHS),
    peer_memory_modules=("kunlun_peermem",),
    sdk_roots=("/usr/local/xpu",),
    sdk_env=("XPU_HOME",),
    models=(
        Chip("P800", ("p800",), 98304, 345, None, _L, "press; an older 128 exists", "fp16"),
        Chip("R200", ("r200", "r300"), 32768, 128, 0.5, _L, "not verified", "fp16"),
    ),
    unverified=(
        "nic_env whether it can ask for an exact name",
        "pci_ids of vendor id 2057",
        "sdk_env",
        "probe_commands fields after the model in -m",
    ),
    notes=(
        "torch-xmlir makes the device appear as cuda; XPU_VISIBLE_DEVICES is used by some stacks.",
        "The table's second 'used / total' pair is the L3 cache.",
    ),
)
