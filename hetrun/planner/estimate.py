"""Quick seconds of a combination of replica shapes, to rank many. The simulator judges the best of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heappush, heappushpop
from itertools import pairwise

from hetrun.model import LinkKind
from hetrun.planner.apportion import Part, level_s
from hetrun.planner.problem import Problem
from hetrun.planner.shapes import Shape
from hetrun.schedule.step import SCALAR_BYTES
from hetrun.schedule.sync import ring_s

Combo = tuple[tuple[Shape, int], ...]  # replica shapes and how many of each


def parts_of(combo: Combo) -> list[Part]:
    """Return the combination as the apportionment sees it."""
    return [
        Part(rows=shape.rows, count=count, fill_s=shape.fill_s, cycle_s=shape.cycle_s)
        for shape, count in combo
    ]


def compute_s(problem: Problem, combo: Combo) -> float | None:
    """Return about how long a step takes without its sync; None where the batch is too small for so many replicas."""
    level = level_s(problem.batch_rows, parts_of(combo))
    return None if level is None else level + max(shape.optimizer_s for shape, _ in combo)


def quickest(problem: Problem, combos: Iterable[Combo], *, most: int) -> list[Combo]:
    """Return the most promising combinations, best first; equal ones in the order in which they came.

    Sync takes longest to estimate and only adds, so it is left out where the rest is too slow already.
    """
    computed: dict[Combo, float] = {}
    for combo in combos:
        if combo not in computed:
            seconds = compute_s(problem, combo)
            if seconds is not None:
                computed[combo] = seconds
    order = {combo: number for number, combo in enumerate(computed)}
    best: list[tuple[float, int, Combo]] = []  # the slowest first: seconds and numbers negated
    for combo in sorted(computed, key=computed.__getitem__):
        if len(best) == most and computed[combo] >= -best[0][0]:
            break
        item = (-computed[combo] - sync_s(problem, combo), -order[combo], combo)
        if len(best) < most:
            heappush(best, item)
        else:
            heappushpop(best, item)
    return [combo for _, _, combo in sorted(best, key=lambda item: (-item[0], -item[1]))]


def sync_s(problem: Problem, combo: Combo) -> float:
    """Return the seconds of gradient sync on the busiest stage: each segment of layers once per owner set."""
    if sum(count * sum(shape.lanes) for shape, count in combo) < 2:
        return 0.0
    everyone: dict[str, int] = {}
    for shape, count in combo:
        for kind in shape.kinds:
            vendor = problem.kinds[kind].vendor
            everyone[vendor] = everyone.get(vendor, 0) + count * problem.kinds[kind].width
    near = tuple(v for v, count in everyone.items() if count <= problem.fullest_host[v])
    scalar_s = reduce_s(problem, everyone, SCALAR_BYTES, near=near)
    if sum(count * max(shape.lanes) for shape, count in combo) < 2:
        return scalar_s
    ends = [_stage_ends(shape) for shape, _ in combo]
    cuts = sorted({0}.union(*ends))
    until = {0: 0.0}  # seconds of all segments before a cut
    stages = [0] * len(combo)  # that hold the segment, per shape
    for first, end in pairwise(cuts):
        owners: dict[str, int] = {}
        tps = []
        for number, (shape, count) in enumerate(combo):
            if ends[number][stages[number]] == first:
                stages[number] += 1
            way = problem.kinds[shape.kinds[stages[number]]]
            owners[way.vendor] = owners.get(way.vendor, 0) + count * way.lanes
            tps.append(way.tp)
        num_bytes = problem.gradient_bytes(first, end, tp=min(tps))
        until[end] = until[first] + reduce_s(
            problem, owners, num_bytes, near=near, at_once=min(tps)
        )
    busiest = max(
        until[end] - until[begin]
        for stage_ends in ends
        for begin, end in pairwise((0, *stage_ends))
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


def reduce_s(
    problem: Problem,
    owners: Mapping[str, int],
    num_bytes: int,
    *,
    near: tuple[str, ...] = (),
    at_once: int = 1,
) -> float:
    """Return the seconds of an all-reduce over so many devices of each vendor, on likely seats; remembered.

    Devices of the vendors `near` are on one host each; `at_once` owners share the interface of each host.
    """
    key = (tuple(owners.items()), num_bytes, near, at_once)
    if key not in problem.reduce_cache:
        problem.reduce_cache[key] = _reduce_s(problem, owners, num_bytes, near, at_once)
    return problem.reduce_cache[key]


def _reduce_s(
    problem: Problem,
    owners: Mapping[str, int],
    num_bytes: int,
    near: tuple[str, ...],
    at_once: int,
) -> float:
    inside_s = 0.0
    for vendor, count in owners.items():
        if count > 1:
            kind = LinkKind.INSIDE_HOST if vendor in near else problem.inside[vendor]
            leaving = num_bytes * (1 if kind is LinkKind.INSIDE_HOST else at_once)
            link = problem.link(kind, vendor, vendor)
            inside_s = max(inside_s, ring_s(leaving, count, [link]))
    vendors = sorted(owners)
    if len(vendors) == 1:
        return inside_s
    neighbours = zip(vendors, [*vendors[1:], vendors[0]], strict=True)
    hops = [problem.link(LinkKind.ACROSS, a, b) for a, b in neighbours]
    return inside_s + ring_s(num_bytes * at_once, len(vendors), hops)
