"""Who talks to whom in an all-reduce over several vendors. What that costs is said in `sync.py`, which prices this very way.

Inside each vendor the ranks reduce-scatter: each has the sums of its share. Between vendors those that have the same
part of the whole all-reduce it, and inside each vendor the ranks all-gather. So each element crosses between
vendors once for each vendor, however many ranks this has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Ranks of different vendors, one of each, that all-reduce the parts [start, end) of the whole; ranks ascending."""

    ranks: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevels:
    """An all-reduce inside and between vendors; the whole is cut into `of` equal parts.

    Rank k of an island of n has the parts [k of / n, (k + 1) of / n).
    """

    islands: tuple[tuple[int, ...], ...]  # ranks of each vendor, ascending
    exchanges: tuple[Exchange, ...]  # in the order in which all ranks create and issue them
    of: int


def two_levels(ranks: Sequence[int], vendors: Mapping[int, str]) -> TwoLevels | None:
    """Return how ranks of several vendors sum up, None where one level is all there is.

    That is so where all have one vendor, and where no vendor has two of them. `vendors` has the vendor of each rank.
    """
    members: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        members.setdefault(vendors[rank], []).append(rank)
    if len(members) in (1, len(ranks)):
        return None
    islands = tuple(tuple(island) for island in members.values())
    of = lcm(*map(len, islands))
    cuts = {place * of // len(island) for island in islands for place in range(len(island) + 1)}
    exchanges = tuple(
        Exchange(
            ranks=tuple(sorted(island[start * len(island) // of] for island in islands)),
            start=start,
            end=end,
        )
        for start, end in pairwise(sorted(cuts))
    )
    return TwoLevels(islands=islands, exchanges=exchanges, of=of)
