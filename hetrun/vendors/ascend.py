"""Huawei Ascend NPUs, as `npu-smi` shows them. There is no JSON; one NPU may hold several chips, one device each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.blocks import complete_lines, pair
from hetrun.vendors._read.boxes import cells, is_border
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor

_BANNER = re.compile(r"\bVersion: (\S{1,40})\s")
_NPU = re.compile(r"([0-9]{1,3})\s{1,20}([A-Za-z0-9].{0,60})")
_CHIP = re.compile(r"([0-9]{1,3})(?:\s{1,20}([0-9]{1,4}))?")
_USAGE = re.compile(r"(?:[0-9]{1,9}|NA|-)\s{0,8}/\s{0,8}([0-9]{1,9}(?![0-9])|NA\b|-(?=\s|$))")
_DCMI = re.compile(r"ret is (-[0-9]{4,5})")


def parse(run: ToolRun) -> ToolAnswer:
    """Read `info -m`, `info` or both together, or the pairs of `info -t usages|common|board`."""
    mapped, table = _mapping(run), _table(run)
    if table is not None:
        return _joined(table, mapped.devices if mapped else ())
    answer = mapped or _pairs(run) or ToolAnswer()
    code = _DCMI.search(run.stdout) or _DCMI.search(run.stderr)
    return replace(answer, detail={"dcmi": int(code[1])}) if code and not answer.devices else answer


def _joined(table: ToolAnswer, mapped: Sequence[FoundDevice]) -> ToolAnswer:
    """Put the logic ids and full names of `info -m` on the devices of `info`."""
    known = {(device.npu_id, device.chip_id): device for device in mapped}
    if any((device.npu_id, device.chip_id) not in known for device in table.devices):
        return table
    devices = []
    for device in table.devices:
        other = known[device.npu_id, device.chip_id]
        devices.append(replace(device, index=other.index, model=other.model))
    warnings = tuple(warning for warning in table.warnings if warning != "index_assumed")
    return replace(table, devices=tuple(devices), warnings=warnings)


def _mapping(run: ToolRun) -> ToolAnswer | None:
    """Read `info -m` by its header; rows of the board's controller (Mcu) are no devices."""
    header: list[str] = []
    devices: list[FoundDevice] = []
    for line in complete_lines(run):
        words = [word.strip().lower() for word in re.split(r"\s{2,}", line.strip())]
        if words[:1] == ["npu id"]:
            header = words
        elif header and len(words) == len(header):
            row = dict(zip(header, re.split(r"\s{2,}", line.strip()), strict=True))
            device = _mapped(row)
            devices += [device] if device else []
    return ToolAnswer(devices=tuple(devices)) if devices else None


def _mapped(row: Mapping[str, str]) -> FoundDevice | None:
    ids = (row.get("chip phy-id"), row.get("chip phy id"), row.get("chip logic id"))
    number = next((found for found in map(text.index, ids) if found is not None), None)
    model = text.name(row.get("chip name"))
    if number is None or model is None or model.lower() == "mcu":
        return None
    return FoundDevice(
        index=number,
        model=model,
        npu_id=text.index(row.get("npu id")),
        chip_id=text.index(row.get("chip id")),
    )


def _table(run: ToolRun) -> ToolAnswer | None:
    """Read `info`: per chip a line 'NPU name | health | ..' and a line 'chip [id] | bus | .. used / total'."""
    driver, header, above = None, 0, None
    devices: list[FoundDevice] = []
    num_broken = 0
    for line in run.lines:
        row = None if is_border(line) else cells(line)
        if row is None or len(row) < 3:
            banner = _BANNER.search(line) if "npu-smi" in line and row else None
            driver = banner[1] if banner else driver
            num_broken += above is not None or _is_cut(line)
            above = None
        elif row[1].lower().startswith("process"):
            break
        elif row[0].startswith("Chip"):
            header = sum("usage(" in cell.lower() for cell in " ".join(row).split())
        elif above is None:
            above = row if header and _NPU.fullmatch(row[0]) else None
        else:
            device = _device(above, row, header)
            devices += [replace(device, driver=driver)] if device else []
            num_broken += device is None
            above = None
    num_broken += above is not None
    if not devices and not num_broken:
        return None
    unknown = [device for device in devices if device.memory_bytes is None]
    is_ill = num_broken or any(device.health != "OK" for device in unknown)
    answer = _numbered(
        ToolAnswer(devices=tuple(devices), error=ToolError.PARTIAL_DEVICE_ERROR if is_ill else None)
    )
    if unknown:
        answer = replace(answer, warnings=(*answer.warnings, "memory_unknown"))
    return answer


