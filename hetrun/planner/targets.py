"""How torch names a vendor's devices, as plain strings. Filled in from `vendors/` by whoever calls the planner."""

from __future__ import annotations

from dataclasses import dataclass


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
