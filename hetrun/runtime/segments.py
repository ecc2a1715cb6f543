"""The parameters of a rank as the buckets of a step see them: lists of slices, each list with the ranks that hold it too.

Whose slices they are is decided in `schedule/portions.py`; what is done with them in `sync.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetrun.runtime.addition import LevelGroups
from hetrun.runtime.boxes import Box, whole_box
from hetrun.schedule.portions import Portion
from hetrun.schedule.sync import Bucket, Part

Units = Mapping[str, Mapping[str, nn.Parameter]]  # parameters by name, by unit


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """[start, end) of what a rank holds of a parameter, along one dim; or all of it."""

    parameter: nn.Parameter
    dim: int
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Of the values, or of their gradients."""
        return self.value.numel() * self.parameter.element_size()

    @property
    def value(self) -> Tensor:
        """A view of the parameter."""
        return self.parameter.detach().narrow(self.dim, self.start, self.end - self.start)

    @property
    def gradient(self) -> Tensor:
        """A view of the gradient, which becomes zeros where no microbatch touched the parameter."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        return self.parameter.grad.narrow(self.dim, self.start, self.end - self.start)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentGroup:
    """Segments of one bucket that the same ranks hold, in one order on all of them.

    A gradient is a part of the sum, unless `copies` ranks of a lane are in the group: theirs are equal, and each
    gives 1 / copies of it.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    segments: tuple[Segment, ...]
    copies: int
    levels: LevelGroups | None = None  # None: all ranks add up at once, in `group`

    @property
    def num_bytes(self) -> int:
        """Of all segments."""
        return sum(segment.num_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True, eq=False)
class BucketGroup:
    """A bucket that this rank is part of, its segments by the groups that hold them, and its planned seconds."""

    bucket: Bucket
    groups: tuple[SegmentGroup, ...]
    planned_s: float

    def check_bytes(self, tp: int) -> None:
        """Compare what is here with what was planned; `tp` is of the rank's own lane.

        Raises:
            RuntimeError: they differ.
        """
        wanted = self.bucket.num_bytes
        if self.bucket.part is Part.SHARES:
            wanted = wanted * self.bucket.tp // tp
        held = sum(group.num_bytes for group in self.groups)
        if held != wanted:
            raise RuntimeError(f"{self.bucket}: parameters take {held} bytes, need {wanted}")


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """What a rank holds: parameters by name by unit, which can be shared along which dim, and which part is here."""

    units: Units
    dims: Mapping[str, int]  # the rest is whole on each rank
    boxes: Mapping[str, Box]  # none: all of it is here

    def box(self, name: str, parameter: nn.Parameter) -> Box:
        """Which part of a parameter is here."""
        return self.boxes.get(name) or whole_box(parameter.shape)


def segments_of(bucket: Bucket, portion: Portion, holding: Holding) -> Iterator[Segment]:
    """What a rank holds of a portion of a bucket."""
    for unit in bucket.units:
        for name, parameter in holding.units[unit].items():
            if name in holding.dims:
                dim, box = holding.dims[name], holding.box(name, parameter)
                yield from _shared(parameter, portion, dim=dim, box=box)
            elif portion.copies:
                yield Segment(parameter, 0, 0, parameter.shape[0])


def counted_parameters(
    holding: Holding, *, buckets: Sequence[Bucket], lane: Sequence[int], rank: int
) -> list[nn.Parameter]:
    """Parameters whose norm a rank adds, so that each element of the model is counted once.

    A unit is counted by the lane that holds it alone, or has the lowest rank of those that do: shares by each of its
    ranks, copies by the first. `lane` has the ranks of this rank's lane.
    """
    lowest = {unit: min(bucket.ranks) for bucket in buckets for unit in bucket.units}
    return [
        parameter
        for unit, parameters in holding.units.items()
        if lowest.get(unit, lane[0]) == lane[0]
        for name, parameter in parameters.items()
        if name in holding.dims or rank == lane[0]
    ]


def _shared(parameter: nn.Parameter, portion: Portion, *, dim: int, box: Box) -> Iterator[Segment]:
    begin, stop = box.ranges[dim]
    ends = [place * box.whole[dim] for place in (portion.start, portion.end)]
    if any(end % portion.of for end in ends):
        raise ValueError(f"{box} is not cut into {portion.of} equal parts")
    start, end = max(begin, ends[0] // portion.of), min(stop, ends[1] // portion.of)
    if start < end:
        yield Segment(parameter, dim, start - begin, end - begin)
