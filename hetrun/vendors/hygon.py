"""Hygon DCUs, as `hy-smi` and the rocm-smi inside old DTKs show them. Layouts are read in `_read/rocm.py`."""

from __future__ import annotations

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer
from hetrun.vendors._read.blocks import complete_lines
from hetrun.vendors._read.rocm import read_rocm
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor


def parse(run: ToolRun) -> ToolAnswer:
    """Read JSON, csv or text; last the plain table, which tells neither model nor memory."""
    cards = read_rocm(run, maker="haiguang", other="advanced micro")
    return cards or _table(run) or ToolAnswer()


def _table(run: ToolRun) -> ToolAnswer | None:
    """Read 'HCU Temp AvgPwr ...' and the rows below it."""
    devices: list[FoundDevice] = []
    width = 0
    for line in complete_lines(run):
        words = line.split()
        if words[:2] in (["HCU", "Temp"], ["DCU", "Temp"], ["GPU", "Temp"]):
            width = len(words)
        elif width and len(words) == width and (number := text.index(words[0])) is not None:
            devices.append(FoundDevice(index=number, health=text.name(words[-1])))
    if not devices:
        return None
    return ToolAnswer(devices=tuple(devices), warnings=("model_unknown", "memory_unknown"))


_L, _NONE = Confidence.LOW, Confidence.UNKNOWN
_OPTIONS = (
    "--showproductname --showmeminfo vram --showuniqueid --showbus --showdriverversion --json"
)

VENDOR = Vendor(
    name="hygon",
    title="Hygon DCU",
    parse=parse,
    tools=("hy-smi", "rocm-smi"),
    probe_commands=(
        ProbeCommand(f"hy-smi {_OPTIONS}", ("/opt/hyhal/bin", "/usr/local/hyhal/bin")),
        ProbeCommand(f"rocm-smi {_OPTIONS}", ("/opt/dtk/bin",)),
        ProbeCommand("rocm-smi --showproductname --showmeminfo vram", ("/opt/dtk/bin",)),
    ),
    torch_device="cuda",
    torch_plugin=None,
    collective_backend="nccl",
    collective_family="rccl-dtk",
    visible_devices_env="HIP_VISIBLE_DEVICES",
    nic_env={"NCCL_SOCKET_IFNAME": "={nic}"},
    container_devices_env=("HYGON_VISIBLE_DEVICES",),
    pci_ids=PciIds(
        vendors=("1d94",),
        company="hygon",
        devices={
            "55b7": "Z100L",
            "6210": "K100_AI",
            "6211": "K100_AI",
            "6212": "K100_AI",
            "6213": "K100_AI",
            "62b7": "K100",
            "6310": "BW200",
            "631a": "BW1000_H",
            "6320": "BW150",
            "6370": "BW100",
            "637a": "BW101",
            "6430": "BW1100",
            "6431": "BW1000_LC",
            "6436": "BW3000B",
        },
        classes=("0300", "0302", "0380", "1200", "0b40"),
        others="cpu bridges",
    ),
    device_nodes=("/dev/kfd", "/dev/mkfd", "/dev/dri/renderD*"),
    kernel_modules=("hycu", "hydcu"),
    topology_command=ProbeCommand(
        "hy-smi --showbus --showtopotype", ("/opt/hyhal/bin", "/usr/local/hyhal/bin")
    ),
    sdk_roots=("/opt/dtk",),
    sdk_env=("ROCM_PATH",),
    models=(
        Chip("Z100L", ("z100l",), 32752, None, None, _NONE, "memory from tool output"),
        Chip("K100_AI", ("k100_ai",), 65520, 192, 0.9, _L, "press; others say 180 or 128"),
        Chip("K100", ("k100",), None, None, None, _NONE, "not published"),
        Chip("BW1000", ("bw1000", "bw1000_h", "bw1000_lc"), 65520, None, None, _NONE, "one report"),
        Chip("BW1100", ("bw1100",), None, None, None, _NONE, "not published"),
    ),
    unverified=("sdk_env",),
    notes=(
        "The PCI vendor id is also that of Hygon CPUs: bridges, SATA and USB are no devices.",
        "hy-smi prints MiB where rocm-smi prints bytes.",
    ),
)
