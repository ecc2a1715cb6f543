"""Seconds of a stage, of a transfer and of the ideal, from measured figures. When things happen is left to `schedule/`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hetrun import arch
from hetrun.model import DeviceProfile, Link, ModelSpec, RowTiming, RunTiming
from hetrun.schedule.sync import ring_s

_PARTS = (
    "layer_forward_s",
    "layer_backward_s",
    "embedding_forward_s",
    "embedding_backward_s",
    "head_forward_s",
    "head_backward_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a stage holds of the model."""

    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool


def timing_at(
    profile: DeviceProfile, rows: int, *, tp: int = 1, recompute: bool = False
) -> RowTiming:
    """Return seconds for a microbatch of `rows` rows.

    Linear between measured sizes. Above the largest, the slope of the last two goes on (in proportion, where
    one size was measured or the slope is not positive); below the smallest, its figures stand: less work never
    takes longer. `is_extrapolated` tells.
    """
    timings = profile.timings_of(tp=tp, recompute=recompute)
    values = [_value_at([(t.rows, getattr(t, part)) for t in timings], rows) for part in _PARTS]
    seconds: dict[str, Any] = dict(zip(_PARTS, values, strict=True))
    return replace(
        timings[0],
        rows=rows,
        spread=max(timing.spread for timing in timings),
        runs=_runs_at(timings, rows),
        **seconds,
        **_weights_at(timings, rows),
    )


def shared_timing(timing: RowTiming, link: Link, layer_output_bytes: int) -> RowTiming:
    """Add what the tp devices of a stage tell each other, which profile leaves out; nothing where tp is 1.

    Two ring all-reduces of a layer's output in its forward (behind attention and behind the inner network), two of
    as many bytes in its backward, and the forward's once more where it runs again (Shoeybi et al. 2019, section 3).
    """
    if timing.tp == 1:
        return timing
    forward_s = 2 * ring_s(layer_output_bytes, timing.tp, [link])
    backward_s = forward_s * (1 + timing.recompute)
    return replace(
        timing,
        layer_forward_s=timing.layer_forward_s + forward_s,
        layer_backward_s=timing.layer_backward_s + backward_s,
        runs=tuple(
            replace(
                run, forward_s=run.forward_s + forward_s, backward_s=run.backward_s + backward_s
            )
            for run in timing.runs
        ),
    )


def _weights_at(timings: Sequence[RowTiming], rows: int) -> dict[str, Any]:
    """Return the seconds of the weights' gradients, None where some size has no figure."""
    parts: dict[str, Any] = {}
    for part in ("layer_weights_s", "head_weights_s"):
        points = [(t.rows, getattr(t, part)) for t in timings]
        known = all(seconds is not None for _, seconds in points)
        parts[part] = _value_at(points, rows) if known else None
    return parts


def splits_backward(timing: RowTiming) -> bool:
    """Whether figures say how much of a backward only the weights need; where layers differ none do."""
    known = timing.layer_weights_s is not None and timing.head_weights_s is not None
    return known and not timing.runs


def weights_seconds(timing: RowTiming, piece: Piece) -> float:
    """Return the seconds of a stage's backward that only the gradients of its weights need."""
    head_s = timing.head_weights_s or 0.0
    return piece.num_layers * (timing.layer_weights_s or 0.0) + piece.has_head * head_s


def _runs_at(timings: Sequence[RowTiming], rows: int) -> tuple[RunTiming, ...]:
    """Return the seconds of each run of equal layers at `rows` rows."""
    return tuple(
        RunTiming(
            num_layers=run.num_layers,
            forward_s=_value_at([(t.rows, t.runs[number].forward_s) for t in timings], rows),
            backward_s=_value_at([(t.rows, t.runs[number].backward_s) for t in timings], rows),
        )
        for number, run in enumerate(timings[0].runs)
    )


def is_extrapolated(profile: DeviceProfile, rows: int) -> bool:
    """Whether `rows` lies outside of what was measured."""
    measured = measured_rows(profile)
    return not measured[0] <= rows <= measured[-1]


def measured_rows(profile: DeviceProfile) -> tuple[int, ...]:
    """Return the microbatch sizes that were measured, ascending; the same for every tp."""
    return tuple(sorted({timing.rows for timing in profile.timings}))


