"""Iluvatar CoreX GPUs, as `ixsmi` shows them: an nvidia-smi look-alike. Its layouts are read in `_read`."""

from __future__ import annotations

from dataclasses import replace

from hetrun.vendors._read.answer import ToolAnswer
from hetrun.vendors._read.blocks import read_smi_text, read_smi_xml
from hetrun.vendors._read.boxes import banner, read_smi
from hetrun.vendors._read.listing import read_listing
from hetrun.vendors._read.rows import read_rows
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor


def parse(run: ToolRun) -> ToolAnswer:
    """Read csv, XML, list, text or table, by the layout that is there."""
    return (
        read_smi_xml(run)
        or read_rows(run, want=("memory", "model"))
        or _table(run)
        or read_listing(run)
        or read_smi_text(run, "GPU ")
        or ToolAnswer()
    )


def _table(run: ToolRun) -> ToolAnswer | None:
    """Read the plain table. 'CUDA Version' is the level that the SDK imitates."""
    answer = read_smi(run, driver=banner(run.lines, "Driver Version:"))
    cuda = banner(run.lines, "CUDA Version:")
    return replace(answer, sdk={"cuda_compat": cuda}) if answer and cuda else answer


_M, _L = Confidence.MEDIUM, Confidence.LOW
_QUERY = "ixsmi --query-gpu=index,name,uuid,memory.total,driver_version,gpu_bus_id --format=csv"
_PATHS = ("/usr/local/corex/bin", "/usr/local/corex-*/bin")

VENDOR = Vendor(
    name="iluvatar",
    title="Iluvatar CoreX",
    parse=parse,
    tools=("ixsmi",),
    probe_commands=(
        ProbeCommand(_QUERY, _PATHS),
        ProbeCommand("ixsmi", _PATHS),
        ProbeCommand("ixsmi -q -x", _PATHS),
    ),
    torch_device="cuda",
    torch_plugin=None,
    collective_backend="nccl",
    collective_family="ixccl",
    visible_devices_env="CUDA_VISIBLE_DEVICES",
    nic_env={"NCCL_SOCKET_IFNAME": "={nic}"},
    container_devices_env=("IX_VISIBLE_DEVICES",),
    pci_ids=PciIds(
        vendors=("1e3e",), company="iluvatar", devices={"0002": "MR-V100", "0003": "BI-V150"}
    ),
    device_nodes=("/dev/iluvatar[0-9]*", "/dev/itrctl"),
    kernel_modules=("iluvatar",),
    topology_command=ProbeCommand("ixsmi topo -m", _PATHS),
    sdk_roots=("/usr/local/corex",),
    sdk_env=("COREX_HOME",),
    models=(
        Chip("BI-V100", ("bi-v100",), 32768, 147, 1.2, _M, "vendor page, second hand", "fp16"),
        Chip("BI-V150 die", ("bi-v150",), 32768, 96, 0.8, _M, "half of a card, measured 98"),
        Chip("MR-V100", ("mr-v100",), 32768, 96, 0.8, _L, "second hand", "fp16"),
    ),
    unverified=("pci_ids.devices", "kernel_modules", "topology_command the layout of its matrix"),
    notes=(
        "A BI-V150 board is two devices of 32 GiB.",
        "Ships a look-alike of CUDA: torch.cuda working does not mean NVIDIA.",
    ),
)
