"""Devices that are slower than their equals. Measuring them is left to the bench."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hetrun.model import Noun
from hetrun.profile.samples import Kind

STRAGGLER_RATIO = 1.25  # times the seconds of the middle device of its kind


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCheck(Noun):
    """What equal devices are compared by: one layer, forward and backward, and one large product."""

    host: str
    vendor: str
    model: str
    index: int  # in the host
    layer_s: float
    matmul_flops_per_s: float
    num_threads: int = 1  # parts of processors are equals only with as many

    def __post_init__(self) -> None:
        for what in ("layer_s", "matmul_flops_per_s"):
            if not getattr(self, what) > 0:
                raise ValueError(f"check of {self.host}/{self.index}: {what} is not above 0")


def stragglers(checks: Sequence[DeviceCheck]) -> dict[Kind, tuple[str, ...]]:
    """Return, for each kind that has any, a sentence for each device that is slower than its equals.

    The middle of the kind (of two, the faster) is the measure, so the device that was measured in
    full may be named too.
    """
    groups: dict[tuple[str, str, int], list[DeviceCheck]] = {}
    for check in sorted(checks, key=lambda item: (item.host, item.index)):
        groups.setdefault((check.vendor, check.model, check.num_threads), []).append(check)
    found: dict[Kind, tuple[str, ...]] = {}
    for (vendor, model, _), equals in sorted(groups.items()):
        if said := _slow(equals):
            found[vendor, model] = (*found.get((vendor, model), ()), *said)
    return found


def _slow(equals: Sequence[DeviceCheck]) -> tuple[str, ...]:
    layer_s = statistics.median_low(check.layer_s for check in equals)
    rate = statistics.median_high(check.matmul_flops_per_s for check in equals)
    said = []
    for check in equals:
        layer, product = check.layer_s / layer_s, rate / check.matmul_flops_per_s
        if max(layer, product) > STRAGGLER_RATIO:
            said.append(
                f"{check.host}/{check.index} is slower than its equals: a layer takes"
                f" {layer:.2f} times as long, a product {product:.2f} times"
            )
    return tuple(said)
