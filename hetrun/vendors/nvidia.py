"""NVIDIA GPUs, as `nvidia-smi` shows them. Layouts shared with its look-alikes are read in `_read`."""

from __future__ import annotations

import re
from dataclasses import replace

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, Partition, ToolAnswer, ToolError
from hetrun.vendors._read.blocks import read_smi_text, read_smi_xml
from hetrun.vendors._read.boxes import PAIR, banner, read_smi
from hetrun.vendors._read.listing import read_listing
from hetrun.vendors._read.rows import read_rows
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor

_LIBRARY = re.compile(r"NVML library version: ([0-9.]{1,40})")
_CUDA = re.compile(
    r"CUDA (?:UMD )?Version\s{0,40}: {1,4}([0-9]{1,3}\.[0-9]{1,3})\s"
    r"|<cuda(?:_umd)?_version>([0-9]{1,3}\.[0-9]{1,3})[\s<]"
)
_MIG_ROW = re.compile(
    r"\|\s{1,4}([0-9]{1,3})\s{1,8}[0-9]{1,3}\s{1,8}[0-9]{1,3}\s{1,8}([0-9]{1,3})\s{1,4}\|([^|]{0,80})\|.*\|"
)
_UNIFIED = ("gb10", "thor", "orin", "jetson", "spark")


def parse(run: ToolRun) -> ToolAnswer:
    """Read `-q -x`, `-L`, `--query-gpu` or the plain table, by the layout that is there."""
    answer = (
        read_smi_xml(run)
        or read_listing(run)
        or read_rows(run, want=("memory", "model"))
        or _table(run)
        or read_smi_text(run, "GPU ")
        or ToolAnswer()
    )
    library = _LIBRARY.search(run.stdout) or _LIBRARY.search(run.stderr)
    if library and not answer.devices:
        answer = replace(answer, detail={"nvml_library": library[1]})
    cuda = _CUDA.search(run.stdout) if answer.devices else None
    if cuda:
        answer = replace(answer, sdk={"cuda_driver": cuda[1] or cuda[2]})
    unified = [device for device in answer.devices if _is_unified(device)]
    if unified:
        answer = replace(answer, memory_fallback="host MemTotal (unified memory)")
    return answer


def _is_unified(device: FoundDevice) -> bool:
    lowered = (device.model or "").lower()
    return device.memory_bytes is None and any(part in lowered for part in _UNIFIED)


def _table(run: ToolRun) -> ToolAnswer | None:
    """Read the plain table; drivers from 610 on name their versions otherwise."""
    answer = read_smi(run, driver=banner(run.lines, "Driver Version:", "KMD Version:"))
    slices: dict[int, list[Partition]] = {}
    sizes: dict[int, list[tuple[int, int]]] = {}
    # rows 'GPU GI CI Dev | used / total' of the table below; it tells neither profile nor uuid
    for row in filter(None, (_MIG_ROW.fullmatch(line.strip()) for line in run.lines)):
        number, ordinal = int(row[1]), int(row[2])
        slices.setdefault(number, []).append(Partition(profile=None, ordinal=ordinal, uuid=None))
        if (told := PAIR.search(row[3])) and (size := text.memory(told[1])):
            sizes.setdefault(number, []).append((ordinal, size))
    if answer is None or not slices:
        return answer
    devices = (
        replace(
            device,
            partitions=tuple(slices.get(device.index, ())),
            partition_bytes=tuple(sizes.get(device.index, ())),
        )
        for device in answer.devices
    )
    return replace(answer, devices=tuple(devices))


