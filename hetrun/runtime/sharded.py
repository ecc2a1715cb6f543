"""Where all ranks that hold a parameter share out its update (ZeRO stage 1): who updates what, and how the rest get it.

The segments that a group holds are cut into as many parts as it has ranks. Gradients are reduce-scattered: each rank gets
the sums of its own part. It updates that part, with moments of that part alone, and the new values are all-gathered.
No two ranks update the same element, so the holders of a parameter cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetrun.runtime.boundary import PeerLostError
from hetrun.runtime.boxes import Box
from hetrun.runtime.engine import Timeline
from hetrun.runtime.segments import BucketGroup, Holding, Segment, SegmentGroup
from hetrun.runtime.state import Updated
from hetrun.runtime.sync import CHUNK_BYTES, GradientSync, meet


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A part of a parameter that this rank updates: a view of it, and where in the whole parameter it lies."""

    name: str
    box: Box
    segment: Segment
    value: nn.Parameter
    is_alone: bool  # of equal copies in a lane, one group has the counted ones


@dataclass(frozen=True, slots=True, eq=False)
class _SharedGroup:
    """The segments of a group, by the place in the group of the rank that updates them; `own` is this rank's."""

    held: SegmentGroup
    parts: tuple[tuple[Segment, ...], ...]
    own: int

    def rounds(self) -> Iterator[list[list[Segment]]]:
        """For each rank of the group about as much of its part as may travel at once, over and over."""
        most = CHUNK_BYTES // len(self.parts)
        for pieces in zip_longest(*(_pieces(part, most) for part in self.parts)):
            yield [piece or [] for piece in pieces]


class ShardedSync(GradientSync):
    """Gradient sums, updates and values of one rank that updates a part of what it holds."""

    def __init__(
        self,
        holding: Holding,
        *,
        buckets: Sequence[BucketGroup],
        lane: Sequence[int],
        rank: int,
        counted: Sequence[nn.Parameter],
        scalar_planned_s: float,
    ) -> None:
        """`lane` has the ranks that share layers with this one; `counted` is what its norm would be of, all updated here."""
        self._groups = {
            id(group): _SharedGroup(
                group, parts_of(group.segments, len(group.ranks)), group.ranks.index(rank)
            )
            for bucket in buckets
            for group in bucket.groups
        }
        names = _names(holding)
        shared: set[int] = set()
        self.shards: list[Shard] = []
        counted_here: list[nn.Parameter] = []
        for group in self._groups.values():
            shared |= {id(segment.parameter) for segment in group.held.segments}
            for segment in group.parts[group.own]:
                name = names[id(segment.parameter)]
                # equal copies are in the group of each place of a lane, shares in one alone
                is_alone = name in holding.dims or lane[0] in group.held.ranks
                box = holding.box(name, segment.parameter)
                shard = _shard(name, segment, box, is_alone=is_alone)
                self.shards.append(shard)
                if is_alone:
                    counted_here.append(shard.value)
        alone = [
            parameter
            for parameters in holding.units.values()
            for parameter in parameters.values()
            if id(parameter) not in shared
        ]
        super().__init__(
            [*(shard.value for shard in self.shards), *alone],
            buckets=buckets,
            counted=[*counted_here, *(p for p in counted if id(p) not in shared)],
            scalar_planned_s=scalar_planned_s,
        )

    @property
    def parts(self) -> Sequence[Updated]:
        """Parts of parameters that this rank updates."""
        return self.shards

    def reduce(self, timeline: Timeline) -> None:
        """Give each shard the sum of its gradients over the holders."""
        for item in self.buckets:
            start_s = meet(item.groups, timeline)
            groups = [self._groups[id(group)] for group in item.groups]
            for rounds in zip_longest(*(group.rounds() for group in groups)):
                pairs = zip(groups, rounds, strict=True)
                for sum_ in [_Scattered(g, pieces) for g, pieces in pairs if pieces is not None]:
                    sum_.finish()
            timeline.clock.spend(item.planned_s / 2)
            timeline.close_span("sync", None, start_s)
        for shard in self.shards:
            shard.value.grad = shard.segment.gradient

    def gather(self, timeline: Timeline) -> None:
        """Take the values that others updated."""
        for item in self.buckets:
            start_s = meet(item.groups, timeline)
            groups = [self._groups[id(group)] for group in item.groups]
            for rounds in zip_longest(*(group.rounds() for group in groups)):
                pairs = zip(groups, rounds, strict=True)
                for taken in [_Gathered(g, pieces) for g, pieces in pairs if pieces is not None]:
                    taken.finish()
            timeline.clock.spend(item.planned_s / 2)
            timeline.close_span("sync", None, start_s)


