"""Which ranks reduce which gradients together, and how long that takes. When it happens is decided in `step.py`.

A unit is the embedding, a layer or the head. Units that are held by the same ranks travel in one bucket;
every rank issues the buckets that it is part of in the one global order, head first. Which slice of each parameter
goes to whom inside a bucket is said in `portions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import gcd

from hetrun import arch
from hetrun.errors import ConfigError
from hetrun.model import Link, LinkKind, ModelSpec, RankPlan, ReplicaPlan, StagePlan


class Part(Enum):
    """Which parameters of its units a bucket has: the ranks of a lane share the matrices of layers, and each holds the rest whole."""

    ALL = "all"
    SHARES = "shares"  # of the matrices of layers
    COPIES = "copies"  # norms, embedding and head


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that one group of ranks sums up; `units` in backward order, `ranks` ascending."""

    units: tuple[str, ...]
    ranks: tuple[int, ...]
    num_bytes: int
    tp: int  # so many groups like this one reduce a share each, at the same time
    part: Part = Part.ALL


def gradient_buckets(
    split_ranks: Sequence[RankPlan],
    replicas: Sequence[ReplicaPlan],
    model: ModelSpec,
    dtype_bytes: int,
) -> tuple[Bucket, ...]:
    """Return the buckets of a step in the order in which all ranks issue them (backward order, head first).

    With tied embeddings the matrix is the unit "embedding", held wherever embedding or head are, and "head"
    is the final norm alone. What a single lane holds needs no sync and is left out.

    All lanes of a stage hold the same, and a layer at a real cut is held by the stages on both sides: their gradients
    are parts of a sum, like those of replicas. Where all lanes have the same tp, the ranks at one place in them reduce
    their share of the layers and all the rest in one go, all places at once, and the first place stands for all. Where
    tp differs these are two buckets. SHARES: the smallest tp has the largest shares, which set the pace; cut to
    fit the smaller ones, they travel at once. COPIES: each of as many groups as the degrees have in common has several
    ranks of a lane with larger tp, whose equal gradients count once.
    """
    known = {rank.rank for rank in split_ranks}
    holders = _holders(replicas)
    held = list(holders)
    members: dict[tuple[int, ...], list[str]] = {}  # by places in holders
    members.setdefault(_end_owners("head", held, model), []).append("head")
    edges = sorted(
        {0, model.num_layers}.union(*((first, first + count) for first, count, *_ in held))
    )
    for first, end in reversed(list(pairwise(edges))):  # those of one stage are held alike
        layers = [f"layer.{layer}" for layer in reversed(range(first, end))]
        members.setdefault(_layer_owners(first, held), []).extend(layers)
    members.setdefault(_end_owners("embedding", held, model), []).append("embedding")
    buckets: list[Bucket] = []
    for places, units in members.items():
        stages = [(held[place][4], holders[held[place]]) for place in places]
        if not known.issuperset(rank for _, ranks in stages for rank in ranks):
            owners = sorted(rank for _, ranks in stages for rank in ranks)
            raise ValueError(f"{units} are held by ranks {owners}, some of which are unknown")
        if sum(len(ranks) // tp for tp, ranks in stages) > 1:
            buckets += _buckets(tuple(units), stages, model, dtype_bytes)
    return tuple(buckets)


def _buckets(
    units: tuple[str, ...],
    stages: Sequence[tuple[int, Sequence[int]]],
    model: ModelSpec,
    dtype_bytes: int,
) -> Iterator[Bucket]:
    """Yield the buckets of units that these stages hold: tp, and the ranks of all lanes, of each."""
    degrees = {tp for tp, _ in stages}
    least, common = min(degrees), gcd(*degrees)
    layers, whole = _parameters(units, model)
    firsts = tuple(sorted(rank for tp, ranks in stages for rank in ranks[::tp]))
    share = -(-layers // least)
    if len(degrees) == 1:
        num_bytes = dtype_bytes * (share + whole)
        yield Bucket(units=units, ranks=firsts, num_bytes=num_bytes, tp=least)
        return
    if layers:
        num_bytes = dtype_bytes * share
        yield Bucket(units=units, ranks=firsts, num_bytes=num_bytes, tp=least, part=Part.SHARES)
    copies = [
        rank
        for tp, ranks in stages
        for place, rank in enumerate(ranks)
        if place % tp < tp // common
    ]
    num_bytes = dtype_bytes * whole
    yield Bucket(
        units=units,
        ranks=tuple(sorted(copies)),
        num_bytes=num_bytes,
        tp=common,
        part=Part.COPIES,
    )


def _parameters(units: Sequence[str], model: ModelSpec) -> tuple[int, int]:
    """Return how many parameters of units the ranks of a lane share, and how many each holds whole."""
    layers = [
        arch.layer_at(model, int(unit.removeprefix("layer.")))
        for unit in units
        if unit.startswith("layer.")
    ]
    copied = sum(layer.copied_parameters for layer in layers)
    others = sum(unit_parameters(unit, model) for unit in units if not unit.startswith("layer."))
    return sum(layer.parameters for layer in layers) - copied, copied + others


def unit_parameters(unit: str, model: ModelSpec) -> int:
    """Parameters of "embedding", "layer.N" or "head"."""
    if unit == "embedding":
        return arch.embedding_parameters(model)
    if unit == "head":
        if model.tied_embeddings:
            return arch.final_norm_parameters(model)
        return arch.head_parameters(model)
    return arch.layer_at(model, int(unit.removeprefix("layer."))).parameters


_Held = tuple[int, int, bool, bool, int]  # first layer, number of layers, embedding, head, tp


def _holders(replicas: Sequence[ReplicaPlan]) -> dict[_Held, list[int]]:
    """Return the ranks of lanes by what these hold: there are few different ones, however many replicas."""
    holders: dict[_Held, list[int]] = {}
    for replica in replicas:
        for stage in replica.stages:
            parts = (stage.first_layer, stage.num_layers, stage.has_embedding, stage.has_head)
            tp = len(stage.ranks) // stage.lanes
            holders.setdefault((*parts, tp), []).extend(stage.ranks)
    return holders


def _layer_owners(layer: int, stages: Sequence[_Held]) -> tuple[int, ...]:
    """Return the places of the stages that hold a layer."""
    return tuple(
        place for place, (first, count, *_) in enumerate(stages) if first <= layer < first + count
    )


def _end_owners(unit: str, stages: Sequence[_Held], model: ModelSpec) -> tuple[int, ...]:
    """Return the places of the stages that hold the parameters of "embedding" or "head"."""
    tied = model.tied_embeddings
    return tuple(
        place
        for place, (_, _, has_embedding, has_head, _) in enumerate(stages)
        if (has_head if unit == "head" else has_embedding or (tied and has_head))
    )


def lane_ranks(stage: StagePlan) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each lane of a stage."""
    tp = len(stage.ranks) // stage.lanes
    return tuple(stage.ranks[place : place + tp] for place in range(0, len(stage.ranks), tp))


def find_link(links: Sequence[Link], kind: LinkKind, a: str, b: str) -> Link:
    """Return the figures of a link between vendors a and b; one that names both wins over one that says "any".

    Raises:
        ConfigError: there are none.
    """
    best: Link | None = None
    best_named = -1
    for link in links:
        if link.kind is not kind:
            continue
        ways = ((a, b), (b, a))
        if any(link.a in (None, x) and link.b in (None, y) for x, y in ways):
            named = (link.a is not None) + (link.b is not None)
            if named > best_named:
                best, best_named = link, named
    if best is None:
        raise ConfigError(
            f"no figures for the link {kind.value} between {a} and {b}",
            hint="measure it with `hetrun profile`, or declare it under `links:` in the inventory",
        )
    return best


def link_between(links: Sequence[Link], a: RankPlan, b: RankPlan) -> Link:
    """Return the figures of the link between two ranks."""
    if a.vendor != b.vendor:
        kind = LinkKind.ACROSS
    elif a.host != b.host:
        kind = LinkKind.INSIDE_ISLAND
    else:
        kind = LinkKind.INSIDE_HOST
    return find_link(links, kind, a.vendor, b.vendor)


def all_reduce_s(
    num_bytes: float, ranks: Sequence[RankPlan], links: Sequence[Link], *, at_once: int = 1
) -> float:
    """Seconds of an all-reduce: a ring inside each vendor, all at once, then a ring of the vendors.

    A ring of n does 2 (n - 1) hops (reduce-scatter, all-gather) with 1/n of the bytes in each. Devices of a host share
    its interface: of `at_once` such all-reduces the bytes between hosts add up.
    """
    crossing_bytes = num_bytes * at_once if len({rank.host for rank in ranks}) > 1 else num_bytes
    hosts_of: dict[str, list[str]] = {}
    for rank in ranks:
        hosts_of.setdefault(rank.vendor, []).append(rank.host)
    inside_s = 0.0
    for vendor, hosts in hosts_of.items():
        if len(hosts) > 1:
            same = len(set(hosts)) == 1
            kind = LinkKind.INSIDE_HOST if same else LinkKind.INSIDE_ISLAND
            hop = [find_link(links, kind, vendor, vendor)]
            inside_s = max(inside_s, ring_s(num_bytes if same else crossing_bytes, len(hosts), hop))
    vendors = sorted(hosts_of)
    if len(vendors) == 1:
        return inside_s
    neighbours = zip(vendors, [*vendors[1:], vendors[0]], strict=True)
    hops = [find_link(links, LinkKind.ACROSS, a, b) for a, b in neighbours]
    return inside_s + ring_s(crossing_bytes, len(vendors), hops)


def ring_s(num_bytes: float, size: int, hops: Sequence[Link]) -> float:
    """Seconds of a ring all-reduce whose rounds last as long as their slowest hop."""
    hop_s = max(hop.latency_s + num_bytes / size / hop.bytes_per_s for hop in hops)
    return 2 * (size - 1) * hop_s
