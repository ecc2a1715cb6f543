"""How fast the devices of one host are on one model: `python -m hetrun.runtime.bench JOBDIR`, started by profile.

Reads JOBDIR/bench.json, writes JOBDIR/out/bench.json. Emulated chips yield their declared figures without torch;
each real device is measured by `measure.py` in a process of its own (`... JOBDIR INDEX`), since the variable that
selects a device must be set before torch is imported. `checks` are further devices of a kind that is measured
somewhere: one product and one layer show whether they are as fast as their equals.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from hetrun.errors import ConfigError, JobError
from hetrun.model import Dtype, EmulatedChip, ModelSpec, Quantity, RowTiming, Source
from hetrun.runtime.job import decode, read_json
from hetrun.runtime.process import measuring
from hetrun.schedule.modelled import OPTIMIZER_FLOPS_PER_PARAMETER, modelled_timings

DEVICE_TIMEOUT_S = 280.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchDevice:
    """One device to measure, with its torch names and the variable that selects it."""

    vendor: str
    model: str
    torch_device: str
    torch_plugin: str | None = None
    visible_env: str | None = None
    visible_id: str | None = None
    env: dict[str, str] = field(default_factory=dict)  # that the vendor's numbering relies on
    num_threads: int = 1
    emulated: EmulatedChip | None = None
    index: int = 0  # in the host


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """bench.json: the model's shape, the microbatch sizes, how layers may be shared and stored, the devices."""

    model: ModelSpec
    seq_len: int
    rows: tuple[int, ...]
    dtype: Dtype
    devices: tuple[BenchDevice, ...]
    checks: tuple[BenchDevice, ...] = ()
    tp: tuple[int, ...] = (1,)
    recompute: bool = False  # also time layers that run their forward again
    quick: bool = False

    def __post_init__(self) -> None:
        if any(device.emulated for device in self.checks):
            raise ValueError("checks of emulated chips: they are as fast as they declare")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Figures of one device; the fields that a DeviceProfile takes over."""

    vendor: str
    model: str
    source: Source
    timings: tuple[RowTiming, ...]
    optimizer_s_per_parameter: float
    matmul_flops_per_s: Quantity
    copy_bytes_per_s: Quantity
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What equal devices are compared by: one layer forward and backward, one large product."""

    vendor: str
    model: str
    index: int
    layer_s: float
    matmul_flops_per_s: float


def main() -> int:
    """Measure all devices of the request, or the one whose index is the second argument; return the exit code."""
    return measuring(_run)


def _run(arguments: Sequence[str]) -> None:
    match arguments:
        case [folder]:
            _bench_all(Path(folder))
        case [folder, index] if index.isdecimal():
            _bench_one(Path(folder), int(index))
        case _:
            raise ConfigError(f"got arguments {list(arguments)}, need the job directory")


def read_request(job_dir: Path) -> BenchRequest:
    """Load what profile asks for.

    Raises:
        ConfigError: a key that is missing, unknown or of the wrong type.
    """
    path = job_dir / "bench.json"
    return decode(BenchRequest, read_json(path), where=str(path))


def modelled(request: BenchRequest, device: BenchDevice, chip: EmulatedChip) -> BenchResult:
    """Figures of an emulated chip: FLOPs of the model's parts over its declared speed."""
    speed = chip.flops_per_s
    timings = modelled_timings(
        request.model, _cases(request), seq_len=request.seq_len, flops_per_s=speed
    )
    return BenchResult(
        vendor=device.vendor,
        model=device.model,
        source=Source.MODELLED,
        timings=timings,
        optimizer_s_per_parameter=OPTIMIZER_FLOPS_PER_PARAMETER / speed,
        matmul_flops_per_s=Quantity(value=speed, source=Source.MODELLED),
        copy_bytes_per_s=Quantity(
            value=None, source=Source.MODELLED, why="an emulated chip declares no memory speed"
        ),
    )


def _cases(request: BenchRequest) -> list[tuple[int, bool, int]]:
    """(tp, recompute, rows), ascending."""
    choices = (False, True)[: 1 + request.recompute]
    return sorted(product(request.tp, choices, request.rows))


def _bench_all(job_dir: Path) -> None:
    request = read_request(job_dir)
    results: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    torch_version = None
    for number, device in enumerate((*request.devices, *request.checks)):
        into = results if number < len(request.devices) else checks
        if device.emulated is not None:
            into.append(asdict(modelled(request, device, device.emulated)))
            continue
        answer = _in_own_process(job_dir, number, device)
        torch_version = answer["torch_version"]
        into.append(answer["device"])
    out = job_dir / "out"
    out.mkdir(exist_ok=True)
    answer = {"devices": results, "checks": checks, "torch_version": torch_version}
    (out / "bench.json").write_text(json.dumps(answer, allow_nan=False))


def _in_own_process(job_dir: Path, index: int, device: BenchDevice) -> Any:
    command = [sys.executable, "-m", "hetrun.runtime.bench", str(job_dir), str(index)]
    try:
        code = subprocess.run(command, timeout=DEVICE_TIMEOUT_S, check=False).returncode
    except subprocess.TimeoutExpired as error:
        raise JobError(
            f"{device.vendor} {device.model}: no figures within {DEVICE_TIMEOUT_S:.0f} s",
            hint="see whether the vendor's own tool still answers on that host",
        ) from error
    if code != 0:
        raise JobError(f"{device.vendor} {device.model}: measuring it ended with code {code}")
    return read_json(_device_path(job_dir, index))


def _bench_one(job_dir: Path, index: int) -> None:
    request = read_request(job_dir)
    device = (*request.devices, *request.checks)[index]
    os.environ.update(device.env)
    if device.visible_env is not None and device.visible_id is not None:
        os.environ[device.visible_env] = device.visible_id

    from hetrun.runtime import measure  # torch comes only now, with the environment complete

    action = measure.measured if index < len(request.devices) else measure.checked
    answer = {
        "device": asdict(action(request, device)),
        "torch_version": measure.torch_version(),
    }
    _device_path(job_dir, index).write_text(json.dumps(answer, allow_nan=False))


def _device_path(job_dir: Path, index: int) -> Path:
    return job_dir / f"device-{index}.json"


if __name__ == "__main__":
    sys.exit(main())
