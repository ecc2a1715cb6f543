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

    def common(self, other: Box) -> Box:
        """What both have, of two parts of one tensor that overlap."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        return Box(tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs), self.whole)

    def inside(self, outer: Box) -> Box:
        """Where it lies in a tensor that holds `outer` only, which contains it."""
        pairs = zip(self.ranges, outer.ranges, strict=True)
        return Box(tuple((a - begin, b - begin) for (a, b), (begin, _) in pairs), outer.shape)

    def overlaps(self, other: Box) -> bool:
        """Whether they have an element in common; a tensor of no dim has one."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        return all(max(a, c) < min(b, d) for (a, b), (c, d) in pairs)

    def contains(self, other: Box) -> bool:
        """Whether all of another part of the same tensor lies in this one."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        return all(start <= begin and stop <= end for (start, end), (begin, stop) in pairs)

    def numbers(self) -> list[list[int]]:
        """[start, end, size of the whole] along every dim, for JSON."""
        pairs = zip(self.ranges, self.whole, strict=True)
        return [[start, end, size] for (start, end), size in pairs]


def box_of(numbers: Iterable[Sequence[int]]) -> Box:
    """The box that says these numbers of itself.

    Raises:
        ValueError: they are those of no box.
    """
    known = [(start, end, size) for start, end, size in numbers]
    if not all(0 <= start <= end <= size for start, end, size in known):
        raise ValueError(f"no part of a tensor: {known}")
    ranges = tuple((start, end) for start, end, _ in known)
    return Box(ranges, tuple(size for *_, size in known))


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
    parts = [box for box in boxes if box.whole == wanted.whole and box.overlaps(wanted)]
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
