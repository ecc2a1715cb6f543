"""How fast each device model and each link is on one recipe. Measuring is left to `hetrun/profile/`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hetrun.model.base import SCHEMA_VERSION, Noun, Quantity, Source, need
from hetrun.model.decoder import ModelSpec
from hetrun.model.inventory import Link, LinkKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTiming(Noun):
    """Seconds of one microbatch in ONE of `num_layers` equal, consecutive layers."""

    num_layers: int
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        need(self.num_layers >= 1, f"timing of {self.num_layers} layers, need at least 1")
        for what in ("forward_s", "backward_s"):
            need(getattr(self, what) > 0, f"layers: {what} {getattr(self, what)}, need more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiming(Noun):
    """Seconds of one microbatch of `rows` rows: ONE layer, the embedding, the head with its loss.

    Where layers differ, `runs` has the seconds of each run of equal ones, and `layer_forward_s` and
    `layer_backward_s` are the mean over all layers.

    With `tp` above 1 these are the seconds of ONE of the tp devices, compute alone: it holds heads / tp,
    key/value heads / tp and ffn / tp of the layer, and norms, embedding and head whole. The collectives are NOT
    inside: 2 all-reduces in a layer's forward and 2 in its backward, each of rows x seq_len x hidden_size
    elements, are for the link model. With `recompute` the backward runs the layer's forward again.
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
        None  # activations and temporaries of one layer's forward and backward, above what was there before
    )
    runs: tuple[RunTiming, ...] = ()  # in order; empty where all layers are alike
    layer_weights_s: float | None = None  # the part of layer_backward_s that only weights need
    head_weights_s: float | None = None  # None: not measured, so that no W can be put off

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
        for what in ("layer", "head"):
            part_s, whole_s = (
                getattr(self, f"{what}_weights_s"),
                getattr(self, f"{what}_backward_s"),
            )
            need(
                part_s is None or 0 <= part_s <= whole_s,
                f"timing of {self.rows} rows: {what}_weights_s {part_s} of {what}_backward_s {whole_s}",
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
    warnings: tuple[str, ...] = ()  # uneven repeats, devices slower than their equals

    def __post_init__(self) -> None:
        keys = [(timing.tp, timing.recompute, timing.rows) for timing in self.timings]
        need(
            bool(keys) and keys == sorted(set(keys)),
            f"profile of {self.model}: timings for (tp, recompute, rows) {keys}, need ascending",
        )

    def timings_of(self, *, tp: int = 1, recompute: bool = False) -> tuple[RowTiming, ...]:
        """Return the timings at one tp and recompute, ascending rows; empty where nothing was measured."""
        return tuple(t for t in self.timings if (t.tp, t.recompute) == (tp, recompute))


class CurveKind(str, Enum):
    """What the seconds of a curve are of."""

    P2P = "p2p"  # one message, one way
    ALL_REDUCE = "all_reduce"  # all ranks, each with so many bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint(Noun):
    """Median seconds for messages of one size."""

    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        need(self.num_bytes >= 1, f"curve: {self.num_bytes} bytes, need at least 1")
        need(
            self.seconds > 0, f"curve at {self.num_bytes} bytes: {self.seconds} s, need more than 0"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCurve(Noun):
    """Seconds over message sizes between two hosts, and the fit: seconds = latency_s + bytes / bytes_per_s."""

    link: LinkKind
    a: str  # vendors, as in the Link that the fit became
    b: str
    hosts: tuple[str, ...]  # the two ends, or one host that talked to itself
    addresses: tuple[str, ...]
    kind: CurveKind
    source: Source
    points: tuple[CurvePoint, ...]  # ascending num_bytes
    latency_s: float
    bytes_per_s: float
    why: str = ""  # how it was measured or derived
    backend: str | None = None  # in torch.distributed; None where it was not used
    num_ranks: int = 2


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
    curves: tuple[LinkCurve, ...] = ()  # of the links that were measured
    quick: bool = False  # fewer repeats and sizes
    warnings: tuple[str, ...] = ()  # pairs of hosts that differ from the others of their link
