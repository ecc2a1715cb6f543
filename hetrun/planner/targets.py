"""How torch names a vendor's devices, as plain strings. The facts themselves stand in `vendors/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetrun.errors import NoPlanError
from hetrun.model import Facts
from hetrun.vendors import get_vendor

VISIBLE_BY = ("index", "uuid", "module_id", "cores")
_ONLY_TOLD = VISIBLE_BY[2:]  # an index in their place would select another device


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTarget:
    """What a rank needs to know to drive a device; `visible_by` says which id `visible_env` takes."""

    torch_device: str  # "cuda", "npu", "cpu", ...
    torch_plugin: str | None = None  # module to import before the device exists
    visible_env: str | None = None  # variable that selects the device
    visible_by: str = "index"  # one of VISIBLE_BY
    env: Mapping[str, str] = field(default_factory=dict)  # what its numbering relies on

    def __post_init__(self) -> None:
        if self.visible_by not in VISIBLE_BY:
            raise ValueError(f"visible_by {self.visible_by!r}, need one of {VISIBLE_BY}")


EMULATED = TorchTarget(torch_device="cpu")


def torch_targets(facts: Facts) -> Mapping[str, TorchTarget]:
    """Return the target of every vendor that has a real device in the facts.

    Raises:
        ConfigError: nobody brings that vendor.
        NoPlanError: a device cannot be selected, since its tool did not tell the id that takes.
    """
    real = [
        (host.spec.name, device)
        for host in facts.hosts
        for device in host.devices
        if device.emulated is None
    ]
    targets = {name: _target(name) for name in sorted({device.vendor for _, device in real})}
    for host, device in real:
        target = targets[device.vendor]
        if target.visible_by in _ONLY_TOLD and device.visible_id is None:
            what = target.visible_by.replace("_", " ")
            raise NoPlanError(
                f"device {device.index} has no {what}, which {target.visible_env} takes",
                host=host,
                hint=f"run hetrun probe again where the tool of {device.vendor} tells the {what}, "
                "or take the host out of the inventory",
            )
    return targets


def _target(name: str) -> TorchTarget:
    vendor = get_vendor(name)
    return TorchTarget(
        torch_device=vendor.torch_device,
        torch_plugin=vendor.torch_plugin,
        visible_env=vendor.visible_devices_env,
        visible_by=vendor.visible_devices_id,
        env=dict(vendor.extra_env),
    )
