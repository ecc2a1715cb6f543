"""Sums of gradients over a group while they are under way, in one level or in two. Which gradients, and when, is said in `sync.py`.

A sum is a generator: each `next` waits for what the last one started and starts what comes then, so that sums of
several groups travel at once. All ranks get the same bits: each element is added up in one place and copied from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hetrun.runtime.boundary import PeerLostError


@dataclass(frozen=True, slots=True, eq=False)
class LevelGroups:
    """The groups of one rank in an all-reduce over several vendors, as `schedule/islands.py` says it."""

    inside: dist.ProcessGroup | None  # None: no other rank of this vendor
    size: int  # of it
    between: tuple[tuple[int, int, dist.ProcessGroup], ...]  # from, to (of `of` parts of the whole)
    start: int  # the first part that this rank has when all in its vendor have scattered theirs
    of: int


def add_all(sums: Iterable[Iterator[None]]) -> None:
    """Run sums to their end, all at once.

    Raises:
        PeerLostError: a rank is gone.
    """
    under_way = list(sums)
    while under_way:
        under_way = [sum_ for sum_ in under_way if next(sum_, _ENDED) is not _ENDED]


_ENDED = object()


def added(
    gradients: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    levels: LevelGroups | None,
    copies: int = 1,
) -> Iterator[None]:
    """Put the sums over the ranks of a group into gradients; of `copies` equal ones each gives its share."""
    flat = torch.cat([gradient.flatten() for gradient in gradients]).cpu()
    if copies > 1:
        flat.div_(copies)
    try:
        yield from _at_once(flat, group) if levels is None else _in_levels(flat, levels)
    except RuntimeError as error:
        raise PeerLostError(f"a rank did not add its gradients: {error}") from error
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


def _at_once(flat: Tensor, group: dist.ProcessGroup) -> Iterator[None]:
    work = dist.all_reduce(flat, group=group, async_op=True)
    yield
    work.wait()


def _in_levels(flat: Tensor, levels: LevelGroups) -> Iterator[None]:
    each = -(-flat.numel() // levels.of)  # elements of a part; the last ones are filled up
    whole = flat.new_zeros(each * levels.of)
    whole[: flat.numel()] = flat
    own = whole
    if levels.inside is not None:  # a reduce-scatter: each gets its share from all, and adds up
        rows = torch.empty_like(whole)
        work = dist.all_to_all_single(rows, whole, group=levels.inside, async_op=True)
        yield
        work.wait()
        own = rows.view(levels.size, -1).sum(0)
    works = []
    for start, end, group in levels.between:
        part = own[(start - levels.start) * each : (end - levels.start) * each]
        works.append(dist.all_reduce(part, group=group, async_op=True))
    yield
    for work in works:
        work.wait()
    if levels.inside is not None:
        shares = list(whole.view(levels.size, -1).unbind())
        work = dist.all_gather(shares, own, group=levels.inside, async_op=True)
        yield
        work.wait()
    flat.copy_(whole[: flat.numel()])
