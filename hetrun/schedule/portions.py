"""Which ranks sum up which slice of the parameters of a bucket, where the ranks of a lane share its layers.

A matrix that `tp` ranks share is cut into so many equal parts along one dim. Where lanes of different tp meet, the cut points of
all are united: what lies between two of them has one owner in each lane. What the ranks of a lane hold whole are equal
copies, and count once. What it costs is said in `sync.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

from hetrun.model import ReplicaPlan
from hetrun.schedule.sync import Bucket, Part, lane_ranks

Lane = tuple[int, ...]  # ranks that share layers, in order of their places


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """What one group of ranks sums up of a bucket.

    Of each shared matrix the parts [start, end) of `of` equal ones, nothing where start is end; and with `copies`
    all that each rank holds whole. `Bucket.tp` such groups have the copies of a lane, so one has len(lane) / tp of them.
    """

    ranks: tuple[int, ...]  # ascending
    start: int
    end: int
    of: int
    copies: bool


def lanes_by_rank(replicas: Sequence[ReplicaPlan]) -> dict[int, Lane]:
    """Return the lane of each rank."""
    lanes = (lane for r in replicas for stage in r.stages for lane in lane_ranks(stage))
    return {rank: lane for lane in lanes for rank in lane}


def portions(bucket: Bucket, lanes: Mapping[int, Lane]) -> tuple[Portion, ...]:
    """Return the groups of a bucket and what each sums up, in the order in which all ranks create and issue them.

    `lanes` has the lane of each rank.
    """
    members = sorted({lanes[rank] for rank in bucket.ranks})
    return tuple(
        _copies(bucket.tp, members) if bucket.part is Part.COPIES else _shares(bucket, members)
    )


def _shares(bucket: Bucket, members: Sequence[Lane]) -> Iterator[Portion]:
    of = lcm(*map(len, members))
    cuts = {place * of // len(lane) for lane in members for place in range(len(lane) + 1)}
    for start, end in pairwise(sorted(cuts)):
        yield Portion(
            ranks=tuple(sorted(lane[start * len(lane) // of] for lane in members)),
            start=start,
            end=end,
            of=of,
            copies=bucket.part is Part.ALL,
        )


def _copies(groups: int, members: Sequence[Lane]) -> Iterator[Portion]:
    for number in range(groups):
        ranks = [
            rank
            for lane in members
            for rank in lane[number * len(lane) // groups : (number + 1) * len(lane) // groups]
        ]
        yield Portion(ranks=tuple(sorted(ranks)), start=0, end=0, of=1, copies=True)
