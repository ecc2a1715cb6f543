"""Moore Threads GPUs, as `mthreads-gmi` shows them: JSON, `-q` text, or a table without frame."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.blocks import read_smi_text
from hetrun.vendors._read.boxes import banner
from hetrun.vendors._read.jsontext import documents, inside, items, record
from hetrun.vendors._read.listing import read_listing
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor

_NAMED = re.compile(r"([0-9]{1,3})\s{1,12}(\S.{0,60}?)\s{0,40}")
_ROW_START = re.compile(r"[0-9]{1,3}\s{1,12}MTT\b")
_TOTAL = re.compile(r"[0-9]{1,9}[KMG]i?B\(([0-9]{1,9}[KMG]i?B)\)")
_BUS_KEYS = ("bus id", "pci bus id", "busid", "pci id")


def parse(run: ToolRun) -> ToolAnswer:
    """Read `-q --json`, the table, `-q` text or `-L`."""
    return (
        _json(run) or _table(run) or read_smi_text(run, "GPU") or read_listing(run) or ToolAnswer()
    )


def _lower(value: object) -> dict[str, object]:
    """Trim and lower the keys of an object: some end with a space."""
    return {key.strip().lower().replace("_", " "): item for key, item in record(value).items()}


def _json(run: ToolRun) -> ToolAnswer | None:
    for document in documents(run):
        head = _lower(document)
        listed = head.get("gpu", head.get("gpus"))
        gpus = [record(listed)] if isinstance(listed, dict) else items(listed)
        if not isinstance(listed, list | dict):
            continue
        if not gpus:
            return ToolAnswer(error=ToolError.NO_DEVICES)
        driver = text.version(head.get("driver version"))
        devices = [device for gpu in gpus if (device := _json_device(_lower(gpu), driver))]
        told = text.number(head.get("attached gpus"))
        broken = len(devices) < len(gpus) or (told is not None and told != len(devices))
        unknown = any(device.memory_bytes is None for device in devices)
        return ToolAnswer(
            devices=tuple(devices),
            error=ToolError.PARTIAL_DEVICE_ERROR if broken else None,
            warnings=("memory_unknown",) if unknown else (),
        )
    return None


def _json_device(gpu: Mapping[str, object], driver: str | None) -> FoundDevice | None:
    number = text.index(gpu.get("index"))
    if number is None:
        return None
    pci = _lower(gpu.get("pci"))
    address = (text.bdf(place.get(key)) for place in (pci, gpu) for key in _BUS_KEYS)
    total = _lower(gpu.get("fb memory usage", gpu.get("memory"))).get("total")
    return FoundDevice(
        index=number,
        model=text.name(gpu.get("product name", gpu.get("name"))),
        memory_bytes=text.memory(total if total is not None else gpu.get("memory total")),
        driver=driver or text.version(inside(gpu, "driver version")),
        bus_id=next((found for found in address if found), None),
        uuid=text.value(gpu.get("gpu uuid", gpu.get("uuid"))),
    )


def _table(run: ToolRun) -> ToolAnswer | None:
    """Read rows such as '0  MTT S80  |address  |0%  2MiB(16384MiB)'; below 'Processes:' are none."""
    driver = banner(run.lines, "Driver Version:")
    devices: list[FoundDevice] = []
    num_broken = 0
    for line in run.lines:
        if line.startswith("Processes"):
            break
        parts = line.split("|")
        device = _row(parts, driver) if len(parts) == 3 else None
        devices += [device] if device else []
        num_broken += device is None and _ROW_START.match(line) is not None
    if not devices and not num_broken:
        return None
    error = ToolError.PARTIAL_DEVICE_ERROR if num_broken else None
    return ToolAnswer(devices=tuple(devices), error=error)


def _row(parts: list[str], driver: str | None) -> FoundDevice | None:
    named, total, bus_id = _NAMED.fullmatch(parts[0]), _TOTAL.search(parts[2]), text.bdf(parts[1])
    if named is None or total is None or bus_id is None:
        return None
    return FoundDevice(
        index=int(named[1]),
        model=text.name(named[2]),
        memory_bytes=text.memory(total[1]),
        driver=driver,
        bus_id=bus_id,
    )


_M, _L, _NONE = Confidence.MEDIUM, Confidence.LOW, Confidence.UNKNOWN

VENDOR = Vendor(
    name="mthreads",
    title="Moore Threads",
    parse=parse,
    tools=("mthreads-gmi",),
    probe_commands=(
        ProbeCommand("mthreads-gmi -q --json", ("/usr/bin",)),
        ProbeCommand("mthreads-gmi", ("/usr/bin",)),
    ),
    torch_device="musa",
    torch_plugin="torch_musa",
    collective_backend="mccl",
    collective_family="mccl-mthreads",
    visible_devices_env="MUSA_VISIBLE_DEVICES",
    nic_env={"MCCL_SOCKET_IFNAME": "{nic}"},
    container_devices_env=("MTHREADS_VISIBLE_DEVICES",),
    pci_ids=PciIds(
        vendors=("1ed5",),
        company="moore threads",
        devices={
            "0201": "MTT S80",
            "0222": "MTT S3000",
            "0225": "MTT S3000E",
            "0301": "MTT S90",
            "0323": "MTT S4000",
            "0327": "MTT S4000",
            "0328": "MTT S4000",
        },
        skip={"01ff": "audio", "02ff": "audio", "03ff": "audio"},
    ),
    device_nodes=("/dev/mtgpu.[0-9]*", "/dev/dri/renderD*"),
    kernel_modules=("mtgpu",),
    topology_command=ProbeCommand("mthreads-gmi topo -m", ("/usr/bin",)),
    peer_memory_modules=("mt_peermem",),
    sdk_roots=("/usr/local/musa",),
    sdk_env=("MUSA_HOME", "MUSA_PATH"),
    models=(
        Chip("MTT S4000", ("s4000",), 49152, 100, 0.768, _M, "launch articles"),
        Chip(
            "MTT S5000", ("s5000",), 81920, None, 1.6, _L, "the announced 1000 is most likely FP8"
        ),
        Chip("MTT S3000", ("s3000",), 32768, None, None, _NONE, "memory from tool output"),
        Chip("MTT S80", ("s80",), 16384, None, None, _NONE, "memory from tool output"),
    ),
    unverified=(
        "nic_env whether it can ask for an exact name",
        "pci_ids.devices of S5000",
        "peer_memory_modules",
    ),
    notes=("The tool's own version stands on the driver's line; the SDK version is not printed.",),
)
