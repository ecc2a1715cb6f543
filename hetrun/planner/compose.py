"""Which replica shapes, and how many of each: candidate combinations. Judging them is left to `search.py`.

Few devices: every multiset of device counts. Many: for a deadline T a replica of shape p does n_p(T) microbatches,
so the best T is the least at which an integer programme over multiplicities reaches the batch. Its size depends on
the kinds of devices and not on their number, which is why it carries to large clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import floor

from hetrun.planner.estimate import Combo
from hetrun.planner.problem import Problem
from hetrun.planner.shapes import Shape

MOST_MULTISETS = 2500  # up to here all are tried
_DEADLINE_STEPS = (0.0, 0.001, 0.003, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
_TRIES_PER_FAMILY = 3  # solutions taken, each at a longer deadline


def combos(problem: Problem, shapes: Sequence[Shape], bound_s: float) -> Iterator[Combo]:
    """Yield candidate combinations of shapes that the devices suffice for; some may come twice."""
    by_use: dict[tuple[int, ...], list[Shape]] = {}
    for shape in shapes:
        by_use.setdefault(shape.use, []).append(shape)
    capacity = tuple(len(kind.seats) for kind in problem.kinds)
    multisets = _multisets(sorted(by_use, reverse=True), capacity)
    if multisets is not None:
        yield from _with_shapes(problem, multisets, by_use)
        return
    yield from _one_shape(shapes, capacity)
    for family in _families(problem):
        chosen = [shape for shape in shapes if family(shape)]
        if chosen:
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
    best = {
        (use, rows): _quickest([s for s in members if rows in (None, s.rows)])
        for use, members in by_use.items()
        for rows in choices
    }
    for multiset in multisets:
        seen = set()
        for rows in choices:
            picked = [(best[use, rows], count) for use, count in multiset]
            combo = tuple((shape, count) for shape, count in picked if shape is not None)
            if len(combo) == len(multiset) and combo not in seen:
                seen.add(combo)
                yield combo


def _quickest(shapes: Sequence[Shape]) -> Shape | None:
    """Return the shape that does the same rows soonest (as many as the largest microbatches hold, a few times)."""
    if not shapes:
        return None
    num_rows = 4 * max(shape.rows * shape.num_stages for shape in shapes)
    return min(shapes, key=lambda s: (s.seconds(max(1, round(num_rows / s.rows))), s.kinds, s.rows))


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
                other = min(fitting, key=lambda s: (s.cycle_s * s.num_stages, s.num_stages))
                combo.append((other, have // other.use[kind]))
        if len(combo) > 1:
            yield tuple(combo)


def _families(problem: Problem) -> list[Callable[[Shape], bool]]:
    """Return filters under which the integer programme is solved, since it does not see the gradient sync."""
    families: list[Callable[[Shape], bool]] = [
        lambda shape: True,
        lambda shape: sum(count > 0 for count in shape.use) == 1,
        lambda shape: sum(count > 0 for count in shape.use) > 1,
    ]
    if len(problem.row_choices) > 1:
        for rows in problem.row_choices:
            families.append(lambda shape, rows=rows: shape.rows == rows)  # type: ignore[misc]
    return families


def _by_deadline(
    problem: Problem, shapes: Sequence[Shape], capacity: tuple[int, ...], bound_s: float
) -> Iterator[Combo]:
    """Yield combinations that reach the batch by deadlines from the earliest on."""
    relaxed_s = _earliest(problem, shapes, capacity, bound_s)
    if relaxed_s is None:
        return
    tries = 0
    for step in _DEADLINE_STEPS:
        columns = _columns(shapes, relaxed_s * (1 + step))
        counts, done = _most_rows(columns, capacity, whole=True)
        if done >= problem.batch_rows:
            yield tuple(
                (shape, round(count))
                for (shape, _), count in zip(columns, counts, strict=True)
                if round(count) > 0
            )
            tries += 1
            if tries == _TRIES_PER_FAMILY:
                return


def _earliest(
    problem: Problem, shapes: Sequence[Shape], capacity: tuple[int, ...], bound_s: float
) -> float | None:
    """Return the least deadline at which fractions of replicas reach the batch (to 1e-4)."""
    low = high = max(bound_s, min(shape.seconds(1) + shape.optimizer_s for shape in shapes))
    for _ in range(40):
        if _most_rows(_columns(shapes, high), capacity, whole=False)[1] >= problem.batch_rows:
            break
        low, high = high, high * 1.5
    else:
        return None
    while high > low * (1 + 1e-4):
        middle = (low + high) / 2
        if _most_rows(_columns(shapes, middle), capacity, whole=False)[1] >= problem.batch_rows:
            high = middle
        else:
            low = middle
    return high


def _columns(shapes: Sequence[Shape], deadline_s: float) -> list[tuple[Shape, int]]:
    """Return per use of devices the shape that does most rows by the deadline, and how many."""
    best: dict[tuple[int, ...], tuple[Shape, int]] = {}
    for shape in shapes:
        left_s = deadline_s - shape.optimizer_s - shape.fill_s
        num_rows = shape.rows * floor(left_s / shape.cycle_s + 1e-9)
        if num_rows > 0 and (shape.use not in best or num_rows > best[shape.use][1]):
            best[shape.use] = (shape, num_rows)
    return list(best.values())


def _most_rows(
    columns: Sequence[tuple[Shape, int]], capacity: tuple[int, ...], *, whole: bool
) -> tuple[Sequence[float], float]:
    """Return replicas per column that do most rows with the devices there are, and those rows."""
    from scipy.optimize import (
        LinearConstraint,
        linprog,
        milp,
    )  # half a second that small plans save

    if not columns:
        return (), 0.0
    value = [-float(num_rows) for _, num_rows in columns]
    need = [[shape.use[kind] for shape, _ in columns] for kind in range(len(capacity))]
    if whole:
        found = milp(
            value,
            constraints=LinearConstraint(need, ub=capacity),
            integrality=[1] * len(value),
            options={"node_limit": 2000, "mip_rel_gap": 1e-4},
        )
    else:
        found = linprog(value, A_ub=need, b_ub=capacity, method="highs")
    if found.x is None:
        return (), 0.0
    return list(found.x), -float(found.fun)
