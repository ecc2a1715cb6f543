"""NVIDIA GPUs, as `nvidia-smi` shows them. Layouts shared with its look-alikes are read in `_read`."""

from __future__ import annotations

import re
from dataclasses import replace

from hetrun.vendors._read.answer import FoundDevice, Partition, ToolAnswer, ToolError
from hetrun.vendors._read.blocks import complete_lines, read_smi_xml
from hetrun.vendors._read.boxes import banner, read_smi
from hetrun.vendors._read.rows import read_rows
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor

_GPU = re.compile(r"GPU ([0-9]{1,3}): (.{1,96}) \(UUID: (GPU-[0-9A-Fa-f-]{8,60})\)")
_MIG = re.compile(
    r"\s{1,8}MIG (\S{1,40})\s{1,20}Device\s{1,8}([0-9]{1,3}): \(UUID: (MIG-[0-9A-Za-z/-]{8,90})\)"
)
_LIBRARY = re.compile(r"NVML library version: ([0-9.]{1,40})")
_UNIFIED = ("gb10", "thor", "orin", "jetson", "spark")


def parse(run: ToolRun) -> ToolAnswer:
    """Read `-q -x`, `-L`, `--query-gpu` or the plain table, by the layout that is there."""
    answer = read_smi_xml(run) or _listing(run) or _query(run) or _table(run) or ToolAnswer()
    library = _LIBRARY.search(run.stdout) or _LIBRARY.search(run.stderr)
    if library and not answer.devices:
        answer = replace(answer, detail={"nvml_library": library[1]})
    unified = [device for device in answer.devices if _is_unified(device)]
    if unified:
        answer = replace(answer, memory_fallback="host MemTotal (unified memory)")
    return answer


def _is_unified(device: FoundDevice) -> bool:
    lowered = (device.model or "").lower()
    return device.memory_bytes is None and any(part in lowered for part in _UNIFIED)


def _query(run: ToolRun) -> ToolAnswer | None:
    return read_rows(run, want=("memory", "model"))


def _table(run: ToolRun) -> ToolAnswer | None:
    """Read the plain table; drivers from 610 on name their versions otherwise."""
    driver = banner(run.lines, "Driver Version:", "KMD Version:")
    answer = read_smi(run, driver=driver)
    cuda = banner(run.lines, "CUDA Version:", "CUDA UMD Version:")
    if answer is None or cuda is None or not cuda[0].isdigit():
        return answer
    return replace(answer, sdk={"cuda_driver": cuda})


def _listing(run: ToolRun) -> ToolAnswer | None:
    """Read `-L`: indented MIG lines belong to the GPU above."""
    devices: list[FoundDevice] = []
    lost_place = False
    num_broken = 0
    for line in complete_lines(run) + ([run.lines[-1]] if run.open_end and run.lines else []):
        gpu, mig = _GPU.fullmatch(line.rstrip()), _MIG.fullmatch(line.rstrip())
        if gpu:
            devices.append(FoundDevice(index=int(gpu[1]), model=gpu[2].strip(), uuid=gpu[3]))
            lost_place = False
        elif mig and devices and not lost_place:
            part = Partition(profile=mig[1], ordinal=int(mig[2]), uuid=mig[3])
            devices[-1] = replace(devices[-1], partitions=(*devices[-1].partitions, part))
        elif line.startswith("GPU ") or line.lstrip().startswith("MIG "):
            num_broken += 1
            lost_place = line.startswith("GPU ")
    if not devices:
        return None
    sliced = any(device.partitions for device in devices)
    return ToolAnswer(
        devices=tuple(devices),
        error=ToolError.PARTIAL_DEVICE_ERROR if num_broken else None,
        warnings=("mig_enabled",) if sliced else (),
    )


def _chip(
    name: str,
    match: str,
    mib: int | None,
    tflops: float | None,
    tb_per_s: float | None = None,
    sure: Confidence = Confidence.HIGH,
) -> Chip:
    return Chip(
        name=name,
        match=tuple(match.split(",")),
        memory_bytes=None if mib is None else mib << 20,
        peak_flops=None if tflops is None else tflops * 1e12,
        bytes_per_s=None if tb_per_s is None else tb_per_s * 1e12,
        source="public tables of vendor figures",
        confidence=sure,
    )


