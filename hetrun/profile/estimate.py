"""Figures of devices that nobody ran: published peaks times a stated efficiency, always labelled assumed.

Emulated chips keep their declared figures, labelled modelled.
"""

from __future__ import annotations

from hetrun.arch import BYTES_PER_PARAMETER
from hetrun.errors import PreflightError
from hetrun.model import Device, DeviceProfile, Quantity, Source
from hetrun.profile.bench import Wanted
from hetrun.profile.samples import kind_of
from hetrun.schedule.modelled import OPTIMIZER_FLOPS_PER_PARAMETER, modelled_timings
from hetrun.vendors import Chip, get_vendor

PEAK_SHARE = (
    0.40  # of a chip's dense peak that training reaches; 0.35 to 0.45 is common for large models
)
CORE_FLOPS_PER_S = 10e9  # of one processor thread, at fp32; an AVX2 core reaches several times that
BANDWIDTH_SHARE = 0.80  # of the published memory bandwidth
CORE_BYTES_PER_S = 5e9
# AdamW reads parameter, gradient and two moments, and writes parameter and two moments
_OPTIMIZER_TOUCHES = 7


def estimate(device: Device, wanted: Wanted, *, hosts: tuple[str, ...]) -> DeviceProfile:
    """Return figures for one kind of device.

    Raises:
        PreflightError: its peak is not published, so nothing can be said.
    """
    if device.emulated is not None:
        return _declared(device, wanted, hosts=hosts)
    vendor = get_vendor(device.vendor)
    if vendor.torch_device == "cpu":
        why = f"{device.num_threads} threads x {CORE_FLOPS_PER_S / 1e9:g} GFLOP/s"
        rate = device.num_threads * CORE_FLOPS_PER_S
        bandwidth: float | None = device.num_threads * CORE_BYTES_PER_S
    else:
        chip = vendor.find_model(device.model)
        rate, why = _peak(device, chip)
        bandwidth = None
        if chip is not None and chip.tb_per_s is not None:
            bandwidth = chip.tb_per_s * 1e12 * BANDWIDTH_SHARE
    element = BYTES_PER_PARAMETER[wanted.recipe.train.dtype]
    optimizer_s = OPTIMIZER_FLOPS_PER_PARAMETER / rate
    if bandwidth is not None:
        optimizer_s = _OPTIMIZER_TOUCHES * element / bandwidth
    return _from_rate(
        device,
        wanted,
        hosts=hosts,
        matmul=Quantity(value=rate, source=Source.ASSUMED, why=why),
        copy=Quantity(
            value=bandwidth,
            source=Source.ASSUMED,
            why="share of the published bandwidth" if bandwidth else "not published",
        ),
        optimizer_s=optimizer_s,
    )


def _peak(device: Device, chip: Chip | None) -> tuple[float, str]:
    peak = None if chip is None else chip.peak_flops.value
    if chip is None or peak is None:
        raise PreflightError(
            f"{device.vendor} {kind_of(device)[1]}: no peak is published, so it cannot be estimated",
            hint="leave --from-spec away to measure it",
        )
    return PEAK_SHARE * peak, f"{PEAK_SHARE:.0%} of {peak / 1e12:g} TFLOP/s ({chip.peak_flops.why})"


def _declared(device: Device, wanted: Wanted, *, hosts: tuple[str, ...]) -> DeviceProfile:
    if device.emulated is None:
        raise ValueError(f"{device.vendor} {device.model} is no emulated chip")
    rate = device.emulated.flops_per_s
    return _from_rate(
        device,
        wanted,
        hosts=hosts,
        matmul=Quantity(value=rate, source=Source.MODELLED),
        copy=Quantity(
            value=None, source=Source.MODELLED, why="an emulated chip declares no memory speed"
        ),
        optimizer_s=OPTIMIZER_FLOPS_PER_PARAMETER / rate,
    )


def _from_rate(
    device: Device,
    wanted: Wanted,
    *,
    hosts: tuple[str, ...],
    matmul: Quantity,
    copy: Quantity,
    optimizer_s: float,
) -> DeviceProfile:
    """FLOPs of the model's parts over the matmul rate."""
    recipe = wanted.recipe
    vendor, name = kind_of(device)
    return DeviceProfile(
        vendor=vendor,
        model=name,
        hosts=hosts,
        source=matmul.source,
        timings=modelled_timings(
            recipe.model,
            wanted.cases,
            seq_len=recipe.data.seq_len,
            flops_per_s=matmul.value or 0.0,
        ),
        optimizer_s_per_parameter=optimizer_s,
        matmul_flops_per_s=matmul,
        copy_bytes_per_s=copy,
    )
