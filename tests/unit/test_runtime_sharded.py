"""Parts of a rank's segments: who updates what, known to all without asking."""

from __future__ import annotations

import torch
from torch import nn

from hetrun.runtime.segments import Segment
from hetrun.runtime.sharded import parts_of


def segments() -> list[Segment]:
    shapes = ((5, 8), (7,), (6, 4), (1, 3))
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    whole = [Segment(p, 0, 0, p.shape[0]) for p in parameters]
    return [*whole, Segment(nn.Parameter(torch.zeros(4, 10)), 1, 2, 9)]


def test_parts_hold_each_element_once_in_order_and_are_equal_to_a_row() -> None:
    for count in (1, 2, 3, 5, 40):
        held = segments()
        parts = parts_of(held, count)
        for part in parts:
            for segment in part:
                segment.value.add_(1)
        for segment in held:
            assert segment.value.eq(1).all()
        outside = held[-1].parameter.detach()
        assert outside[:, :2].eq(0).all()
        assert outside[:, 9:].eq(0).all()
        order = [id(segment.parameter) for part in parts for segment in part]
        assert list(dict.fromkeys(order)) == [id(segment.parameter) for segment in held]
        total = sum(segment.value.numel() for segment in held)
        sizes = [sum(segment.value.numel() for segment in part) for part in parts]
        assert all(abs(size - total / count) <= 8 for size in sizes)  # the longest row


def test_parts_of_nothing_are_empty() -> None:
    assert parts_of([], 3) == ((), (), ())
