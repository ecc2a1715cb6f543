"""Which ranks form which island, and who sends which part of a buffer to whom. Pure; acting is left to `engine.py`.

Rank 0 makes the plan and the others take its bytes, so that no two ranks can decide differently. Ranges are
half-open and count elements (or bytes) of one flat buffer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetrun.bridge.topology import Card, card_from
from hetrun.errors import ConfigError
from hetrun.model import MIB

VERSION = 1
SMALL_BYTES = 32 * 1024  # payloads up to this go the way of fewest hops, not of fewest bytes
EAGER_BYTES = 64 * 1024  # longer messages wait until the other end has room for them
_CHUNK_BYTES_PER_LANE = MIB // 2  # 4 ms of 1 Gbit/s, several times what handing over a chunk costs
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = MIB, 4 * MIB
_STREAMS = 2  # connections per pair and direction: one fills about 2 GB/s

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgePlan:
    """What all ranks agree on before the first byte of data."""

    cards: tuple[Card, ...]  # of rank 0, 1, ...
    islands: tuple[tuple[int, ...], ...]  # ranks in ascending order; islands by their lowest rank
    chunk_bytes: int
    streams: int

    def to_bytes(self) -> bytes:
        """Plain JSON, the same bytes for the same plan."""
        data = {
            "version": VERSION,
            "cards": [json.loads(card.to_json()) for card in self.cards],
            "islands": self.islands,
            "chunk_bytes": self.chunk_bytes,
            "streams": self.streams,
        }
        return json.dumps(data, sort_keys=True).encode()

    def digest(self) -> bytes:
        """32 bytes that stand for the plan."""
        return hashlib.sha256(self.to_bytes()).digest()

    def island_of(self, rank: int) -> int:
        """Return the number of the island that a rank is on."""
        return next(number for number, ranks in enumerate(self.islands) if rank in ranks)


def make_plan(cards: Sequence[Card]) -> BridgePlan:
    """Group ranks into islands and choose the sizes.

    Raises:
        ConfigError: a rank is missing or there twice, or ranks of one island name different libraries or versions.
    """
    ordered = tuple(sorted(cards, key=lambda card: card.rank))
    if [card.rank for card in ordered] != list(range(len(ordered))):
        raise ConfigError(f"bridge: ranks {[card.rank for card in ordered]}, need each once")
    islands: dict[str, list[Card]] = {}
    for card in ordered:
        islands.setdefault(card.island, []).append(card)
    for name, members in islands.items():
        for card in members:
            first = members[0]
            if (card.backend, card.torch) != (first.backend, first.torch):
                raise ConfigError(
                    f"island {name}: rank {first.rank} has {first.backend} of torch {first.torch},"
                    f" rank {card.rank} has {card.backend} of torch {card.torch}",
                    hint="ranks that differ belong to different islands",
                )
    lanes = max(len(members) for members in islands.values())
    return BridgePlan(
        cards=ordered,
        islands=tuple(tuple(card.rank for card in members) for members in islands.values()),
        chunk_bytes=min(_MAX_CHUNK_BYTES, max(_MIN_CHUNK_BYTES, lanes * _CHUNK_BYTES_PER_LANE)),
        streams=_STREAMS,
    )


def read_plan(data: bytes) -> BridgePlan:
    """Take the plan of rank 0, and make sure that this version would have made the same of these cards.

    Raises:
        ConfigError: it is none, or another version's.
    """
    try:
        said = json.loads(data)
        cards = [card_from(card) for card in said["cards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("bridge: rank 0 sent no plan") from error
    plan = make_plan(cards)
    if plan.to_bytes() != data:
        raise ConfigError(
            "bridge: this rank would plan differently than rank 0",
            hint="run the same hetrun on all hosts",
        )
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One group of ranks as one of its members sees it; numbers are ranks inside the group."""

    ranks: tuple[int, ...]  # global rank of each member
    me: int
    islands: tuple[tuple[int, ...], ...]  # members by island, each in the order of global ranks
    whole: tuple[bool, ...]  # whether all ranks of that island are in the group

    @property
    def home(self) -> int:
        """The number of my island."""
        return next(number for number, members in enumerate(self.islands) if self.me in members)

    @property
    def mine(self) -> tuple[int, ...]:
        """The members on my island."""
        return self.islands[self.home]

    @property
    def place(self) -> int:
        """My number among them."""
        return self.mine.index(self.me)

    @property
    def leaders(self) -> tuple[int, ...]:
        """One member of each island: that of the lowest global rank."""
        return tuple(members[0] for members in self.islands)

    def neighbours(self) -> tuple[int, ...]:
        """Members that news go to from here: all ranks hear of them in at most three hops."""
        if self.me != self.mine[0]:
            return (self.mine[0],)
        others = (leader for leader in self.leaders if leader != self.me)
        return (*self.mine[1:], *others)