def _is_cut(line: str) -> bool:
    """True for a row with a number in front that has lost its end."""
    stripped = line.strip()
    return stripped.startswith("|") and stripped[1:].strip()[:1].isdigit()


def _device(above: Sequence[str], below: Sequence[str], num_usages: int) -> FoundDevice | None:
    """Join the two lines of a chip. The last usage column is the device memory (HBM where there is any)."""
    npu, chip = _NPU.fullmatch(above[0]), _CHIP.fullmatch(below[0])
    totals = _USAGE.findall(below[-1])
    if npu is None or chip is None or len(totals) != num_usages or len(above) != len(below):
        return None
    # 0 stands in the column of a memory that this chip does not have
    known = [size for total in totals if (size := text.memory(total, "MB"))]
    is_told = totals[-1:] != [] and text.number(totals[-1]) is not None
    return FoundDevice(
        index=int(chip[2]) if chip[2] else -1,
        model=text.name(npu[2]),
        memory_bytes=known[-1] if known and is_told else None,
        bus_id=text.bdf(below[1]),
        health=text.name(above[1]),
        npu_id=int(npu[1]),
        chip_id=int(chip[1]),
    )


def _numbered(answer: ToolAnswer) -> ToolAnswer:
    """Give devices without an id of their own that of their NPU; count them if an NPU has several."""
    chips: dict[tuple[int | None, int | None], set[FoundDevice]] = {}
    for device in answer.devices:
        chips.setdefault((device.npu_id, device.chip_id), set()).add(device)
    devices = [found.pop() for found in chips.values() if len(found) == 1]
    if len(devices) < len(chips):  # two different chips in one place: neither can be believed
        answer = replace(answer, error=ToolError.PARTIAL_DEVICE_ERROR)
    plain = [device.npu_id for device in devices if device.index < 0]
    assumed = len(set(plain)) < len(plain)
    numbers = [at if assumed else device.npu_id or 0 for at, device in enumerate(devices)]
    return replace(
        answer,
        devices=tuple(
            replace(device, index=number) if device.index < 0 else device
            for device, number in zip(devices, numbers, strict=True)
        ),
        warnings=("index_assumed",) if assumed else (),
    )


def _pairs(run: ToolRun) -> ToolAnswer | None:
    """Read 'key : value' blocks of one NPU; the 'Chip ID' line closes a chip's block."""
    shared: dict[str, str] = {}
    chips: list[dict[str, str]] = []
    fields: dict[str, str] = {}
    for line in run.lines:
        found = pair(line)
        if found is None:
            continue
        if found[0] == "npu id":
            chips += _listed(shared, fields, chips)
            shared, fields = {"npu id": found[1]}, {}
        elif found[0] == "chip id":
            chips.append({**shared, **fields, "chip id": found[1]})
            fields = {}
        elif found[0] in ("chip count", "software version", "pcie bus info", "product name"):
            shared[found[0]] = found[1]
        else:
            fields[found[0]] = found[1]
    chips += _listed(shared, fields, chips)
    devices = [device for chip in chips if (device := _from_pairs(chip))]
    if not devices:
        return None
    warnings = ["model_unknown"] if any(device.model is None for device in devices) else []
    if any((text.number(chip.get("chip count")) or 1) > 1 for chip in chips):
        warnings.insert(0, "index_assumed")
    answer = _numbered(ToolAnswer(devices=tuple(devices)))
    return replace(answer, warnings=(*answer.warnings, *warnings))


def _listed(
    npu: Mapping[str, str], fields: Mapping[str, str], chips: Sequence[Mapping[str, str]]
) -> list[dict[str, str]]:
    """Return the only chip of an NPU whose block names none, as `info -l` prints it."""
    named = any(chip.get("npu id") == npu.get("npu id") for chip in chips)
    measured = any("(" in key for key in fields)  # such a block ends with a chip id, or was cut
    alone = npu.get("chip count") == "1" and not named and not measured
    return [{**npu, "chip id": "0"}] if alone else []


