"""AMD GPUs, as `amd-smi` and the older `rocm-smi` show them. Layouts shared with forks are read in `_read/rocm.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.blocks import Block, complete_lines, read_blocks
from hetrun.vendors._read.boxes import banner
from hetrun.vendors._read.jsontext import documents, inside, items, record
from hetrun.vendors._read.pairs import read_pairs
from hetrun.vendors._read.rocm import read_concise, read_rocm
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor

_USAGE = re.compile(r"(?<![0-9])[0-9]{1,9}\s{0,2}/\s{0,2}([0-9]{1,9} [KMG]B|N/A)$")


def parse(run: ToolRun) -> ToolAnswer:
    """Read `amd-smi list|static` (JSON of ROCm 6 or 7, or text), `rocm-smi`, or what either prints without options."""
    return (
        _amd_smi(run)
        or read_rocm(run, maker="advanced micro", other="haiguang")
        or _amd_smi_text(run)
        or _amd_smi_table(run)
        or read_concise(run)
        or ToolAnswer()
    )


def _amd_smi(run: ToolRun) -> ToolAnswer | None:
    """Read a list of objects with a 'gpu' number (ROCm 6), or the same under 'gpu_data' (ROCm 7)."""
    gpus: list[Mapping[str, object]] = []
    found = False
    for document in documents(run):
        listed = inside(document, "gpu_data") if isinstance(document, dict) else document
        if isinstance(listed, list):
            found = found or not listed
            gpus += [item for item in items(listed) if text.index(item.get("gpu")) is not None]
    if not gpus:
        return ToolAnswer(error=ToolError.NO_DEVICES) if found else None
    devices = tuple(_device(gpu) for gpu in gpus)
    tells = any("vram" in gpu for gpu in gpus)
    return ToolAnswer(devices=devices, warnings=_warnings(devices, tells_memory=tells))


def _warnings(devices: tuple[FoundDevice, ...], *, tells_memory: bool) -> tuple[str, ...]:
    unknown = tells_memory and any(device.memory_bytes is None for device in devices)
    return ("memory_unknown",) if unknown else ()


def _device(gpu: Mapping[str, object]) -> FoundDevice:
    asic, driver = record(gpu.get("asic")), record(gpu.get("driver"))
    return FoundDevice(
        index=text.index(gpu.get("gpu")) or 0,
        model=text.name(asic.get("market_name")),
        memory_bytes=_memory(record(gpu.get("vram")))
        or _memory({"size": inside(gpu, "mem_usage", "total_vram")}),
        driver=text.version(driver.get("version") or driver.get("driver_version")),
        bus_id=text.bdf(inside(gpu, "bus", "bdf") or gpu.get("bdf")),
        uuid=text.value(gpu.get("uuid")),
        arch=text.name(asic.get("target_graphics_version")),
    )


def _memory(vram: Mapping[str, object]) -> int | None:
    """Read {'size': {'value': 196592, 'unit': 'MB'}}, {'size': '196592 MB'} or {'vram_size_mb': 196592}."""
    size = vram.get("size", vram.get("vram_size"))
    if isinstance(size, dict):
        return text.memory(size.get("value"), str(size.get("unit") or "MB"))
    return text.memory(size if size is not None else vram.get("vram_size_mb"), "MB")


def _amd_smi_text(run: ToolRun) -> ToolAnswer | None:
    """Read the same without --json: blocks that start with 'GPU: 0'."""
    _, blocks = read_blocks(complete_lines(run), "GPU:")
    tells = run.has("--vram") or any("vram/size" in block.pairs for block in blocks)
    whole = [block for block in blocks if "vram/size" in block.pairs or not tells]
    devices = tuple(device for block in whole if (device := _text_device(block)))
    if not blocks:
        return None
    return ToolAnswer(
        devices=devices,
        error=ToolError.PARTIAL_DEVICE_ERROR if len(devices) < len(blocks) else None,
        warnings=_warnings(devices, tells_memory=tells),
    )


def _text_device(block: Block) -> FoundDevice | None:
    number = text.index(block.title.partition(":")[2])
    if number is None or not block.pairs:
        return None
    return FoundDevice(
        index=number,
        model=text.name(block.get("market_name")),
        memory_bytes=text.memory(block.get("vram/size")),
        driver=text.version(block.get("driver/version", "driver_version")),
        bus_id=text.bdf(block.get("bdf")),
        uuid=text.value(block.get("uuid")),
        arch=text.name(block.get("target_graphics_version")),
    )


def _amd_smi_table(run: ToolRun) -> ToolAnswer | None:
    """Read pairs of lines 'address name | ..' and 'GPU HIP-ID OAM-ID mode | .. used/total' (ROCm 7)."""
    driver = banner(run.lines, "amdgpu version:")
    answer = read_pairs(
        run.lines,
        is_first=lambda row: len(row) == 2 and text.bdf(row[0][:16]) is not None,
        join=lambda above, below: _joined(above, below, driver),
        end="Processes",
    )
    rocm = banner(run.lines, "ROCm version:")
    if answer is None:
        return None
    warnings = _warnings(answer.devices, tells_memory=True)
    return replace(answer, warnings=warnings, sdk={"rocm": rocm} if rocm else {})


def _joined(
    above: Sequence[str], below: Sequence[str] | None, driver: str | None
) -> FoundDevice | None:
    numbers = below[0].split() if below is not None and len(below) == 2 else []
    number = text.index(numbers[0]) if len(numbers) == 4 else None
    usage = _USAGE.search(below[1]) if below is not None and len(below) == 2 else None
    if number is None or usage is None:
        return None
    hip = text.index(numbers[1])
    return FoundDevice(
        index=number,
        model=text.name(above[0].partition(" ")[2]),
        memory_bytes=text.memory(usage[1]),
        driver=driver,
        bus_id=text.bdf(above[0]),
        visible_id=None if hip is None else str(hip),
    )


_H, _M, _NONE = Confidence.HIGH, Confidence.MEDIUM, Confidence.UNKNOWN
_SRC = "public tables of vendor figures"
_PATHS = ("/usr/bin", "/opt/rocm/bin")

VENDOR = Vendor(
    name="amd",
    title="AMD",
    parse=parse,
    tools=("amd-smi", "rocm-smi"),
    probe_commands=(
        ProbeCommand("amd-smi static --asic --bus --driver --vram --json", _PATHS),
        ProbeCommand(
            "rocm-smi --showproductname --showmeminfo vram --showuniqueid --showbus "
            "--showdriverversion --json",
            _PATHS,
        ),
        ProbeCommand("amd-smi list --json", _PATHS),
    ),
    torch_device="cuda",
    torch_plugin=None,
    collective_backend="nccl",
    collective_family="rccl",
    visible_devices_env="HIP_VISIBLE_DEVICES",
    nic_env={"NCCL_SOCKET_IFNAME": "={nic}"},
    container_devices_env=("AMD_VISIBLE_DEVICES",),
    pci_ids=PciIds(
        vendors=("1002",),
        company="amd",
        devices={
            "7408": "MI250X",
            "740c": "MI250X",
            "740f": "MI210",
            "74a0": "MI300A",
            "74a1": "MI300X",
            "74a2": "MI308X",
            "74a5": "MI325X",
            "75a0": "MI350X",
            "75a3": "MI355X",
        },
        skip={
            "1114": "apu",
            "13c0": "apu",
            "1506": "apu",
            "150e": "apu",
            "1586": "apu",
            "15bf": "apu",
            "15c8": "apu",
            "15d8": "apu",
            "15dd": "apu",
            "15e7": "apu",
            "1636": "apu",
            "1638": "apu",
            "164c": "apu",
            "164d": "apu",
            "164e": "apu",
            "1681": "apu",
            "1900": "apu",
        },
    ),
    device_nodes=("/dev/kfd", "/dev/dri/renderD*"),
    kernel_modules=("amdgpu",),
    partitions_by_function=True,
    topology_command=ProbeCommand("rocm-smi --showbus --showtopotype", _PATHS),
    sdk_roots=("/opt/rocm",),
    sdk_env=("ROCM_PATH",),
    models=(
        Chip("MI210", ("mi210",), 65520, 181, 1.6, _H, _SRC),
        Chip("MI250 GCD", ("mi250",), 65520, 181, 1.64, _H, _SRC),
        Chip("MI250X GCD", ("mi250x",), 65520, 191.5, 1.64, _H, _SRC),
        Chip("MI300A", ("mi300a",), None, 981, 5.3, _H, _SRC),
        Chip("MI300X", ("mi300x",), 196592, 1307, 5.3, _H, _SRC),
        Chip("MI308X", ("mi308x",), None, None, None, _NONE, "not published"),
        Chip("MI325X", ("mi325x",), 262128, 1307, 6.0, _H, _SRC),
        Chip("MI350X", ("mi350x",), None, None, None, _NONE, "not collected"),
        Chip("MI355X", ("mi355x",), 294896, 2500, 8.0, _M, _SRC),
    ),
    errors=(
        ("driver_not_loaded", ToolError.DRIVER_MISSING),
        ("modprobe amdgpu", ToolError.DRIVER_MISSING),
        ("rsmi_init() failed", ToolError.DRIVER_MISSING),
        ("missing the following required group", ToolError.PERMISSION_DENIED),
    ),
    unverified=(
        "pci_ids.skip",
        "errors",
        "visible_devices_env numbers of partitions",
    ),
    notes=(
        "torch calls the device cuda and the backend nccl; the library behind it is RCCL.",
        "Partitions (DPX, QPX, CPX) are functions of one PCI device, each shown as a device with the whole memory: "
        "each is offered with a share.",
        "rocm-smi's card number is not the kernel's card number.",
    ),
)
