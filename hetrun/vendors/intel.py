"""Intel GPUs, as `xpu-smi discovery` shows them. Kunlunxin has another tool of the same name; the PCI scan tells."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.blocks import pair
from hetrun.vendors._read.boxes import cells, is_border
from hetrun.vendors._read.jsontext import documents, items, record
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor

_HASH = re.compile(r"[0-9A-Fa-f]{16,64}")  # some drivers print a source hash for a version


def parse(run: ToolRun) -> ToolAnswer:
    """Read the list, single devices (several documents in a row too), or the table."""
    found: dict[int, FoundDevice] = {}
    empty = False
    for document in documents(run):
        listed = document if isinstance(document, list) else record(document).get("device_list")
        if "device_list" in record(document) or isinstance(document, list):
            empty = empty or not listed
        else:
            listed = [document]
        for item in items(listed):
            device = _device(item)
            if device is not None:
                found[device.index] = _richer(found.get(device.index), device)
    devices = tuple(found[number] for number in sorted(found))
    if not devices and empty:
        return ToolAnswer(error=ToolError.NO_DEVICES)
    return _answer(devices) if devices else (_table(run) or ToolAnswer())


def _answer(devices: Sequence[FoundDevice], error: ToolError | None = None) -> ToolAnswer:
    unknown = any(device.memory_bytes is None for device in devices)
    warnings = ("memory_unknown",) if unknown else ()
    return ToolAnswer(devices=tuple(devices), error=error, warnings=warnings)


def _richer(old: FoundDevice | None, new: FoundDevice) -> FoundDevice:
    """The list tells less than the single device: keep the one with memory."""
    return old if old is not None and new.memory_bytes is None else new


def _device(item: Mapping[str, object]) -> FoundDevice | None:
    number = text.index(item.get("device_id"))
    name = text.name(item.get("device_name"))
    address = text.bdf(item.get("pci_bdf_address"))
    if number is None or (name is None and address is None):
        return None
    return FoundDevice(
        index=number,
        model=name,
        memory_bytes=text.memory(item.get("memory_physical_size_byte"), "B"),
        driver=_driver(item.get("driver_version")),
        bus_id=address,
        uuid=text.value(item.get("uuid")),
        tiles=text.number(item.get("number_of_tiles")),
    )


def _driver(found: object) -> str | None:
    version = text.version(found)
    return None if version is None or _HASH.fullmatch(version) else version


def _table(run: ToolRun) -> ToolAnswer | None:
    """Read '| 0 | Device Name: .. |' and the lines below it that have no number."""
    blocks: list[tuple[int, dict[str, str]]] = []
    num_broken = 0
    for line in run.lines:
        row = None if is_border(line) else cells(line)
        if row is None:
            num_broken += line.startswith("|") and not is_border(line)
            continue
        number = text.index(row[0])
        if len(row) == 2 and number is not None:
            blocks.append((number, {}))
        found = pair(row[1]) if len(row) == 2 and blocks else None
        if found is not None and (number is not None or not row[0]):
            blocks[-1][1].setdefault(*found)
    devices = [device for number, pairs in blocks if (device := _from_pairs(number, pairs))]
    broken = num_broken or len(devices) < len(blocks)
    if not devices and not broken:
        return None
    return _answer(devices, ToolError.PARTIAL_DEVICE_ERROR if broken else None)


def _from_pairs(number: int, pairs: Mapping[str, str]) -> FoundDevice | None:
    address = text.bdf(pairs.get("pci bdf address"))
    if address is None:
        return None
    return FoundDevice(
        index=number,
        model=text.name(pairs.get("device name")),
        memory_bytes=text.memory(pairs.get("memory physical size")),
        driver=_driver(pairs.get("driver version")),
        bus_id=address,
        uuid=text.value(pairs.get("uuid", pairs.get("soc uuid"))),
        tiles=text.number(pairs.get("number of tiles")),
    )


_L, _NONE = Confidence.LOW, Confidence.UNKNOWN
_EACH = (
    "n=0; xpu-smi discovery -j && while [ $n -lt 32 ] && xpu-smi discovery -d $n -j; "
    "do n=$((n+1)); done"
)

VENDOR = Vendor(
    name="intel",
    title="Intel GPU",
    parse=parse,
    tools=("xpu-smi", "xpumcli"),
    probe_commands=(
        ProbeCommand(_EACH, ("/usr/bin",)),
        ProbeCommand("xpu-smi discovery", ("/usr/bin",)),
    ),
    torch_device="xpu",
    torch_plugin=None,
    collective_backend="xccl",
    collective_family="oneccl",
    visible_devices_env="ZE_AFFINITY_MASK",
    extra_env={"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"},
    pci_ids=PciIds(
        vendors=("8086",),
        company="intel",
        devices={
            "0b69": "Max 1450",
            "0bd5": "Max 1550",
            "0bd6": "Max 1550",
            "0bda": "Max 1100",
            "56a0": "Arc A770",
            "56a1": "Arc A750",
            "56c0": "Flex 170",
            "56c1": "Flex 140",
            "e20b": "Arc B580",
            "e20c": "Arc B570",
            "e211": "Arc Pro B60",
            "e212": "Arc Pro B50",
            "e223": "Arc Pro B70",
        },
        classes=("0300", "0302", "0380"),
        known_only=True,
    ),
    device_nodes=("/dev/dri/renderD*",),
    kernel_modules=("i915", "xe"),
    topology_command=ProbeCommand("xpu-smi topology -m", ("/usr/bin",)),
    sdk_roots=("/opt/intel/oneapi",),
    sdk_env=("ONEAPI_ROOT",),
    models=(
        Chip(
            "Max 1550",
            ("max 1550", "0x0bd5"),
            131072,
            681,
            3.2,
            _L,
            "computed from units and clock",
        ),
        Chip("Max 1100", ("max 1100", "0x0bda"), None, None, None, _NONE, "not collected"),
        Chip("Arc B580", ("b580", "0xe20b"), 12288, None, 0.456, _NONE, "not verified"),
        Chip("Arc Pro B60", ("b60", "0xe211"), 24480, None, None, _NONE, "memory from an issue"),
    ),
    errors=(("level zero initialization", ToolError.DRIVER_MISSING),),
    unverified=("errors", "sdk_env", "probe_commands output of xpu-smi 2"),
    notes=(
        "A card of two tiles appears to torch as two devices in the FLAT hierarchy, newer drivers' default: runs "
        "set ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE, where a number means the card, as in xpu-smi.",
        "Integrated graphics share the vendor id: only listed devices count.",
    ),
)