def _value_at(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Return the value at `rows` of the polyline through (rows, value) points."""
    first_rows, first = points[0]
    if rows <= first_rows:
        return first
    for (low_rows, low), (high_rows, high) in pairwise(points):
        if rows <= high_rows:
            return low + (high - low) * (rows - low_rows) / (high_rows - low_rows)
    last_rows, last = points[-1]
    slope = 0.0
    if len(points) > 1:
        slope = (last - points[-2][1]) / (last_rows - points[-2][0])
    if slope <= 0:
        slope = last / last_rows
    return last + slope * (rows - last_rows)


def stage_seconds(timing: RowTiming, piece: Piece) -> tuple[float, float]:
    """Return seconds of forward and backward of one microbatch on a stage."""
    forward_s, backward_s = layers_seconds(timing, piece.first_layer, piece.num_layers)
    if piece.has_embedding:
        forward_s += timing.embedding_forward_s
        backward_s += timing.embedding_backward_s
    if piece.has_head:
        forward_s += timing.head_forward_s
        backward_s += timing.head_backward_s
    return forward_s, backward_s


def layers_seconds(timing: RowTiming, first: int, count: int) -> tuple[float, float]:
    """Return seconds of forward and backward of one microbatch in `count` layers from layer `first` on."""
    if not timing.runs:
        return count * timing.layer_forward_s, count * timing.layer_backward_s
    forward_s = backward_s = 0.0
    begin = 0
    for run in timing.runs:
        held = min(first + count, begin + run.num_layers) - max(first, begin)
        if held > 0:
            forward_s += held * run.forward_s
            backward_s += held * run.backward_s
        begin += run.num_layers
    return forward_s, backward_s


def send_seconds(link: Link, num_bytes: int, *, at_once: int = 1) -> float:
    """Return seconds of one microbatch's activation over a link, one way, where `at_once` of them share it."""
    return link.latency_s + num_bytes * at_once / link.bytes_per_s


class Crossings:
    """How many lanes of each host send activations to other hosts, and receive some: they share its interface."""

    def __init__(self, replicas: Iterable[Sequence[Sequence[Hashable]]]) -> None:
        """Count; `replicas` are the hosts of the lanes' first devices, by replica and stage."""
        self._senders: Counter[Hashable] = Counter()
        self._receivers: Counter[Hashable] = Counter()
        for stages in replicas:
            for before, after in pairwise(stages):
                self._senders.update(_leaving(before, after))
                self._receivers.update(_leaving(after, before))

    def at_once(self, sender: Hashable, receiver: Hashable) -> int:
        """Return how many sends share the busier end of a hop between hosts; 1 inside of one."""
        if sender == receiver:
            return 1
        return max(self._senders[sender], self._receivers[receiver])


def _leaving(ends: Sequence[Hashable], others: Sequence[Hashable]) -> list[Hashable]:
    """Return the hosts of those ends that have some other end elsewhere."""
    if len(ends) == len(others) == 1:
        return [] if ends[0] == others[0] else [ends[0]]
    hosts = set(others)
    return [host for host in ends if len(hosts) > 1 or host not in hosts]


def stage_parameters(model: ModelSpec, piece: Piece, *, tp: int = 1) -> int:
    """Return how many parameters each of `tp` devices of a stage holds: its share of the layers, the rest whole.

    A tied matrix, with all that belongs to the embedding, lives wherever embedding or head are.
    """
    end = piece.first_layer + piece.num_layers
    count = -(-arch.layers_parameters(model, piece.first_layer, end) // tp)
    if piece.has_embedding:
        count += arch.embedding_parameters(model)
    if piece.has_head:
        count += arch.head_parameters(model)
        if model.tied_embeddings:
            count -= model.vocab_size * model.hidden_size
            count += 0 if piece.has_embedding else arch.embedding_parameters(model)
    return count


def unit_seconds(timing: RowTiming) -> tuple[float, float, float]:
    """Return seconds of forward and backward together: one layer (the mean of all), the embedding, the head."""
    return (
        timing.layer_forward_s + timing.layer_backward_s,
        timing.embedding_forward_s + timing.embedding_backward_s,
        timing.head_forward_s + timing.head_backward_s,
    )


def model_seconds(timing: RowTiming, num_layers: int) -> float:
    """Return seconds of one microbatch through the whole model on one device."""
    layer_s, embedding_s, head_s = unit_seconds(timing)
    return num_layers * layer_s + embedding_s + head_s


def part_seconds(timing: RowTiming) -> tuple[float, ...]:
    """Return seconds of forward and backward together: one layer of each run of equal ones, the embedding, the head."""
    layer_s, embedding_s, head_s = unit_seconds(timing)
    runs = [run.forward_s + run.backward_s for run in timing.runs] or [layer_s]
    return (*runs, embedding_s, head_s)


def best_part_seconds_per_row(timings: Iterable[RowTiming]) -> tuple[float, ...]:
    """Return the least seconds per row of each part, each at its own best microbatch size; as `part_seconds`."""
    per_row = [tuple(seconds / t.rows for seconds in part_seconds(t)) for t in timings]
    return tuple(min(column) for column in zip(*per_row, strict=True))