def make_layout(plan: BridgePlan, ranks: Sequence[int], rank: int) -> Layout:
    """See a group of these global ranks with the eyes of one of them."""
    number_in_group = {member: number for number, member in enumerate(ranks)}
    islands, whole = [], []
    for island in plan.islands:
        members = tuple(number_in_group[member] for member in island if member in number_in_group)
        if members:
            islands.append(members)
            whole.append(len(members) == len(island))
    return Layout(
        ranks=tuple(ranks), me=number_in_group[rank], islands=tuple(islands), whole=tuple(whole)
    )


def group_id(name: str, ranks: Iterable[int]) -> int:
    """A number for a group, the same on all its members: eight bytes that stand for its name and ranks."""
    text = json.dumps([name, list(ranks)]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def chunks(count: int, most: int, *, unit: int = 1) -> list[Range]:
    """Cut `count` elements into ranges of nearly the same length, about `most` at most.

    All begin at a multiple of `unit`, so that only the last one needs padding to be divided by it.
    """
    if count == 0:
        return []
    units = count // unit
    parts = max(1, -(-count // max(most, unit)))
    cuts = [part * units // parts * unit for part in range(parts)] + [count]
    return [(start, end) for start, end in pairwise(cuts) if start < end]


def slices(count: int, parts: int) -> list[Range]:
    """Cut `count` elements into slices of one length, as libraries do that only know equal ones.

    The last ones are shorter or empty: what a library adds up there is padding, and crosses no link.
    """
    length = -(-count // parts) if count else 0
    return [(min(part * length, count), min((part + 1) * length, count)) for part in range(parts)]


def shares(count: int, parts: int) -> list[Range]:
    """Cut `count` elements into ranges of nearly the same length."""
    return [(part * count // parts, (part + 1) * count // parts) for part in range(parts)]


def overlap(one: Range, other: Range) -> Range:
    """What two ranges share; an empty range where that is nothing."""
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))


def link_bound(
    kind: str, num_bytes: int, sizes: Sequence[int], *, island: int
) -> tuple[float, float]:
    """Bytes that must leave an island and must reach it, over all its links, in one operation of `num_bytes`.

    `num_bytes` is the whole buffer: the tensor of an all-reduce, the output of an all-gather, the input of a
    reduce-scatter. `sizes` are ranks per island. An all-reduce of k islands moves 2 (k - 1) / k of the buffer each
    way; gathers move each rank's row to each other island once.
    """
    total, own = sum(sizes), sizes[island]
    others = len(sizes) - 1
    if kind == "all_reduce":
        each_way = 2.0 * num_bytes * others / len(sizes)
        return each_way, each_way
    if kind == "all_gather":
        return num_bytes * own / total * others, num_bytes * (total - own) / total
    if kind == "reduce_scatter":
        return num_bytes * (total - own) / total, num_bytes * own / total * others
    raise ValueError(f"no bound for {kind!r}")
