"""AWS Trainium and Inferentia, as `neuron-ls` shows them. It tells no model name: the PCI id does."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.boxes import cells, is_border
from hetrun.vendors._read.jsontext import documents, items, record
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor

_CORE_IDS = re.compile(r"[0-9]{1,4}(?:-[0-9]{1,4})?")


def parse(run: ToolRun) -> ToolAnswer:
    """Read `neuron-ls -j`: a list, or (newer tools) an object that holds it."""
    for document in documents(run):
        listed = record(document).get("neuron_devices", document)
        if not isinstance(listed, list):
            continue
        if not listed:
            return ToolAnswer(error=ToolError.NO_DEVICES)
        devices = [device for item in items(listed) if (device := _device(item))]
        if devices:
            return _answer(tuple(devices), len(listed))
    return _table(run) or ToolAnswer()


def _table(run: ToolRun) -> ToolAnswer | None:
    """Read the plain table: its heads stand in two lines, and newer tools put the cores' numbers between."""
    devices: list[FoundDevice] = []
    heads: list[str] = []
    num_rows = 0
    for line in run.lines:
        row = None if is_border(line) else cells(line)
        if row is None or not row[0]:
            num_rows += row is None and line.startswith("| ") and line[2:3].isdigit()
        elif text.index(row[0]) is None:
            above = heads if len(heads) == len(row) else [""] * len(row)
            heads = [
                f"{head} {cell}".strip().lower() for head, cell in zip(above, row, strict=True)
            ]
        else:
            num_rows += 1
            device = _from_row(
                dict(zip(heads, row, strict=False)) if len(heads) == len(row) else {}
            )
            devices += [device] if device else []
    return _answer(tuple(devices), num_rows) if num_rows else None


def _from_row(row: Mapping[str, str]) -> FoundDevice | None:
    number, memory = text.index(row.get("neuron device")), text.memory(row.get("neuron memory"))
    bus_id = text.bdf(row.get("pci bdf"))
    if number is None or memory is None or bus_id is None:
        return None
    ids = row.get("neuron core ids", "")
    return FoundDevice(
        index=number,
        memory_bytes=memory,
        bus_id=bus_id,
        cores=text.number(row.get("neuron cores")),
        visible_id=ids if _CORE_IDS.fullmatch(ids) else None,
    )


def _answer(devices: tuple[FoundDevice, ...], num_told: int) -> ToolAnswer:
    warnings = ["model_unknown"] if any(device.model is None for device in devices) else []
    if any(device.memory_bytes is None for device in devices):
        warnings.append("memory_unknown")
    broken = len(devices) < num_told
    return ToolAnswer(
        devices=devices,
        error=ToolError.PARTIAL_DEVICE_ERROR if broken else None,
        warnings=tuple(warnings),
    )


def _device(item: Mapping[str, object]) -> FoundDevice | None:
    number = text.index(item.get("neuron_device"))
    if number is None:
        return None
    return FoundDevice(
        index=number,
        model=text.name(item.get("device_name")),
        memory_bytes=text.memory(item.get("memory_size"), "B"),
        bus_id=text.bdf(item.get("bdf")),
        cores=text.number(item.get("nc_count")),
        visible_id=_cores(item.get("neuroncore_ids")),
    )


def _cores(ids: object) -> str | None:
    """Return a device's cores as the visible-cores variable takes them: '4-7', None where they are not told."""
    if not isinstance(ids, list):
        return None
    known = sorted(number for number in map(text.index, ids) if number is not None)
    if not known or known != list(range(known[0], known[-1] + 1)):
        return None
    return f"{known[0]}-{known[-1]}" if len(known) > 1 else str(known[0])


_M, _NONE = Confidence.MEDIUM, Confidence.UNKNOWN

VENDOR = Vendor(
    name="neuron",
    title="AWS Neuron",
    parse=parse,
    tools=("neuron-ls",),
    probe_commands=(ProbeCommand("neuron-ls -j", ("/opt/aws/neuron/bin",), needs_root=True),),
    torch_device="xla",
    torch_plugin="torch_neuronx",
    collective_backend="xla",
    collective_family="neuron",
    visible_devices_env="NEURON_RT_VISIBLE_CORES",
    visible_devices_id="cores",
    pci_ids=PciIds(
        vendors=("1d0f",),
        company="amazon",
        devices={
            "7064": "Inferentia",
            "7164": "Trainium",
            "7264": "Inferentia2",
            "7364": "Trainium2",
            "7564": "Trainium3",
            "7565": "Trainium3",
        },
        known_only=True,
    ),
    device_nodes=("/dev/neuron[0-9]*",),
    kernel_modules=("neuron",),
    models=(
        Chip("Trainium", ("trainium", "trn1"), 32768, 190, 0.82, _M, "95 per core, two cores"),
        Chip("Trainium2", ("trainium2", "trn2"), 98304, 667, 2.9, _M, "vendor documentation"),
        Chip("Inferentia2", ("inferentia2", "inf2"), 32768, None, None, _NONE, "not collected"),
    ),
    errors=(
        ("no neuron device", ToolError.NO_DEVICES),
        ("aws-neuronx-dkms", ToolError.DRIVER_MISSING),
    ),
    unverified=("device_nodes", "torch_plugin", "visible_devices_env", "errors"),
    notes=("The visible-devices variable takes cores (4-7), not devices.",),
)