_MEDIUM = Confidence.MEDIUM
_CHIPS = (
    _chip("A100 SXM 80GB", "a100-sxm4-80gb,a800-sxm4-80gb,a100-sxm-80gb", 81920, 312, 2.0),
    _chip("A100 SXM 40GB", "a100-sxm4-40gb,a100-sxm-40gb", 40960, 312, 1.6),
    _chip("A100 PCIe 80GB", "a100 80gb pcie,a800 80gb pcie,a100-pcie-80gb", 81920, 312, 1.94),
    _chip("A100 PCIe 40GB", "a100-pcie-40gb", 40960, 312),
    _chip("H100 SXM", "h100 80gb hbm3", 81559, 989, 3.35),
    _chip("H100 PCIe", "h100 pcie", 81559, 756, 2.0),
    _chip("H100 NVL", "h100 nvl", 95830, 835, 3.9),
    _chip("H800 SXM", "h800", 81559, 989, 3.35, _MEDIUM),
    _chip("H200 SXM", "h200", 143771, 989, 4.8),
    _chip("H200 NVL", "h200 nvl", 143771, 836, 4.8),
    _chip("H20", "h20", 97871, 148, 4.0, _MEDIUM),
    _chip("B200", "b200", 183359, 2250, 8.0),
    _chip("GB200", "gb200", None, 2500, 8.0),
    _chip("B300", "b300", None, 2250, 8.0),
    _chip("L40S", "l40s", 46068, 362, 0.86),
    _chip("L40", "l40", 46068, 181),
    _chip("L20", "l20", 46068, 119.5),
    _chip("L4", "l4", 23034, 121, 0.3),
    _chip("A40", "a40", 46068, 149.7, None, _MEDIUM),
    _chip("A30", "a30", None, 165, None, _MEDIUM),
    _chip("A10", "a10", None, 125, None, _MEDIUM),
    replace(_chip("T4", "tesla t4,nvidia t4", 15360, 65, 0.3), peak_dtype="fp16"),
    replace(_chip("V100 SXM", "v100-sxm", None, 125, 0.9), peak_dtype="fp16"),
    replace(_chip("V100 PCIe", "v100-pcie", None, 112, 0.9), peak_dtype="fp16"),
    _chip("RTX 4090", "rtx 4090", 24564, 165.2, 1.01, _MEDIUM),
    _chip("RTX 5090", "rtx 5090", None, 209.5, 1.79, _MEDIUM),
    _chip("RTX 3090", "rtx 3090", None, 71, 0.94, _MEDIUM),
    _chip("GB10", "gb10", None, None, None, Confidence.UNKNOWN),
)

VENDOR = Vendor(
    name="nvidia",
    title="NVIDIA",
    parse=parse,
    tools=("nvidia-smi",),
    probe_commands=(
        ProbeCommand(
            command="nvidia-smi --query-gpu=index,name,uuid,pci.bus_id,memory.total,"
            "driver_version,mig.mode.current --format=csv,noheader,nounits",
            paths=("/usr/bin", "/usr/lib/wsl/lib", "/opt/bin", "/usr/local/nvidia/bin"),
        ),
        ProbeCommand(
            command="nvidia-smi --query-gpu=index,name,uuid,pci.bus_id,memory.total,"
            "driver_version --format=csv,noheader,nounits",
            paths=("/usr/bin", "/usr/lib/wsl/lib", "/opt/bin", "/usr/local/nvidia/bin"),
        ),
        ProbeCommand(command="nvidia-smi", paths=("/usr/bin", "/usr/lib/wsl/lib", "/opt/bin")),
    ),
    torch_device="cuda",
    torch_plugin=None,
    collective_backend="nccl",
    collective_family="nccl",
    visible_devices_env="CUDA_VISIBLE_DEVICES",
    container_devices_env=("NVIDIA_VISIBLE_DEVICES",),
    extra_env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    pci_ids=PciIds(
        vendors=("10de",),
        devices={
            "1db1": "Tesla V100-SXM2-16GB",
            "1db5": "Tesla V100-SXM2-32GB",
            "1eb8": "Tesla T4",
            "20b0": "A100-SXM4-40GB",
            "20b2": "A100-SXM4-80GB",
            "20b5": "A100 80GB PCIe",
            "20f3": "A800-SXM4-80GB",
            "20f5": "A800 80GB PCIe",
            "2324": "H800",
            "2329": "H20",
            "2330": "H100 80GB HBM3",
            "2331": "H100 PCIe",
            "2335": "H200",
            "2684": "RTX 4090",
            "26b9": "L40S",
            "27b8": "L4",
            "2901": "B200",
            "2941": "GB200",
            "2b85": "RTX 5090",
            "2e12": "GB10",
            "3182": "B300",
        },
        skip=frozenset({"22a3", "1af1"}),
    ),
    device_nodes=("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvidia-uvm"),
    kernel_modules=("nvidia",),
    sdk_roots=("/usr/local/cuda",),
    sdk_env=("CUDA_HOME",),
    models=_CHIPS,
    rc_errors={
        4: ToolError.PERMISSION_DENIED,
        6: ToolError.NO_DEVICES,
        9: ToolError.DRIVER_MISSING,
        12: ToolError.SHARED_LIB_MISSING,
        18: ToolError.DRIVER_MISMATCH,
    },
    unverified=("rc_errors", "probe_commands.paths"),
    notes=(
        "V100 and T4 have no BF16; their peak is FP16.",
        "MIG slices are taken by uuid; the whole device cannot be used while MIG is on.",
        "GB10 and Jetson share the host's memory: the tool tells no size.",
    ),
)
