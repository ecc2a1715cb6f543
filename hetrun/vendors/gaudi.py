"""Intel Gaudi accelerators, as `hl-smi` shows them. Processes select them by module id, not by index."""

from __future__ import annotations

from hetrun.vendors._read.answer import ToolAnswer, ToolError
from hetrun.vendors._read.boxes import banner, read_smi
from hetrun.vendors._read.rows import read_rows
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor


def parse(run: ToolRun) -> ToolAnswer:
    """Read the csv of `-Q` or the plain table, which lacks the module id."""
    return (
        read_rows(run, want=("memory", "model"))
        or read_smi(run, driver=banner(run.lines, "Driver Version:"))
        or ToolAnswer()
    )


_H = Confidence.HIGH
_SRC = "public tables of vendor figures"
_QUERY = "hl-smi -Q index,module_id,uuid,name,driver_version,memory.total,bus_id -f csv,noheader"

VENDOR = Vendor(
    name="gaudi",
    title="Intel Gaudi",
    parse=parse,
    tools=("hl-smi",),
    probe_commands=(ProbeCommand(_QUERY, ("/usr/bin",)), ProbeCommand("hl-smi", ("/usr/bin",))),
    torch_device="hpu",
    torch_plugin="habana_frameworks.torch",
    collective_backend="hccl",
    collective_family="hccl-gaudi",
    visible_devices_env="HABANA_VISIBLE_MODULES",
    visible_devices_id="module_id",
    nic_env={"HCCL_SOCKET_IFNAME": "{nic}"},
    container_devices_env=("HABANA_VISIBLE_DEVICES",),
    pci_ids=PciIds(
        vendors=("1da3",),
        company="habana",
        devices={
            "1000": "Gaudi",
            "1010": "Gaudi",
            "1020": "Gaudi2",
            "1060": "Gaudi3",
            "1063": "Gaudi3",
        },
    ),
    device_nodes=("/dev/accel/accel[0-9]*", "/dev/hl[0-9]*"),
    kernel_modules=("habanalabs",),
    models=(
        Chip("Gaudi", ("hl-205", "gaudi"), 32768, None, None, Confidence.UNKNOWN, "not collected"),
        Chip("Gaudi2", ("hl-225", "hl-225b", "hl-225h", "gaudi2"), 98304, 432, 2.46, _H, _SRC),
        Chip("Gaudi3", ("hl-325", "hl-325l", "gaudi3"), 131072, 1677, 3.7, _H, _SRC),
    ),
    errors=(
        ("failed to initialize hlml", ToolError.DRIVER_MISSING),
        ("driver version mismatch", ToolError.DRIVER_MISMATCH),
    ),
    unverified=(
        "nic_env whether it can ask for an exact name",
        "errors",
    ),
    notes=(
        "Partial use is supported in groups of 2 or 4 modules only.",
        "The index may change after a reboot, the module id does not.",
        "Gaudi3 reaches 459 TFLOP/s in FP16: use BF16.",
    ),
)
