"""Adds up gradients over the ranks that hold them, and agrees on loss and gradient norm of the global batch.

Everything is SUM, never averaged: losses are divided by the tokens of the whole batch before backward. Which ranks
share which parameters, and in what order, is decided in `schedule/`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetrun.model import MIB
from hetrun.runtime.addition import add_all, added
from hetrun.runtime.boundary import PeerLostError
from hetrun.runtime.engine import Timeline
from hetrun.runtime.segments import BucketGroup, SegmentGroup
from hetrun.runtime.state import Updated

CHUNK_BYTES = 64 * MIB  # of flat copies in host memory at a time
_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What all ranks know after a step's scalar exchange."""

    loss: float
    gradient_norm: float
    stop: bool  # some rank was asked to stop after this step


class GradientSync:
    """Gradient sums of one rank, bucket by bucket in the one global order."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        buckets: Sequence[BucketGroup],
        counted: Sequence[nn.Parameter],
        scalar_planned_s: float,
    ) -> None:
        """`counted` are the parameters whose norm this rank adds: each element of the model is counted by one rank."""
        self._parameters = list(parameters)
        self._buckets = buckets
        self._counted = counted
        self._scalar_planned_s = scalar_planned_s

    @property
    def buckets(self) -> Sequence[BucketGroup]:
        """What this rank shares, in the one global order."""
        return self._buckets

    def reduce(self, timeline: Timeline) -> None:
        """Replace each shared gradient by the sum over its holders."""
        for item in self._buckets:
            start_s = meet(item.groups, timeline)
            for chunks in zip_longest(*map(_chunks, item.groups)):
                add_all(_sum(chunk) for chunk in chunks if chunk is not None)
            timeline.clock.spend(item.planned_s)
            timeline.close_span("sync", None, start_s)

    @property
    def updated(self) -> Sequence[nn.Parameter]:
        """What this rank's optimizer updates."""
        return self._parameters

    @property
    def parts(self) -> Sequence[Updated]:
        """Which parts of parameters these are, where others update the rest: none."""
        return ()

    def gather(self, timeline: Timeline) -> None:
        """Take the values that others updated: none, where each rank updates all that it holds."""

    def totals(self, loss: float, timeline: Timeline, *, stop: bool = False) -> Totals:
        """Exchange squared norm, loss, clock and wish to stop with all ranks, once."""
        start_s = timeline.clock.now_s()
        squared = math.fsum(map(_squared_norm, self._counted))
        rows = [[squared, loss, start_s, float(stop)]]
        if dist.get_world_size() > 1:
            rows = _gather(rows[0], None)
            if timeline.clock.modelled:
                start_s = max(row[2] for row in rows)
                timeline.clock.wait_until(start_s)
            timeline.clock.spend(self._scalar_planned_s)
            timeline.close_span("sync", None, start_s)
        return Totals(
            loss=math.fsum(row[1] for row in rows),
            gradient_norm=math.sqrt(math.fsum(row[0] for row in rows)),
            stop=any(row[3] for row in rows),
        )

    def clip(self, gradient_norm: float, clip_norm: float | None) -> None:
        """Scale all gradients so that their global norm is at most `clip_norm`."""
        if clip_norm is None:
            return
        factor = min(1.0, clip_norm / (gradient_norm + _CLIP_EPS))
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def meet(groups: Sequence[SegmentGroup], timeline: Timeline) -> float:
    """Return when all ranks of these groups are there; modelled time goes on from then."""
    start_s = timeline.clock.now_s()
    if timeline.clock.modelled:
        start_s = max(clock_s for group in groups for (clock_s,) in _gather([start_s], group.group))
        timeline.clock.wait_until(start_s)
    return start_s


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Gradients that are summed up in one go, and by whom."""

    gradients: list[Tensor]
    by: SegmentGroup


def _chunks(group: SegmentGroup) -> Iterator[_Chunk]:
    """Gradients in order, in lists of about CHUNK_BYTES."""
    gradients: list[Tensor] = []
    num_bytes = 0
    for segment in group.segments:
        gradients.append(segment.gradient)
        num_bytes += segment.num_bytes
        if num_bytes >= CHUNK_BYTES:
            yield _Chunk(gradients, group)
            gradients, num_bytes = [], 0
    if gradients:
        yield _Chunk(gradients, group)


def _sum(chunk: _Chunk) -> Iterator[None]:
    by = chunk.by
    return added(chunk.gradients, by.group, levels=by.levels, copies=by.copies)


def _gather(values: Sequence[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """The values of every rank of the group (all ranks when None), in order of rank."""
    mine = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(rows, mine, group=group)
    except RuntimeError as error:
        raise PeerLostError(f"a rank did not share its loss and clock: {error}") from error
    return [row.tolist() for row in rows]


def _squared_norm(parameter: nn.Parameter) -> float:
    if parameter.grad is None:
        return 0.0
    gradient = parameter.grad
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return float(wide.square().sum().item())
