"""Tenstorrent cards, as `tt-smi` snapshots show them. They tell no memory size, and remote chips have no PCI address."""

from __future__ import annotations

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.jsontext import documents, inside, items
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor


def parse(run: ToolRun) -> ToolAnswer:
    """Read the snapshot; devices stand in order of their number."""
    for document in documents(run):
        listed = inside(document, "device_info")
        if not isinstance(listed, list):
            continue
        if not listed:
            return ToolAnswer(error=ToolError.NO_DEVICES)
        driver = text.name(inside(document, "host_info", "Driver"))
        devices = tuple(
            FoundDevice(
                index=at,
                model=text.name(inside(item, "board_info", "board_type")),
                driver=driver,
                bus_id=text.bdf(inside(item, "board_info", "bus_id")),
            )
            for at, item in enumerate(items(listed))
        )
        return ToolAnswer(devices=devices, warnings=("memory_unknown",))
    return ToolAnswer()


_NONE = Confidence.UNKNOWN

VENDOR = Vendor(
    name="tenstorrent",
    title="Tenstorrent",
    parse=parse,
    tools=("tt-smi",),
    probe_commands=(
        ProbeCommand("tt-smi -s --snapshot_no_tty", ("/usr/local/bin",), needs_root=True),
        ProbeCommand("tt-smi -s", ("/usr/local/bin",), needs_root=True),
    ),
    torch_device="xla",
    torch_plugin="torch_xla",
    collective_backend="xla",
    collective_family="tenstorrent",
    visible_devices_env="TT_VISIBLE_DEVICES",
    pci_ids=PciIds(
        vendors=("1e52",),
        company="tenstorrent",
        devices={"401e": "Wormhole", "b140": "Blackhole", "faca": "Grayskull"},
    ),
    device_nodes=("/dev/tenstorrent/[0-9]*",),
    kernel_modules=("tenstorrent",),
    models=(
        Chip("n150", ("n150",), None, None, None, _NONE, "not reported"),
        Chip("n300", ("n300",), None, None, None, _NONE, "not reported"),
        Chip("p150", ("p150", "p150a", "p150b"), None, None, None, _NONE, "not reported"),
    ),
    errors=(("no tenstorrent driver", ToolError.DRIVER_MISSING),),
    unverified=("torch_device", "torch_plugin", "visible_devices_env", "errors"),
    notes=("tt-smi is a Python program and may need root.",),
)
