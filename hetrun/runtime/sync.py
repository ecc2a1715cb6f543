"""Adds up gradients over the ranks that hold them, and agrees on loss and gradient norm of the global batch.

Everything is SUM, never averaged: losses are divided by the tokens of the whole batch before backward. Which ranks
share which units, and in what order, is decided in `schedule/sync.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetrun.model import MIB
from hetrun.runtime.boundary import PeerLostError
from hetrun.runtime.engine import Timeline
from hetrun.schedule.sync import Bucket

CHUNK_BYTES = 64 * MIB  # of flat copies in host memory at a time
_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What all ranks know after a step's scalar exchange."""

    loss: float
    gradient_norm: float
    stop: bool  # some rank was asked to stop after this step


@dataclass(frozen=True, slots=True, eq=False)
class BucketGroup:
    """A bucket that this rank is part of, its process group and its planned seconds."""

    bucket: Bucket
    group: dist.ProcessGroup
    planned_s: float


class GradientSync:
    """Gradient sums of one rank, bucket by bucket in the one global order."""

    def __init__(
        self,
        units: Mapping[str, Mapping[str, nn.Parameter]],
        *,
        buckets: Sequence[BucketGroup],
        counted: frozenset[str],
        scalar_planned_s: float,
    ) -> None:
        """`counted` are the units whose norm this rank adds: each unit of the model is counted by one rank."""
        self._units = units
        self._buckets = buckets
        self._counted = counted
        self._scalar_planned_s = scalar_planned_s
        for item in buckets:
            self._check_bytes(item.bucket)

    def reduce(self, timeline: Timeline) -> None:
        """Replace each shared gradient by the sum over its holders."""
        for item in self._buckets:
            start_s = timeline.clock.now_s()
            if timeline.clock.modelled:
                clocks = _gather([start_s], item.group)
                start_s = max(clock_s for (clock_s,) in clocks)
                timeline.clock.wait_until(start_s)
            for chunk in _chunks(self._parameters(item.bucket)):
                _all_reduce(chunk, item.group)
            timeline.clock.spend(item.planned_s)
            timeline.close_span("sync", None, start_s)

    def totals(self, loss: float, timeline: Timeline, *, stop: bool = False) -> Totals:
        """Exchange squared norm, loss, clock and wish to stop with all ranks, once."""
        start_s = timeline.clock.now_s()
        squared = sum(
            _squared_norm(parameter)
            for unit in sorted(self._counted)
            for parameter in self._units[unit].values()
        )
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
        for parameters in self._units.values():
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _parameters(self, bucket: Bucket) -> Iterator[nn.Parameter]:
        for unit in bucket.units:
            yield from self._units[unit].values()

    def _check_bytes(self, bucket: Bucket) -> None:
        held = sum(p.numel() * p.element_size() for p in self._parameters(bucket))
        if held != bucket.num_bytes:
            raise RuntimeError(f"{bucket}: parameters take {held} bytes")


def counted_units(
    units: Mapping[str, Mapping[str, nn.Parameter]], buckets: Sequence[Bucket], rank: int
) -> frozenset[str]:
    """Units whose norm `rank` adds: what it holds alone, and what it shares as the lowest rank."""
    lowest = {unit: min(bucket.ranks) for bucket in buckets for unit in bucket.units}
    return frozenset(unit for unit in units if lowest.get(unit, rank) == rank)


def _chunks(parameters: Iterator[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Gradients in order, in lists of about CHUNK_BYTES; a parameter without one counts as zeros."""
    chunk: list[Tensor] = []
    num_bytes = 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        chunk.append(parameter.grad)
        num_bytes += parameter.grad.numel() * parameter.grad.element_size()
        if num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _all_reduce(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum over the group, through one flat tensor in host memory."""
    flat = torch.cat([gradient.flatten() for gradient in gradients]).cpu()
    try:
        dist.all_reduce(flat, group=group)
    except RuntimeError as error:
        raise PeerLostError(f"a rank did not add its gradients: {error}") from error
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


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
