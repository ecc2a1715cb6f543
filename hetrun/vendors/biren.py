"""Biren GPUs, as `brsmi` shows them. Only its csv is known from public sources; other layouts are tried by content."""

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
    """Read the csv query; driver and SDK stand in the banner of the plain `brsmi`, if that was run too."""
    driver = banner(run.lines, "Driver Version:")
    answer = (
        read_smi_xml(run)
        or read_rows(run, want=("memory", "model"))
        or read_smi(run, driver=driver)
        or read_listing(run)
        or read_smi_text(run, "GPU ")
        or ToolAnswer()
    )
    devices = tuple(replace(device, driver=device.driver or driver) for device in answer.devices)
    supa = banner(run.lines, "SUPA Version:")
    return replace(answer, devices=devices, sdk={"supa": supa} if supa else {})


_M, _NONE = Confidence.MEDIUM, Confidence.UNKNOWN
_QUERY = "brsmi gpu --query-gpu=index,name,memory.total --format=csv,noheader,nounits"
_PATHS = ("/usr/bin", "/usr/local/birensupa/driver/bin")
_PRESS = "vendor at launch, 2022"

VENDOR = Vendor(
    name="biren",
    title="Biren",
    parse=parse,
    tools=("brsmi",),
    probe_commands=(ProbeCommand(_QUERY, _PATHS), ProbeCommand("brsmi", _PATHS)),
    torch_device="supa",
    torch_plugin="torch_br",
    collective_backend="bccl",
    collective_family="bccl",
    visible_devices_env="SUPA_VISIBLE_DEVICES",
    nic_env={"BCCL_SOCKET_IFNAME": "{nic}"},
    container_devices_env=("BIREN_VISIBLE_DEVICES",),
    pci_ids=PciIds(vendors=("1ee0",), company="biren"),
    device_nodes=("/dev/biren/card_[0-9]*", "/dev/biren-m"),
    kernel_modules=("biren",),
    topology_command=ProbeCommand("brsmi topo -m", _PATHS),
    sdk_roots=("/usr/local/birensupa",),
    sdk_env=("SUPA_BASE", "BIRENSUPA_SDK_VERSION"),
    models=(
        Chip("BR100", ("br100",), 65536, 1024, 1.64, _M, _PRESS),
        Chip("BR104", ("br104",), 32768, 512, 0.82, _M, _PRESS),
        Chip("BR106M", ("biren106m", "br106m", "106m"), 32512, None, None, _NONE, "not published"),
        Chip("BR166M", ("biren166m", "br166m", "166m"), 65536, None, None, _NONE, "not published"),
    ),
    unverified=(
        "nic_env whether it can ask for an exact name",
        "pci_ids device ids and classes",
        "kernel_modules",
        "probe_commands layouts other than the csv",
        "probe_commands.paths",
        "topology_command the layout of its matrix",
    ),
    notes=(
        "BR10x uses torch_br, BR2xx torch_supa; torch's version string may say cu128 without CUDA.",
        "BR106M has no FP16 matrix path: use BF16.",
    ),
)
