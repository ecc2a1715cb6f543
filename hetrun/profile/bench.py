"""What the bench on a host is asked, and what it answers. The other end is `runtime/bench.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hetrun.errors import JobError
from hetrun.model import Device, DeviceProfile, Recipe
from hetrun.profile.samples import Kind, Sample, kind_of
from hetrun.profile.stragglers import DeviceCheck
from hetrun.schedule.shares import check_tp
from hetrun.strictyaml import BadKeysError, to_noun
from hetrun.vendors import get_vendor


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to time of a recipe's model, ascending."""

    recipe: Recipe
    rows: tuple[int, ...]
    tp: tuple[int, ...]
    recompute: bool
    quick: bool

    @property
    def cases(self) -> list[tuple[int, bool, int]]:
        """(tp, recompute, rows) of every timing, ascending."""
        choices = (False, True)[: 1 + self.recompute]
        return [(tp, again, rows) for tp in self.tp for again in choices for rows in self.rows]


def wanted_of(recipe: Recipe, *, quick: bool = False) -> Wanted:
    """Return what a plan may choose from: every microbatch size (`quick`: the least and the most), tp, recompute.

    Whole layers that store everything are always among it.

    Raises:
        ConfigError: a tp that does not divide the layer.
    """
    rows = sorted(set(recipe.train.microbatch_rows))
    tp = tuple(sorted({1, *recipe.plan.tp}))
    for number in tp:
        check_tp(recipe.model, number)
    return Wanted(
        recipe=recipe,
        rows=tuple(sorted({rows[0], rows[-1]})) if quick else tuple(rows),
        tp=tp,
        recompute=recipe.plan.recompute,
        quick=quick,
    )


def shape_request(wanted: Wanted) -> dict[str, Any]:
    """Return the part of the request that does not depend on the devices, as JSON values."""
    return {
        "model": asdict(wanted.recipe.model),
        "seq_len": wanted.recipe.data.seq_len,
        "rows": list(wanted.rows),
        "dtype": wanted.recipe.train.dtype.value,
        "tp": list(wanted.tp),
        "recompute": wanted.recompute,
        "quick": wanted.quick,
    }


def bench_request(sample: Sample, wanted: Wanted) -> dict[str, Any]:
    """Return what the bench on a host is asked, as JSON values."""
    return {
        **shape_request(wanted),
        "devices": [_bench_device(device) for device in sample.devices],
        "checks": [_bench_device(device) for device in sample.checks],
    }


def _bench_device(device: Device) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "vendor": device.vendor,
        "model": kind_of(device)[1],
        "torch_device": "cpu",
        "torch_plugin": None,
        "visible_env": None,
        "visible_id": None,
        "env": {},
        "num_threads": device.num_threads,
        "index": device.index,
        "emulated": None if device.emulated is None else asdict(device.emulated),
    }
    if device.emulated is None:
        vendor = get_vendor(device.vendor)
        entry |= {
            "torch_device": vendor.torch_device,
            "torch_plugin": vendor.torch_plugin,
            "visible_env": vendor.visible_devices_env,
            "visible_id": device.visible_id,
            "env": dict(vendor.extra_env),
        }
    return entry


def read_bench(
    sample: Sample,
    files: Mapping[str, bytes],
    *,
    hosts: Mapping[Kind, tuple[str, ...]],
    wanted: Wanted,
) -> tuple[list[DeviceProfile], list[DeviceCheck]]:
    """Return what a host measured in full and what it checked; `hosts` have devices of each kind.

    Raises:
        JobError: the answer is missing, damaged or about something else.
    """
    name = sample.host.spec.name
    try:
        answer = json.loads(files["bench.json"])
        found = [
            to_noun(DeviceProfile, {**item, "hosts": hosts[item["vendor"], item["model"]]})
            for item in answer["devices"]
        ]
        threads = {device.index: device.num_threads for device in sample.checks}
        checks = [
            to_noun(
                DeviceCheck, {**item, "host": name, "num_threads": threads.get(item["index"], 1)}
            )
            for item in answer["checks"]
        ]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        what = str(error) if isinstance(error, BadKeysError) else repr(error)
        raise JobError(f"the bench answered in a wrong way: {what[:300]}", host=name) from error
    asked = sorted((kind, wanted.cases) for kind in map(kind_of, sample.devices))
    got = sorted(
        ((item.vendor, item.model), [(t.tp, t.recompute, t.rows) for t in item.timings])
        for item in found
    )
    if got != asked:
        raise JobError(f"the bench measured {got}, asked for {asked}", host=name)
    if sorted(check.index for check in checks) != sorted(d.index for d in sample.checks):
        indices = [check.index for check in checks]
        raise JobError(f"the bench checked devices {indices}, others were asked for", host=name)
    return found, checks + [_check_of(sample, item) for item in found if _is_real(sample, item)]


def _is_real(sample: Sample, item: DeviceProfile) -> bool:
    return _device(sample, item).emulated is None


def _device(sample: Sample, item: DeviceProfile) -> Device:
    return next(d for d in sample.devices if kind_of(d) == (item.vendor, item.model))


def _check_of(sample: Sample, item: DeviceProfile) -> DeviceCheck:
    """What the quick check would have measured, from the full figures."""
    timing = item.timings_of()[0]
    return DeviceCheck(
        host=sample.host.spec.name,
        vendor=item.vendor,
        model=item.model,
        index=_device(sample, item).index,
        num_threads=_device(sample, item).num_threads,
        layer_s=timing.layer_forward_s + timing.layer_backward_s,
        matmul_flops_per_s=item.matmul_flops_per_s.value or 0.0,
    )