def parts_of(segments: Sequence[Segment], count: int) -> tuple[tuple[Segment, ...], ...]:
    """Cut segments, as one row of elements, into `count` nearly equal parts; a cut falls between two slices of a dim.

    It depends on shapes alone, so that all that hold the same cut alike.
    """
    total = sum(segment.value.numel() for segment in segments)
    parts: list[list[Segment]] = [[] for _ in range(count)]
    begin = 0
    for segment in segments:
        size, length = segment.value.numel(), segment.end - segment.start
        each = size // length
        cuts = [
            min(length, max(0, (2 * (total * k // count - begin) + each) // (2 * each)))
            for k in range(count + 1)
        ]
        cuts[-1] = length
        for part, first, end in zip(parts, cuts[:-1], cuts[1:], strict=True):
            if first < end:
                part.append(replace(segment, start=segment.start + first, end=segment.start + end))
        begin += size
    return tuple(map(tuple, parts))


def _pieces(part: Sequence[Segment], most: int) -> Iterator[list[Segment]]:
    """Segments in order, in lists of about so many bytes."""
    piece: list[Segment] = []
    num_bytes = 0
    for segment in part:
        piece.append(segment)
        num_bytes += segment.num_bytes
        if num_bytes >= most:
            yield piece
            piece, num_bytes = [], 0
    if piece:
        yield piece


class _Scattered:
    """A reduce-scatter under way: every rank sends each other the gradients of its part, and adds up what it gets."""

    def __init__(self, group: _SharedGroup, pieces: Sequence[Sequence[Segment]]) -> None:
        held = group.held
        self._own = [segment.gradient for segment in pieces[group.own]]
        sent = torch.cat([s.gradient.flatten() for piece in pieces for s in piece]).cpu()
        if held.copies > 1:
            sent.div_(held.copies)
        sizes = [_numel(piece) for piece in pieces]
        mine = sizes[group.own]
        self._sent = sent  # in use until the end
        self._rows = sent.new_empty((len(pieces), mine))
        into = self._rows.view(-1)
        try:
            self._work = dist.all_to_all_single(
                into, sent, [mine] * len(pieces), sizes, group=held.group, async_op=True
            )
        except RuntimeError as error:
            raise _lost(error) from error

    def finish(self) -> None:
        """Wait for it and put the sums in place.

        Raises:
            PeerLostError: a rank is gone.
        """
        _wait(self._work)
        _put(self._rows.sum(0), self._own)


class _Gathered:
    """An all-gather under way: every rank tells all others the new values of its part."""

    def __init__(self, group: _SharedGroup, pieces: Sequence[Sequence[Segment]]) -> None:
        self._others = [
            [] if place == group.own else [segment.value for segment in piece]
            for place, piece in enumerate(pieces)
        ]
        first = next(chain.from_iterable(pieces)).parameter
        mine = torch.zeros(max(map(_numel, pieces)), dtype=first.dtype)
        own = [segment.value.flatten().cpu() for segment in pieces[group.own]]
        mine[: _numel(pieces[group.own])] = torch.cat([mine[:0], *own])
        self._rows = [torch.empty_like(mine) for _ in pieces]
        held = group.held
        try:
            self._work = dist.all_gather(self._rows, mine, group=held.group, async_op=True)
        except RuntimeError as error:
            raise _lost(error) from error

    def finish(self) -> None:
        """Wait for it and put the values in place.

        Raises:
            PeerLostError: a rank is gone.
        """
        _wait(self._work)
        for row, values in zip(self._rows, self._others, strict=True):
            _put(row, values)


def _numel(segments: Sequence[Segment]) -> int:
    return sum(segment.value.numel() for segment in segments)


def _put(flat: Tensor, into: Sequence[Tensor]) -> None:
    """Fill tensors, one behind the other; what is left over fills none."""
    begin = 0
    for tensor in into:
        end = begin + tensor.numel()
        tensor.copy_(flat[begin:end].view_as(tensor))
        begin = end


def _wait(work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> PeerLostError:
    return PeerLostError(f"a rank did not share its part of an update: {error}")


def _names(holding: Holding) -> dict[int, str]:
    """Name of each parameter, by its id."""
    units = holding.units.values()
    return {id(p): name for parameters in units for name, p in parameters.items()}


def _shard(name: str, segment: Segment, held: Box, *, is_alone: bool) -> Shard:
    """A segment as the optimizer and checkpoints see it; `held` is the part of the parameter that is here."""
    ranges = list(held.ranges)
    begin = ranges[segment.dim][0]
    ranges[segment.dim] = (begin + segment.start, begin + segment.end)
    value = nn.Parameter(segment.value, requires_grad=False)
    return Shard(name, Box(tuple(ranges), held.whole), segment, value, is_alone)
