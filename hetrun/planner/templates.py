"""Which replica shapes are looked at where devices are many: ordered blocks of groups of devices, on a grid of sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product
from math import factorial, inf

from hetrun.planner.problem import Problem

Blocks = tuple[tuple[int, int], ...]  # (kind, stages), in order

_MOST_TEMPLATES = 9000
_MOST_TEMPLATES_SMALL = 1500
_SMALL = 64  # devices, up to here
_MOST_DEPTH = 128
_GRIDS = (
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128),
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128),
    (1, 2, 4, 8, 16, 32, 64, 128),
    (1, 2, 4, 8, 16),
    (1, 2, 4, 8),
    (1, 4),
    (2,),
)


def templates(problem: Problem) -> Iterator[Blocks]:
    """Yield ordered blocks: one group alone, two in both orders, more of them slow first and large memory first.

    Of few devices three are tried in all orders, where these are not too many.
    """
    depth = min(problem.max_stages, _MOST_DEPTH)
    budget = _MOST_TEMPLATES_SMALL if problem.num_devices <= _SMALL else _MOST_TEMPLATES
    budget //= len(problem.row_choices)
    num_groups = len(problem.groups)
    for mixed in range(1, num_groups + 1):
        subsets = list(combinations(range(num_groups), mixed))
        for grid in _GRIDS:
            choices = [_blocks(problem, group, grid, depth) for group in range(num_groups)]
            total = sum(_product(len(choices[group]) for group in subset) for subset in subsets)
            if min(2, mixed) * total <= budget:
                break
        freely = mixed <= 2 or (
            problem.num_devices <= _SMALL and factorial(mixed) * total <= budget
        )
        for subset in subsets:
            for blocks in product(*(choices[group] for group in subset)):
                if sum(size for _, size in blocks) <= depth:
                    yield from permutations(blocks) if freely else _ordered(problem, blocks)


def _product(numbers: Iterator[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _blocks(problem: Problem, group: int, grid: Sequence[int], depth: int) -> list[tuple[int, int]]:
    """Return the blocks to try for a group of devices: every kind of it, with sizes of a grid that its devices allow."""
    found = []
    for number, kind in enumerate(problem.kinds):
        if problem.places[number] == group:
            most = min(depth, len(kind.seats) // kind.width)
            sizes = {size for size in grid if size <= most}
            if problem.num_devices <= _SMALL and grid is not _GRIDS[-1]:
                sizes |= {most, most // 2} - {0}
            found += [(number, size) for size in sorted(sizes)]
    return found


def _ordered(problem: Problem, blocks: Blocks) -> Iterator[Blocks]:
    """Yield the two orders that many blocks are tried in: slow first, and large memory first."""
    rows = problem.row_choices[0]
    limits = [inf if kind.limit_bytes is None else kind.limit_bytes for kind in problem.kinds]
    slow_first = sorted(blocks, key=lambda b: -problem.kinds[b[0]].timings[rows].layer_forward_s)
    large_first = sorted(blocks, key=lambda b: -limits[b[0]])
    yield from dict.fromkeys((tuple(slow_first), tuple(large_first)))