_H, _M, _NONE = Confidence.HIGH, Confidence.MEDIUM, Confidence.UNKNOWN
_SRC = "public tables of vendor figures"
_CHIPS = (
    Chip(
        "A100 SXM 80GB",
        ("a100-sxm4-80gb", "a800-sxm4-80gb", "a100-sxm-80gb"),
        81920,
        312,
        2.0,
        _H,
        _SRC,
    ),
    Chip("A100 SXM 40GB", ("a100-sxm4-40gb", "a100-sxm-40gb"), 40960, 312, 1.6, _H, _SRC),
    Chip(
        "A100 PCIe 80GB",
        ("a100 80gb pcie", "a800 80gb pcie", "a100-pcie-80gb"),
        81920,
        312,
        1.94,
        _H,
        _SRC,
    ),
    Chip("A100 PCIe 40GB", ("a100-pcie-40gb",), 40960, 312, None, _H, _SRC),
    Chip("H100 SXM", ("h100 80gb hbm3",), 81559, 989, 3.35, _H, _SRC),
    Chip("H100 PCIe", ("h100 pcie",), 81559, 756, 2.0, _H, _SRC),
    Chip("H100 NVL", ("h100 nvl",), 95830, 835, 3.9, _H, _SRC),
    Chip("H800 SXM", ("h800",), 81559, 989, 3.35, _M, _SRC),
    Chip("H200 SXM", ("h200",), 143771, 989, 4.8, _H, _SRC),
    Chip("H200 NVL", ("h200 nvl",), 143771, 836, 4.8, _H, _SRC),
    Chip("H20", ("h20",), 97871, 148, 4.0, _M, _SRC),
    Chip("B200", ("b200",), 183359, 2250, 8.0, _H, _SRC),
    Chip("GB200", ("gb200",), None, 2500, 8.0, _H, _SRC),
    Chip("B300", ("b300",), None, 2250, 8.0, _H, _SRC),
    Chip("L40S", ("l40s",), 46068, 362, 0.86, _H, _SRC),
    Chip("L40", ("l40",), 46068, 181, None, _H, _SRC),
    Chip("L20", ("l20",), 46068, 119.5, None, _H, _SRC),
    Chip("L4", ("l4",), 23034, 121, 0.3, _H, _SRC),
    Chip("A40", ("a40",), 46068, 149.7, None, _M, _SRC),
    Chip("A30", ("a30",), None, 165, None, _M, _SRC),
    Chip("A10", ("a10",), None, 125, None, _M, _SRC),
    Chip("RTX 4090", ("rtx 4090",), 24564, 165.2, 1.01, _M, _SRC),
    Chip("RTX 5090", ("rtx 5090",), None, 209.5, 1.79, _M, _SRC),
    Chip("RTX 3090", ("rtx 3090",), None, 71, 0.94, _M, _SRC),
    Chip("T4", ("tesla t4", "nvidia t4"), 15360, 65, 0.3, _H, _SRC, "fp16"),
    Chip(
        "V100 SXM",
        ("v100-sxm", "v100-sxm2", "v100-sxm2-16gb", "v100-sxm2-32gb", "v100-sxm3-32gb"),
        None,
        125,
        0.9,
        _H,
        _SRC,
        "fp16",
    ),
    Chip(
        "V100 PCIe",
        ("v100-pcie", "v100-pcie-16gb", "v100-pcie-32gb"),
        None,
        112,
        0.9,
        _H,
        _SRC,
        "fp16",
    ),
    Chip("GB10", ("gb10",), None, None, None, _NONE, "shares the host's memory"),
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
        ProbeCommand(command="nvidia-smi -L", paths=("/usr/bin", "/usr/lib/wsl/lib", "/opt/bin")),
    ),
    torch_device="cuda",
    torch_plugin=None,
    collective_backend="nccl",
    collective_family="nccl",
    visible_devices_env="CUDA_VISIBLE_DEVICES",
    nic_env={"NCCL_SOCKET_IFNAME": "={nic}"},
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
        company="nvidia",
        skip={"22a3": "nvswitch", "1af1": "nvswitch"},
    ),
    device_nodes=("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvidia-uvm"),
    kernel_modules=("nvidia",),
    topology_command=ProbeCommand("nvidia-smi topo -m", ("/usr/bin", "/opt/bin")),
    # issues 418 and 1716 of NCCL's repository, and the release notes of NCCL 2.30
    instances_note="NCCL before 2.30 takes one rank per GPU ('Duplicate GPU detected'), later ones need "
    "NCCL_MULTI_RANK_GPU_ENABLE=1; instances do not reach each other's memory directly",
    peer_memory_modules=("nvidia_peermem", "nv_peer_mem"),
    sdk_roots=("/usr/local/cuda",),
    sdk_env=("CUDA_HOME",),
    models=_CHIPS,
    errors=(("access blocked by the operating system", ToolError.PERMISSION_DENIED),),
    rc_errors={
        4: ToolError.PERMISSION_DENIED,
        6: ToolError.NO_DEVICES,
        9: ToolError.DRIVER_MISSING,
        12: ToolError.SHARED_LIB_MISSING,
        18: ToolError.DRIVER_MISMATCH,
    },
    unverified=("rc_errors", "probe_commands.paths", "peer_memory_modules of nv_peer_mem"),
    notes=(
        "V100 and T4 have no BF16; their peak is FP16.",
        "MIG instances are offered in place of their GPU and taken by uuid (`nvidia-smi -L`); a process sees one.",
        "GB10 and Jetson share the host's memory: the tool tells no size.",
    ),
)
