"""How fast each device model and each link is on one recipe. Measuring is left to `hetrun/profile.py`."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.model.base import SCHEMA_VERSION, Noun, Quantity, Source, need
from hetrun.model.inventory import Link
from hetrun.model.recipe import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiming(Noun):
    """Seconds of one microbatch of `rows` rows: ONE layer, the embedding, the head with its loss."""

    rows: int
    layer_forward_s: float
    layer_backward_s: float
    embedding_forward_s: float
    embedding_backward_s: float
    head_forward_s: float
    head_backward_s: float
    spread: float = 0.0  # (slowest - fastest) / median of the repeats

    def __post_init__(self) -> None:
        need(self.rows >= 1, f"timing: rows {self.rows}, need at least 1")
        for what in ("layer_forward_s", "layer_backward_s"):
            need(
                getattr(self, what) > 0,
                f"timing of {self.rows} rows: {what} {getattr(self, what)}, need more than 0",
            )
        for what in (
            "embedding_forward_s",
            "embedding_backward_s",
            "head_forward_s",
            "head_backward_s",
        ):
            need(
                getattr(self, what) >= 0,
                f"timing of {self.rows} rows: {what} {getattr(self, what)}, need 0 or more",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile(Noun):
    """Figures of one device model; all devices with this (vendor, model) on `hosts` share them."""

    vendor: str
    model: str
    hosts: tuple[str, ...]
    source: Source
    timings: tuple[RowTiming, ...]  # ascending rows
    optimizer_s_per_parameter: float
    matmul_flops_per_s: Quantity
    copy_bytes_per_s: Quantity

    def __post_init__(self) -> None:
        rows = [timing.rows for timing in self.timings]
        need(
            bool(rows) and rows == sorted(set(rows)),
            f"profile of {self.model}: timings for rows {rows}, need ascending",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Noun):
    """profile.json: the answer of `hetrun profile`."""

    schema_version: int = SCHEMA_VERSION
    created: str  # ISO 8601, UTC
    recipe: str
    model: ModelSpec  # what was measured; plan refuses another shape
    seq_len: int
    devices: tuple[DeviceProfile, ...]
    links: tuple[Link, ...]
