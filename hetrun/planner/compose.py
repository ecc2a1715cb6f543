"""Which replica shapes, and how many of each: candidate combinations. Judging them is left to `search.py`.

Few devices: every multiset of device counts. Many: for a deadline T a replica of shape p does n_p(T) microbatches,
so the best T is the least at which the integer programme of `knapsack.py` over multiplicities reaches the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from math import floor

from hetrun.planner.estimate import Combo
from hetrun.planner.knapsack import most_rows
from hetrun.planner.problem import Problem
from hetrun.planner.shapes import Shape

MOST_MULTISETS = 2500  # up to here all are tried
_VARIANTS = 3  # orders of the kinds (and microbatch sizes) that every multiset is tried with
_MOST_VARIANTS = 12  # where there are few multisets
_VARIED = 1500  # combinations, about
_MOST_COLUMNS = 150
_LONGER = (
    0.0,
    0.01,
    0.03,
)  # than the earliest deadline: other combinations, maybe with less traffic


def combos(problem: Problem, shapes: Sequence[Shape], bound_s: float) -> Iterator[Combo]:
    """Yield candidate combinations of shapes that the devices suffice for; some may come twice."""
    by_use: dict[tuple[int, ...], list[Shape]] = {}
    for shape in shapes:
        by_use.setdefault(shape.use, []).append(shape)
    capacity = problem.capacity
    multisets = _multisets(sorted(by_use, reverse=True), capacity)
    if multisets is not None:
        yield from _with_shapes(problem, multisets, by_use)
        return
    yield from _one_shape(shapes, capacity)
    for family in _FAMILIES:
        chosen = [shape for shape in shapes if family(shape)]
        if chosen and (len(problem.groups) > 1 or family is _FAMILIES[0]):
            yield from _by_deadline(problem, chosen, capacity, bound_s)


def _multisets(
    uses: Sequence[tuple[int, ...]], capacity: tuple[int, ...]
) -> list[tuple[tuple[tuple[int, ...], int], ...]] | None:
    """Return all non-empty multisets of uses within the capacity, None where they are too many."""
    found: list[tuple[tuple[tuple[int, ...], int], ...]] = [()]
    waiting: list[tuple[int, tuple[int, ...], tuple[tuple[tuple[int, ...], int], ...]]]
    waiting = [(0, capacity, ())]
    while waiting:
        first, left, chosen = waiting.pop()
        for number in range(first, len(uses)):
            use = uses[number]
            most = min(have // need for have, need in zip(left, use, strict=True) if need)
            for count in range(1, most + 1):
                rest = tuple(have - count * need for have, need in zip(left, use, strict=True))
                more = (*chosen, (use, count))
                found.append(more)
                if len(found) > MOST_MULTISETS:
                    return None
                if any(rest):
                    waiting.append((number + 1, rest, more))
    return found[1:]


def _with_shapes(
    problem: Problem,
    multisets: Iterable[tuple[tuple[tuple[int, ...], int], ...]],
    by_use: dict[tuple[int, ...], list[Shape]],
) -> Iterator[Combo]:
    """Yield each multiset with its best shapes: of any microbatch size, and of each size alone."""
    choices: tuple[int | None, ...] = (None,)
    if len(problem.row_choices) > 1:
        choices = (None, *problem.row_choices)
    ordered = {
        (use, rows): sorted((s for s in members if rows in (None, s.rows)), key=_quickness)
        for use, members in by_use.items()
        for rows in choices
    }
    listed = list(multisets)
    variants = max(_VARIANTS, min(_MOST_VARIANTS, _VARIED // (len(listed) * len(choices))))
    for multiset in listed:
        for rows in choices:
            members = [ordered[use, rows] for use, _ in multiset]
            counts = [count for _, count in multiset]
            for shapes in _picked(members, variants):
                picked = zip(shapes, counts, members, strict=True)
                kept = [(s, n, others) for s, n, others in picked if s is not None]
                combo = tuple((s, n) for s, n, _ in kept)
                if combo:
                    yield combo
                if variants > _VARIANTS:
                    yield from _unlike(combo, [others for _, _, others in kept])


def _picked(
    members: Sequence[Sequence[Shape]], variants: int
) -> Iterator[tuple[Shape | None, ...]]:
    """Yield a shape of each use: the best, the second best and so on; of few multisets any with any other."""
    if variants > _VARIANTS and len(members) > 1:
        each = max(2, floor(variants ** (2 / len(members))))
        some: list[Sequence[Shape | None]] = [shapes[:each] or [None] for shapes in members]
        yield from product(*some)
        return
    for place in range(min(variants, max(len(shapes) for shapes in members))):
        yield tuple(shapes[min(place, len(shapes) - 1)] if shapes else None for shapes in members)


def _unlike(combo: Combo, members: Sequence[Sequence[Shape]]) -> Iterator[Combo]:
    """Yield the combination with half of the replicas of one shape in another: in mirrored ones vendors hold like layers."""
    for number, ((shape, count), shapes) in enumerate(zip(combo, members, strict=True)):
        for other in shapes[:_MOST_VARIANTS] if count > 1 else ():
            if other is not shape:
                halves = ((shape, count - count // 2), (other, count // 2))
                yield (*combo[:number], *halves, *combo[number + 1 :])


def _quickness(shape: Shape) -> tuple[float, tuple[int, ...], int]:
    """Order shapes by seconds per row when each is filled a few times."""
    count = 4 * shape.num_stages
    return shape.seconds(count) / (count * shape.rows), shape.kinds, shape.rows


def _one_shape(shapes: Sequence[Shape], capacity: tuple[int, ...]) -> Iterator[Combo]:
    """Yield as many replicas of one shape as fit, alone and with the best of what the rest holds."""
    single = [shape for shape in shapes if sum(count > 0 for count in shape.use) == 1]
    for shape in shapes:
        most = min(have // need for have, need in zip(capacity, shape.use, strict=True) if need)
        if most < 1:
            continue
        left = [have - most * need for have, need in zip(capacity, shape.use, strict=True)]
        combo: list[tuple[Shape, int]] = [(shape, most)]
        yield tuple(combo)
        for kind, have in enumerate(left):
            fitting = [s for s in single if 0 < s.use[kind] <= have and s.rows == shape.rows]
            if fitting:
                other = min(fitting, key=lambda s: (s.cycle_s * sum(s.use), s.num_stages))
                combo.append((other, have // other.use[kind]))
        if len(combo) > 1:
            yield tuple(combo)


_FAMILIES: tuple[Callable[[Shape], bool], ...] = (
    lambda shape: True,
    lambda shape: sum(count > 0 for count in shape.use) == 1,
    lambda shape: sum(count > 0 for count in shape.use) > 1,
)  # solved one by one, since the integer programme does not see the gradient sync


def _by_deadline(
    problem: Problem, shapes: Sequence[Shape], capacity: tuple[int, ...], bound_s: float
) -> Iterator[Combo]:
    """Yield combinations that reach the batch by the earliest deadline, and by somewhat longer ones."""

    def reach(deadline_s: float) -> Combo | None:
        """The combination that does most rows by a deadline, None if that is not the batch."""
        columns = _columns(problem, shapes, deadline_s)
        counts, num_rows = most_rows([(s.use, rows) for s, rows in columns], capacity)
        if num_rows < problem.batch_rows:
            return None
        return tuple((s, n) for (s, _), n in zip(columns, counts, strict=True) if n)

    earliest_s = _earliest(reach, max(bound_s, min(s.seconds(1) + s.optimizer_s for s in shapes)))
    if earliest_s is None:
        return
    for longer in _LONGER:
        combo = reach(earliest_s * (1 + longer))
        if combo is not None:
            yield combo


def _earliest(reach: Callable[[float], Combo | None], start_s: float) -> float | None:
    """Return the least deadline that can be kept, to 0.2 %, None where none can."""
    low = high = start_s
    for _ in range(40):
        if reach(high) is not None:
            break
        low, high = high, high * 1.25
    else:
        return None
    while high > low * 1.002:
        middle = (low + high) / 2
        if reach(middle) is not None:
            high = middle
        else:
            low = middle
    return high


def _columns(
    problem: Problem, shapes: Sequence[Shape], deadline_s: float
) -> list[tuple[Shape, int]]:
    """Return per use of devices the shape that does most rows by the deadline, and how many.

    Only the uses that make most of their devices are kept: the others never enter an optimum.
    """
    best: dict[tuple[int, ...], tuple[Shape, int]] = {}
    for shape in shapes:
        left_s = deadline_s - shape.optimizer_s - shape.fill_s
        num_rows = shape.rows * floor(left_s / shape.cycle_s + 1e-9)
        if num_rows > 0 and (shape.use not in best or num_rows > best[shape.use][1]):
            best[shape.use] = (shape, num_rows)

    def yield_of(column: tuple[Shape, int]) -> float:
        """Rows per row that the devices could do."""
        use = column[0].use
        return column[1] / sum(n * s for n, s in zip(use, problem.group_speeds, strict=True))

    return sorted(best.values(), key=yield_of, reverse=True)[:_MOST_COLUMNS]
