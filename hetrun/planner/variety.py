"""Which replica shapes are looked at: devices per group, orders, tp, recomputation, microbatch sizes. How many of each is left to `compose.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from math import inf

from hetrun.planner.problem import Problem
from hetrun.planner.shapes import Cut, Shape, ShapeMaker

_FULL_GRID = 12  # block sizes up to here are all tried, larger ones on a grid
_COARSE_GRID = 4  # the same with three kinds and more
_FEW_USES = 600  # above, only two orders of the kinds are tried
_MOST_SHAPES = 1500
ANY_MIX = 14  # devices; up to here every mix of replicas is looked at where these are not too many
FEW = 6  # devices; up to here a pipeline may also pass to and fro between kinds
_SHORT_BLOCK = 4  # stages; recomputation on any number of them is tried up to here


def enumerate_shapes(maker: ShapeMaker, *, quick: bool = False) -> list[Shape]:
    """Return the shapes that fit, the most promising ones if there are very many.

    At most one block per kind, any order of the kinds, any microbatch size; of few devices any order of the stages.
    """
    problem = maker.problem
    uses = list(_uses(problem, quick=quick))
    few = len(uses) * len(problem.row_choices) <= _FEW_USES
    found: list[tuple[float, tuple[int, ...], int, Cut]] = []
    for use in uses:
        lists = [
            stages
            for order in _orders(problem, use, few=few)
            for stages in stage_lists(problem, order, use)
        ]
        if problem.num_devices <= ANY_MIX and not quick:
            few = problem.num_devices <= FEW
            lists += _woven([stages for stages in lists if few or len(stages) <= _SHORT_BLOCK])
        for stages, rows in product(lists, problem.row_choices):
            cut = maker.cut(stages, rows)
            if cut is not None:
                found.append((-maker.promise(stages, rows, cut), stages, rows, cut))
    found.sort(key=lambda item: item[:3])
    return [
        maker.finish(stages, cut.layers, rows, memory_bound=cut.memory_bound)
        for _, stages, rows, cut in found[:_MOST_SHAPES]
    ]


def _woven(lists: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the same stages in all other orders: memory and links can make one vendor first and last."""
    return sorted({order for stages in lists for order in permutations(stages)}.difference(lists))


def stage_lists(
    problem: Problem, order: Sequence[int], use: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield kinds per stage of blocks of groups: every tp, any lanes, and recomputation on the first so many stages of a block.

    A block's first stages hold most microbatches, so these are where recomputation can pay.
    """
    blocks = [
        [
            block
            for block in _block_lists(problem, place, use[place])
            if sum(problem.kinds[kind].width for kind in block) <= problem.capacity[place]
        ]
        for place in order
    ]
    for chosen in product(*blocks):
        yield tuple(kind for block in chosen for kind in block)


def _block_lists(problem: Problem, place: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yield kinds per stage of one block; long blocks recompute everywhere or nowhere."""
    ways = {
        (kind.tp, kind.lanes, kind.recompute): number
        for number, kind in enumerate(problem.kinds)
        if problem.places[number] == place
    }
    for tp, lanes in product(sorted({tp for tp, _, _ in ways}), _lanes_lists(problem, place, size)):
        for again in range(size + 1) if size <= _SHORT_BLOCK else (0, size):
            wanted = [(tp, own, stage < again) for stage, own in enumerate(lanes)]
            if all(way in ways for way in wanted):
                yield tuple(ways[way] for way in wanted)


def _lanes_lists(problem: Problem, place: int, size: int) -> list[tuple[int, ...]]:
    """Return the lanes per stage to try for a block: as many for each stage, of few devices any."""
    kinds = [kind for kind, at in zip(problem.kinds, problem.places, strict=True) if at == place]
    choices = sorted({kind.lanes for kind in kinds})
    if problem.num_devices > FEW:
        return [(lanes,) * size for lanes in choices]
    most = problem.capacity[place]
    return [lanes for lanes in product(choices, repeat=size) if sum(lanes) <= most]


def block_sizes(count: int, most: int, *, full: int) -> tuple[int, ...]:
    """Return the block sizes to try for `count` devices: all up to `full`, even shares, then ever larger steps."""
    largest = min(count, most)
    sizes = set(range(1, min(largest, full) + 1))
    sizes |= {count // parts for parts in range(1, 9) if 1 <= count // parts <= largest}
    size = full
    while size <= largest:
        sizes.add(size)
        size += max(1, size // 3)
    return tuple(sorted(sizes))


def _uses(problem: Problem, *, quick: bool) -> Iterator[tuple[int, ...]]:
    """Yield devices per kind for one replica: with up to three kinds any mix, else at most two."""
    many = len(problem.groups) > 2 and problem.num_devices > _FULL_GRID
    full = _COARSE_GRID if many or quick else _FULL_GRID
    sizes = [
        (0, *block_sizes(len(kind.seats), problem.max_stages, full=full)) for kind in problem.groups
    ]
    most_kinds = 3 if len(sizes) <= 3 else 2
    for use in product(*sizes):
        mixed = sum(count > 0 for count in use)
        if 1 <= mixed <= most_kinds and sum(use) <= problem.max_stages:
            yield use


def _orders(problem: Problem, use: Sequence[int], *, few: bool) -> Iterator[tuple[int, ...]]:
    """Yield the orders of the kinds in a replica: all, or slow first and large memory first."""
    present = [kind for kind, count in enumerate(use) if count]
    if few or len(present) <= 2:
        yield from permutations(present)
        return
    rows = problem.row_choices[0]
    slow_first = sorted(present, key=lambda k: -problem.groups[k].timings[rows].layer_forward_s)
    limits = [inf if kind.limit_bytes is None else kind.limit_bytes for kind in problem.groups]
    large_first = sorted(present, key=lambda kind: -limits[kind])
    yield from dict.fromkeys((tuple(slow_first), tuple(large_first)))
