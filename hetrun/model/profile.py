"""How fast each device model and each link is on one recipe. Measuring is left to `hetrun/profile.py`."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.model.base import SCHEMA_VERSION, Noun, Quantity, Source, need
from hetrun.model.inventory import Link
from hetrun.model.recipe import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiming(Noun):
    """Seconds of one microbatch of `rows` rows: ONE layer, the embedding, the head with its loss.

    `tp` devices share the work, their collectives included; with `recompute` the backward runs the forward again.
    """

    rows: int
    layer_forward_s: float
    layer_backward_s: float
    embedding_forward_s: float
    embedding_backward_s: float
    head_forward_s: float
    head_backward_s: float
    tp: int = 1
    recompute: bool = False
    spread: float = 0.0  # (slowest - fastest) / median of the repeats
    layer_peak_bytes: int | None = (
        None  # above what was there before, forward and backward of one layer
    )

    def __post_init__(self) -> None:
        need(self.rows >= 1, f"timing: rows {self.rows}, need at least 1")
        need(self.tp >= 1, f"timing of {self.rows} rows: tp {self.tp}, need at least 1")
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
    timings: tuple[RowTiming, ...]  # ascending (tp, recompute, rows)
    optimizer_s_per_parameter: float
    matmul_flops_per_s: Quantity
    copy_bytes_per_s: Quantity

    def __post_init__(self) -> None:
        keys = [(timing.tp, timing.recompute, timing.rows) for timing in self.timings]
        need(
            bool(keys) and keys == sorted(set(keys)),
            f"profile of {self.model}: timings for (tp, recompute, rows) {keys}, need ascending",
        )

    def timings_of(self, *, tp: int = 1, recompute: bool = False) -> tuple[RowTiming, ...]:
        """Return the timings at one tp and recompute, ascending rows; empty where nothing was measured."""
        return tuple(t for t in self.timings if (t.tp, t.recompute) == (tp, recompute))


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
