"""How torch names a vendor's devices, as plain strings. The facts themselves stand in `vendors/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetrun.model import Facts
from hetrun.vendors import get_vendor


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTarget:
    """What a rank needs to know to drive a device; `visible_by` says which id `visible_env` takes."""

    torch_device: str  # "cuda", "npu", "cpu", ...
    torch_plugin: str | None = None  # module to import before the device exists
    visible_env: str | None = None  # variable that selects the device
    visible_by: str = "index"  # or "uuid"

    def __post_init__(self) -> None:
        if self.visible_by not in ("index", "uuid"):
            raise ValueError(f"visible_by {self.visible_by!r}, need index or uuid")


EMULATED = TorchTarget(torch_device="cpu")


def torch_targets(facts: Facts) -> Mapping[str, TorchTarget]:
    """Return the target of every vendor that has a real device in the facts.

    Raises:
        ConfigError: nobody brings that vendor.
    """
    names = {
        device.vendor for host in facts.hosts for device in host.devices if device.emulated is None
    }
    return {name: _target(name) for name in sorted(names)}


def _target(name: str) -> TorchTarget:
    vendor = get_vendor(name)
    by_uuid = vendor.visible_devices_id == "uuid"
    return TorchTarget(
        torch_device=vendor.torch_device,
        torch_plugin=vendor.torch_plugin,
        visible_env=vendor.visible_devices_env,
        visible_by="uuid" if by_uuid else "index",
    )