def _from_pairs(chip: Mapping[str, str]) -> FoundDevice | None:
    npu, number = text.index(chip.get("npu id")), text.index(chip.get("chip id"))
    if npu is None or number is None or chip.get("chip name", "").lower() == "mcu":
        return None
    sizes = (chip.get(f"{kind} capacity(mb)") for kind in ("hbm", "ddr", "memory"))
    known = [size for size in (text.memory(size, "MB") for size in sizes) if size]
    return FoundDevice(
        index=-1,
        model=text.name(chip.get("chip name")),
        memory_bytes=known[0] if known else None,
        driver=text.version(chip.get("software version")),
        bus_id=text.bdf(chip.get("pcie bus info")),
        npu_id=npu,
        chip_id=number,
    )


_M, _L, _NONE = Confidence.MEDIUM, Confidence.LOW, Confidence.UNKNOWN
_B = "sources give 313 to 376, measured 304"
_PORTS = (
    'for f in /dev/davinci[0-9]*; do [ -e "$f" ] || continue; n=${f##*davinci}; echo "device $n"; '
    "hccn_tool -i $n -ip -g; hccn_tool -i $n -link -g; done"
)
_PATHS = ("/usr/local/bin", "/usr/local/sbin", "/usr/local/Ascend/driver/tools")

VENDOR = Vendor(
    name="ascend",
    title="Huawei Ascend",
    parse=parse,
    tools=("npu-smi",),
    probe_commands=(
        ProbeCommand("npu-smi info -m; npu-smi info", _PATHS),
        ProbeCommand("npu-smi info", _PATHS),
        ProbeCommand("npu-smi info -m", _PATHS),
    ),
    torch_device="npu",
    torch_plugin="torch_npu",
    collective_backend="hccl",
    collective_family="hccl",
    visible_devices_env="ASCEND_RT_VISIBLE_DEVICES",
    nic_env={"HCCL_SOCKET_IFNAME": "={nic}"},
    container_devices_env=("ASCEND_VISIBLE_DEVICES",),
    pci_ids=PciIds(
        vendors=("19e5",),
        company="huawei",
        devices={
            "d100": "Ascend 310",
            "d500": "Ascend 310P",
            "d801": "Ascend 910A",
            "d802": "Ascend 910B",
            "d803": "Ascend 910C",
        },
        classes=("1200",),
        others="cpu bridges",
    ),
    device_nodes=("/dev/davinci[0-9]*", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"),
    slice_nodes=("/dev/vdavinci[0-9]*",),
    topology_command=ProbeCommand("npu-smi info -t topo", _PATHS),
    ports_command=ProbeCommand(_PORTS, _PATHS, needs_root=True),
    kernel_modules=("drv_davinci_intf_host",),
    sdk_roots=("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann"),
    sdk_env=("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"),
    models=(
        Chip(
            "Ascend 910A",
            ("910a", "910proa", "910premiuma"),
            32768,
            256,
            1.2,
            _M,
            "vendor 2019",
            "fp16",
        ),
        Chip("Ascend 910B1", ("910b1",), 65536, None, 1.6, _L, _B),
        Chip("Ascend 910B2", ("910b2", "910b2c"), 65536, None, 1.6, _L, _B),
        Chip("Ascend 910B3", ("910b3",), 65536, 304, 1.6, _L, _B),
        Chip("Ascend 910B4", ("910b4",), 32768, None, None, _L, _B),
        Chip("Ascend 910B4-1", ("910b4-1",), 65536, None, None, _L, _B),
        Chip(
            "Ascend 910C die", ("ascend910", "910_9391", "910_9381"), 65536, None, 1.6, _L, "press"
        ),
        Chip("Ascend 310P3", ("310p3",), None, 140, 0.2, _L, "second hand", "fp16"),
    ),
    errors=(
        ("-8020", ToolError.DEVICE_BUSY),
        ("-8002", ToolError.PERMISSION_DENIED),
        ("-8005", ToolError.PERMISSION_OR_DRIVER),
        ("dcmi module initialize failed", ToolError.PERMISSION_OR_DRIVER),
        ("dcmi model initialize", ToolError.PERMISSION_OR_DRIVER),
    ),
    unverified=("kernel_modules", "errors", "visible_devices_env inside containers with gaps"),
    notes=(
        "A3 (910C) shows two chips per NPU; Phy-ID is the device number.",
        "910B names are generation A2, not A3.",
        "RoCE ports are inside the NPU, not in /sys/class/infiniband.",
    ),
)
