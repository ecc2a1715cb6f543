"""The linear programme over multiplicities: how much replicas of many shapes can do if they may be cut, and a proof of it.

There are as many constraints as groups of devices, so the basis is tiny and a revised simplex takes milliseconds for
ten thousand shapes. Its prices prove the result by themselves: whatever they are, `Relaxed.ceiling` is an upper bound.
Equal to HiGHS in the tests; does not print, needs no scipy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_TOLERANCE = 1e-9
_MOST_PIVOTS = 2000
_BLAND_AFTER = 500  # pivots; then the first column that helps enters, which cannot cycle


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """Optimum of max value.x with need.x <= capacity, x >= 0."""

    counts: dict[int, float]  # by column; no more of them than constraints
    value: float
    ceiling: float  # nothing does more: proved by the prices alone
    prices: tuple[float, ...]  # value of one more device of each group
    basis: tuple[int, ...]  # columns; those beyond the last are unused devices


def relax(value: Floats, need: Floats, capacity: Floats, *, start: tuple[int, ...] = ()) -> Relaxed:
    """Solve the linear programme; `need` has a row per group of devices and a column per shape.

    `start` is the basis of another optimum, with other values but the same need and capacity: a few pivots away.
    """
    import numpy as np  # a tenth of a second that the smallest plans save

    num_rows, num_columns = need.shape
    basis = list(start) or [num_columns + row for row in range(num_rows)]  # slacks
    matrix = np.hstack([need, np.eye(num_rows)])
    worth = np.concatenate([value, np.zeros(num_rows)])
    scale = max(1.0, float(value.max(initial=0.0)))
    for pivot in range(_MOST_PIVOTS):
        inverse = np.linalg.inv(matrix[:, basis])
        prices = worth[basis] @ inverse
        gain = worth - prices @ matrix
        gain[basis] = 0.0
        entering = _entering(gain, scale, bland=pivot > _BLAND_AFTER)
        if entering is None:
            break
        held = np.maximum(inverse @ capacity, 0.0)
        basis[_leaving(held, inverse @ matrix[:, entering], basis)] = entering
    held = np.maximum(np.linalg.inv(matrix[:, basis]) @ capacity, 0.0)
    counts = {j: float(x) for j, x in zip(basis, held, strict=True) if j < num_columns and x > 0}
    return Relaxed(
        counts=dict(sorted(counts.items())),
        value=float(sum(value[j] * x for j, x in counts.items())),
        ceiling=_ceiling(value, need, capacity, np.maximum(prices, 0.0)),
        prices=tuple(float(price) for price in prices),
        basis=tuple(basis),
    )


def _entering(gain: Any, scale: float, *, bland: bool) -> int | None:
    """Return the column that gains most (or the first that gains), None at the optimum."""
    best = int((gain > _TOLERANCE * scale).argmax()) if bland else int(gain.argmax())
    return best if gain[best] > _TOLERANCE * scale else None


def _leaving(held: Any, direction: Any, basis: list[int]) -> int:
    """Return the place of the basis that runs out first; ties to the lowest column."""
    ratios = [
        (h / d if d > _TOLERANCE else inf, basis[place], place)
        for place, (h, d) in enumerate(zip(held, direction, strict=True))
    ]
    return min(ratios)[2]


def _ceiling(value: Floats, need: Floats, capacity: Floats, prices: Floats) -> float:
    """Return prices.capacity after raising all prices until no column is worth more than what it takes (weak duality)."""
    import numpy as np

    paid = prices @ need
    if bool(np.any((value > 0) & (paid <= 0))):
        return inf
    ratio = np.divide(value, paid, out=np.zeros_like(value), where=paid > 0)
    return float(prices @ capacity) * max(1.0, float(ratio.max(initial=0.0)))


def earliest(
    reach: Callable[[float], float], wanted: float, *, start_s: float, precision: float
) -> tuple[float, float]:
    """Return the latest deadline known to fail and the earliest known to do, by bisection; `reach` must not fall.

    Raises:
        ValueError: no deadline does.
    """
    low, high = 0.0, start_s
    for _ in range(200):
        if reach(high) >= wanted:
            break
        low, high = high, 2 * high
    else:
        raise ValueError(f"no deadline reaches {wanted}")
    while high - low > precision * high:
        middle = (low + high) / 2
        if reach(middle) >= wanted:
            high = middle
        else:
            low = middle
    return low, high
