"""Microbatches per replica, so that all end together and the rows add up to the batch. Replicas are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, gcd

from hetrun.planner.split import fill_parts

_MOST_BITS = 4096  # rows; beyond, sums are searched rather than listed
_SLACK = 1e-9  # of a cycle: a microbatch that ends exactly at the level counts as done


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`count` equal replicas; m microbatches of `rows` rows take fill_s + m * cycle_s."""

    rows: int
    count: int
    fill_s: float
    cycle_s: float

    def done_by(self, level_s: float) -> int:
        """Return how many microbatches one replica has done at `level_s`."""
        return max(0, floor((level_s - self.fill_s) / self.cycle_s + _SLACK))


def level_s(batch_rows: int, parts: Sequence[Part]) -> float | None:
    """Return the earliest time by which the parts can have done at least `batch_rows`, one microbatch each.

    None where one microbatch for each replica is too much already.
    """
    if sum(part.count * part.rows for part in parts) > batch_rows:
        return None
    speed = sum(part.count * part.rows / part.cycle_s for part in parts)
    lost = sum(part.count * part.rows * part.fill_s / part.cycle_s for part in parts)
    level = max((batch_rows + lost) / speed, *(part.fill_s + part.cycle_s for part in parts))
    done = [part.done_by(level) for part in parts]
    while sum(part.count * part.rows * n for part, n in zip(parts, done, strict=True)) < batch_rows:
        ends = [part.fill_s + (n + 1) * part.cycle_s for part, n in zip(parts, done, strict=True)]
        level = min(ends)
        first = ends.index(level)
        done[first] += 1
    return level


def apportion(batch_rows: int, parts: Sequence[Part]) -> tuple[tuple[int, ...], ...] | None:
    """Return microbatches of every replica of every part, as early as their rows can add up exactly.

    None where no counts of at least one each add up to `batch_rows`.
    """
    start = level_s(batch_rows, parts)
    sizes = sorted({part.rows for part in parts}, reverse=True)
    if start is None or batch_rows % gcd(*sizes):
        return None
    level = start
    least = {rows: sum(p.count for p in parts if p.rows == rows) for rows in sizes}
    for _ in range(4 * sum(sizes) + 8):
        most = {
            rows: sum(part.count * part.done_by(level) for part in parts if part.rows == rows)
            for rows in sizes
        }
        counts = _exact_counts(batch_rows, sizes, least, most)
        if counts is not None:
            return _share_out(parts, counts)
        level = min(part.fill_s + (part.done_by(level) + 1) * part.cycle_s for part in parts)
    return None


def _exact_counts(
    batch_rows: int, sizes: Sequence[int], least: dict[int, int], most: dict[int, int]
) -> dict[int, int] | None:
    """Return microbatches per size, within bounds, whose rows add up; large sizes first. None: impossible."""
    if batch_rows > _MOST_BITS:
        return _searched_counts(batch_rows, sizes, least, most)
    reachable = [1 << 0]  # bit n set: n rows can be made of the sizes so far, smallest first
    for rows in reversed(sizes):
        sums = 0
        for count in range(least[rows], most[rows] + 1):
            sums |= reachable[-1] << (rows * count)
        reachable.append(sums & ((1 << (batch_rows + 1)) - 1))
    if not reachable[-1] >> batch_rows & 1:
        return None
    counts: dict[int, int] = {}
    left = batch_rows
    for rows, smaller in zip(sizes, reversed(reachable[:-1]), strict=True):
        for count in range(min(most[rows], left // rows), least[rows] - 1, -1):
            if smaller >> (left - rows * count) & 1:
                counts[rows] = count
                left -= rows * count
                break
    return counts


def _searched_counts(
    batch_rows: int, sizes: Sequence[int], least: dict[int, int], most: dict[int, int]
) -> dict[int, int] | None:
    """Return what `_exact_counts` does for large batches: as many of the largest size as leave the rest reachable.

    Remainders repeat after as many counts as the other sizes have rows together, so no more are tried.
    """
    rows, *smaller = sizes
    low = sum(size * least[size] for size in smaller)
    high = sum(size * most[size] for size in smaller)
    top = min(most[rows], (batch_rows - low) // rows)
    bottom = max(least[rows], -(-(batch_rows - high) // rows))
    for count in range(top, max(bottom - 1, top - sum(sizes) - 1), -1):
        left = batch_rows - rows * count
        if not smaller:
            return {rows: count} if left == 0 else None
        rest = _searched_counts(left, smaller, least, most)
        if rest is not None:
            return {rows: count, **rest}
    return None


def _share_out(parts: Sequence[Part], counts: dict[int, int]) -> tuple[tuple[int, ...], ...]:
    """Hand the microbatches of each size to the replicas that use it, one each at least."""
    shares: list[tuple[int, ...]] = [()] * len(parts)
    for rows, total in counts.items():
        members = [(i, part) for i, part in enumerate(parts) if part.rows == rows]
        unit_s = [part.cycle_s for _, part in members for _ in range(part.count)]
        start_s = [part.fill_s + part.cycle_s for _, part in members for _ in range(part.count)]
        handed = fill_parts(total - len(unit_s), unit_s, start_s=start_s)
        begin = 0
        for i, part in members:
            share = handed[begin : begin + part.count]
            shares[i] = tuple(sorted((more + 1 for more in share), reverse=True))
            begin += part.count
    return tuple(shares)
