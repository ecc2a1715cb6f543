"""Quick seconds of a combination of replica shapes, to rank many. The simulator judges the best of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from hetrun import arch
from hetrun.model import Link, LinkKind
from hetrun.planner.apportion import Part, level_s
from hetrun.planner.problem import Problem
from hetrun.planner.shapes import Shape
from hetrun.schedule.step import SCALAR_BYTES

Combo = tuple[tuple[Shape, int], ...]  # replica shapes and how many of each


def parts_of(combo: Combo) -> list[Part]:
    """Return the combination as the apportionment sees it."""
    return [
        Part(rows=shape.rows, count=count, fill_s=shape.fill_s, cycle_s=shape.cycle_s)
        for shape, count in combo
    ]


def estimate_s(problem: Problem, combo: Combo) -> float | None:
    """Return about how long a step takes; None where the batch is too small for so many replicas."""
    level = level_s(problem.batch_rows, parts_of(combo))
    if level is None:
        return None
    return level + sync_s(problem, combo) + max(shape.optimizer_s for shape, _ in combo)


def sync_s(problem: Problem, combo: Combo) -> float:
    """Return the seconds of gradient sync on the busiest stage: each segment of layers once per owner set."""
    if sum(count * shape.num_stages for shape, count in combo) < 2:
        return 0.0
    everyone: dict[str, int] = {}
    for shape, count in combo:
        for kind in shape.kinds:
            vendor = problem.kinds[kind].vendor
            everyone[vendor] = everyone.get(vendor, 0) + count
    scalar_s = reduce_s(problem, everyone, SCALAR_BYTES)
    if sum(count for _, count in combo) < 2:
        return scalar_s
    num_layers = problem.model.num_layers
    ends = [_stage_ends(shape) for shape, _ in combo]
    cuts = sorted({0, num_layers}.union(*ends))
    until = {0: 0.0}  # seconds of all segments before a cut
    for first, end in pairwise(cuts):
        owners: dict[str, int] = {}
        for (shape, count), stage_ends in zip(combo, ends, strict=True):
            stage = next(i for i, stage_end in enumerate(stage_ends) if stage_end > first)
            vendor = problem.kinds[shape.kinds[stage]].vendor
            owners[vendor] = owners.get(vendor, 0) + count
        until[end] = until[first] + reduce_s(problem, owners, _segment_bytes(problem, first, end))
    busiest = max(
        until[end] - until[begin]
        for stage_ends in ends
        for begin, end in zip([0, *stage_ends[:-1]], stage_ends, strict=True)
    )
    return busiest + scalar_s


def _stage_ends(shape: Shape) -> list[int]:
    """Return one past the last layer of each stage."""
    ends = []
    end = 0
    for count in shape.layers:
        end += count
        ends.append(end)
    return ends


def _segment_bytes(problem: Problem, first: int, end: int) -> int:
    """Return gradient bytes of layers [first, end), with embedding and head where they belong."""
    count = (end - first) * arch.layer_parameters(problem.model)
    if first == 0:
        count += arch.embedding_parameters(problem.model)
    if end == problem.model.num_layers:
        count += arch.head_parameters(problem.model)
    return count * arch.BYTES_PER_ELEMENT[problem.dtype]


def reduce_s(problem: Problem, owners: Mapping[str, int], num_bytes: float) -> float:
    """Return the seconds of an all-reduce over so many devices of each vendor, on likely seats."""
    inside_s = 0.0
    for vendor, count in owners.items():
        if count > 1:
            link = problem.link(_inside(problem, vendor), vendor, vendor)
            inside_s = max(inside_s, _ring_s(num_bytes, count, [link]))
    vendors = sorted(owners)
    if len(vendors) == 1:
        return inside_s
    neighbours = zip(vendors, [*vendors[1:], vendors[0]], strict=True)
    hops = [problem.link(LinkKind.ACROSS, a, b) for a, b in neighbours]
    return inside_s + _ring_s(num_bytes, len(vendors), hops)


def _ring_s(num_bytes: float, size: int, hops: Sequence[Link]) -> float:
    return 2 * (size - 1) * max(h.latency_s + num_bytes / size / h.bytes_per_s for h in hops)


def _inside(problem: Problem, vendor: str) -> LinkKind:
    """Return which link the devices of a vendor share, pessimistic about hosts."""
    hosts = {
        seat.host_number for kind in problem.kinds if kind.vendor == vendor for seat in kind.seats
    }
    return LinkKind.INSIDE_HOST if len(hosts) == 1 else LinkKind.INSIDE_ISLAND
