"""Which part of a tensor a rank holds: ranges along its dims. Who holds which is decided in the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Box:
    """[start, end) along every dim of a tensor of this shape."""

    ranges: tuple[tuple[int, int], ...]
    whole: tuple[int, ...]  # shape of the tensor that this is a part of

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(end - start for start, end in self.ranges)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.shape == self.whole

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a whole tensor, as a view."""
        for dim, (start, end) in enumerate(self.ranges):
            tensor = tensor.narrow(dim, start, end - start)
        return tensor

    def inside(self, outer: Box) -> Box:
        """Where the common part of both lies in a tensor that holds `outer` only.

        Empty (`overlaps` is false) where they have none.
        """
        ranges = []
        for (start, end), (begin, stop) in zip(self.ranges, outer.ranges, strict=True):
            first = max(start, begin)
            ranges.append((first - begin, max(first, min(end, stop)) - begin))
        return Box(tuple(ranges), outer.shape)

    def overlaps(self, other: Box) -> bool:
        """Whether they have an element in common; a tensor of no dim has one."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        return all(max(a, c) < min(b, d) for (a, b), (c, d) in pairs)

    def contains(self, other: Box) -> bool:
        """Whether all of another part of the same tensor lies in this one."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        return all(start <= begin and stop <= end for (start, end), (begin, stop) in pairs)


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box(tuple((0, size) for size in shape), tuple(shape))


def box_along(shape: Sequence[int], dim: int, start: int, end: int) -> Box:
    """[start, end) along one dim of a tensor, all of the others."""
    ranges = [(0, size) for size in shape]
    ranges[dim] = (start, end)
    return Box(tuple(ranges), tuple(shape))


def covers(boxes: Iterable[Box], wanted: Box) -> bool:
    """Whether these boxes of one tensor make up another one of it; they may overlap."""
    parts = [box for box in boxes if box.overlaps(wanted)]
    if any(box.contains(wanted) for box in parts):
        return True
    edges = []
    for dim, (start, end) in enumerate(wanted.ranges):
        inner = {edge for box in parts for edge in box.ranges[dim] if start < edge < end}
        edges.append(list(pairwise(sorted({start, end, *inner}))))
    return all(
        any(box.contains(Box(tuple(cell), wanted.whole)) for box in parts)
        for cell in product(*edges)
    )
