"""Whether ranks that hold the same parameters still hold the same values: vendors round differently in the last bits.

Each rank sums up the bits of what it shares, unit by unit, and the sums are compared; values travel only where sums
differ. Who shares what is decided in `schedule/`; when it is done, in `loop.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetrun.model import MIB, ComparisonEvent, Drift, RankPlan, TrainSpec
from hetrun.runtime.boundary import PeerLostError
from hetrun.runtime.segments import BucketGroup

_CHUNK = 4 << 20  # elements at a time, since sums of bits take 8 bytes each
_CHUNK_BYTES = 64 * MIB  # of values in host memory at a time
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME = 1_000_003
_MODULUS = (1 << 61) - 1
_MOST_NAMED = 6  # ranks of a group in a message


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What the same ranks hold of one unit."""

    unit: str
    group: dist.ProcessGroup
    ranks: tuple[int, ...]  # ascending
    values: tuple[Tensor, ...]  # views of parameters, in one order on all ranks


def is_due(train: TrainSpec, step: int) -> bool:
    """Whether shared parameters are compared after this step: every `compare_every` steps and after the last."""
    every = train.compare_every
    return every is not None and ((step + 1) % every == 0 or step + 1 == train.steps)


def shared_parts(
    buckets: Sequence[BucketGroup], units: Mapping[str, Mapping[str, nn.Parameter]]
) -> list[Shared]:
    """What a rank holds together with others, in the one order in which all ranks go through it."""
    unit_of = {id(p): unit for unit, parameters in units.items() for p in parameters.values()}
    found: list[Shared] = []
    for bucket in buckets:
        for group in bucket.groups:
            if len(group.ranks) < 2:
                continue
            by_unit: dict[str, list[Tensor]] = {}
            for segment in group.segments:
                by_unit.setdefault(unit_of[id(segment.parameter)], []).append(segment.value)
            found += [
                Shared(unit, group.group, group.ranks, tuple(values))
                for unit, values in by_unit.items()
            ]
    return found


def compare(
    shared: Sequence[Shared], rank: int, *, step: int, repair: bool
) -> ComparisonEvent | None:
    """Compare all parts with the ranks that hold them too; with `repair` those that differ become the lowest rank's.

    All ranks call it at the same point. The lowest rank of a part tells of it; None where a rank is that of none.
    """
    start_s = time.perf_counter()
    sums_of = _exchange(shared)
    drifts = []
    num_told = 0
    for part, sums in zip(shared, sums_of, strict=True):
        groups = _alike(part.ranks, sums)
        is_teller = part.ranks[0] == rank
        num_told += is_teller
        if len(groups) == 1:
            continue
        largest = _largest_difference(part)
        if repair:
            _take_from_lowest(part)
        if is_teller:
            drifts.append(Drift(unit=part.unit, groups=groups, largest=largest))
    if num_told == 0:
        return None
    return ComparisonEvent(
        rank=rank,
        step=step,
        wall_s=time.time(),
        compared_s=time.perf_counter() - start_s,
        num_parts=num_told,
        drifts=tuple(drifts),
        repaired=repair,
    )


def words(drift: Drift, ranks: Sequence[RankPlan], *, repaired: bool) -> str:
    """Such as "layer.3 differs between rank 0 (one vendor) and ranks 2, 3 (another) by up to 1.2e-07"."""
    named = []
    for group in drift.groups:
        numbers = ", ".join(map(str, group[:_MOST_NAMED])) + ", ..." * (len(group) > _MOST_NAMED)
        vendors = ", ".join(sorted({ranks[member].vendor for member in group}))
        named.append(f"rank{'s' * (len(group) > 1)} {numbers} ({vendors})")
    size = "and is not finite" if drift.largest is None else f"by up to {drift.largest:.2g}"
    text = f"{drift.unit} differs between {' and '.join(named)} {size}"
    return f"{text}; all took the values of rank {drift.groups[0][0]}" if repaired else text


def checksum(values: Sequence[Tensor]) -> int:
    """A number below 2**61 that any changed bit and any two swapped elements change, computed where the tensors are."""
    total = 0
    for value in values:
        flat = value.detach().contiguous().flatten()
        for chunk in flat.view(_BITS[flat.element_size()]).split(_CHUNK):
            bits = chunk.to(torch.int64)
            places = torch.arange(1, len(bits) + 1, device=bits.device)
            for part in (bits.sum(), (bits * places).sum()):
                total = (total * _PRIME + int(part.item())) % _MODULUS
    return total


def _exchange(shared: Sequence[Shared]) -> list[list[int]]:
    """Checksums of each part on all its ranks, one exchange per group."""
    places: dict[int, list[int]] = {}
    for place, part in enumerate(shared):
        places.setdefault(id(part.group), []).append(place)
    sums: list[list[int]] = [[] for _ in shared]
    for together in places.values():
        first = shared[together[0]]
        mine = torch.tensor([checksum(shared[place].values) for place in together])
        rows = [torch.empty_like(mine) for _ in first.ranks]
        try:
            dist.all_gather(rows, mine, group=first.group)
        except RuntimeError as error:
            raise PeerLostError(f"a rank did not tell its checksums: {error}") from error
        for place, column in zip(
            together, zip(*(row.tolist() for row in rows), strict=True), strict=True
        ):
            sums[place] = list(column)
    return sums


def _alike(ranks: Sequence[int], sums: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Ranks by equal checksum, that of the lowest rank first."""
    groups: dict[int, list[int]] = {}
    for rank, value in zip(ranks, sums, strict=True):
        groups.setdefault(value, []).append(rank)
    return tuple(map(tuple, groups.values()))


def _largest_difference(part: Shared) -> float | None:
    """Largest difference of an element between any two ranks; None where an element is not finite."""
    largest = 0.0
    for flat in _chunks(part):
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32)).cpu()
        both = torch.cat((wide, -wide))  # the largest of -x is minus the smallest of x
        bad = torch.tensor([float(not bool(wide.isfinite().all()))])
        try:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=part.group)
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=part.group)
        except RuntimeError as error:
            raise PeerLostError(f"a rank did not compare {part.unit}: {error}") from error
        if bad.item():
            return None
        high, low = both.chunk(2)
        largest = max(largest, float((high + low).max().item()))
    return largest if math.isfinite(largest) else None


def _take_from_lowest(part: Shared) -> None:
    """Give all ranks the lowest one's values, to the bit."""
    for value in part.values:
        flat = value.contiguous().flatten().cpu()
        for chunk in flat.view(torch.uint8).split(_CHUNK_BYTES):
            try:
                dist.broadcast(chunk, src=part.ranks[0], group=part.group)
            except RuntimeError as error:
                raise PeerLostError(f"a rank did not take {part.unit}: {error}") from error
        value.copy_(flat.view_as(value))


def _chunks(part: Shared) -> Iterator[Tensor]:
    """Values of a part, flat, not too many at a time."""
    for value in part.values:
        flat = value.contiguous().flatten()
        yield from flat.split(max(1, _CHUNK_BYTES // flat.element_size()))
