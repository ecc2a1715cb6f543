"""How many replicas of each shape do most rows with the devices there are. What a shape does is left to `compose.py`.

Exact (dynamic programming over device counts) as long as the counts are few; beyond, the linear programme's whole
part, which leaves at most one replica per kind of device to round, with the same dynamic programme for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, prod

Column = tuple[tuple[int, ...], int]  # devices per kind that one replica takes, rows that it does

MOST_STATES = 20_000  # of the dynamic programme


def most_rows(columns: Sequence[Column], capacity: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return replicas per column that do most rows within the capacity, and those rows."""
    if not columns:
        return (), 0
    if prod(have + 1 for have in capacity) <= MOST_STATES:
        return _exact(columns, capacity)
    base = [floor(count + 1e-6) for count in _relaxed(columns, capacity)]
    left = list(capacity)
    for (use, _), count in zip(columns, base, strict=True):
        left = [have - count * need for have, need in zip(left, use, strict=True)]
    while prod(have + 1 for have in left) > MOST_STATES:
        left[left.index(max(left))] //= 2  # give up a few devices rather than the answer
    more, _ = _exact(columns, left)
    counts = tuple(a + b for a, b in zip(base, more, strict=True))
    return counts, sum(n * rows for n, (_, rows) in zip(counts, columns, strict=True))


def _relaxed(columns: Sequence[Column], capacity: Sequence[int]) -> Sequence[float]:
    """Return the optimum if replicas could be cut: no more columns in use than kinds of devices."""
    from scipy.optimize import linprog  # half a second that smaller plans save

    need = [[use[kind] for use, _ in columns] for kind in range(len(capacity))]
    found = linprog(
        [-float(rows) for _, rows in columns], A_ub=need, b_ub=list(capacity), method="highs"
    )
    return [float(count) for count in found.x]


def _exact(columns: Sequence[Column], capacity: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the best counts: rows[n] is the most with n devices; each column is offered once, twice, and so on."""
    import numpy as np  # a tenth of a second that the smallest plans save

    shape = tuple(have + 1 for have in capacity)
    rows = np.zeros(shape, dtype=np.int64)
    taken = []  # per column, how many of it the best choice up to here takes
    for use, value in columns:
        before = rows.copy()
        count = np.zeros(shape, dtype=np.int32)
        most = min(have // need for have, need in zip(capacity, use, strict=True) if need)
        for number in range(1, most + 1):
            offset = [number * need for need in use]
            to = tuple(slice(start, None) for start in offset)
            source = tuple(
                slice(0, size - start) for size, start in zip(shape, offset, strict=True)
            )
            offered = before[source] + number * value
            better = offered > rows[to]
            rows[to][better] = offered[better]
            count[to][better] = number
        taken.append(count)
    state = tuple(capacity)
    counts = [0] * len(columns)
    for index in range(len(columns) - 1, -1, -1):
        counts[index] = int(taken[index][state])
        use = columns[index][0]
        state = tuple(n - counts[index] * need for n, need in zip(state, use, strict=True))
    return tuple(counts), int(rows[tuple(capacity)])
