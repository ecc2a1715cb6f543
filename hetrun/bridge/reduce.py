"""all_reduce, reduce and reduce_scatter over several islands: inside, across, inside, chunk by chunk.

Every member of an island talks to the members of others about its own slice of a chunk, so that all interfaces of
both sides share the work also where islands differ in size. Numbers are flat tensors of one dtype.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetrun.bridge.agree import converge
from hetrun.bridge.fold import Fold, fold_into
from hetrun.bridge.group import Op, Phase
from hetrun.bridge.island import Step, all_of
from hetrun.bridge.memory import byte_view, padded
from hetrun.bridge.plan import SMALL_BYTES, Range, chunks, overlap, shares, slices

_WINDOW = 8  # chunks of an operation between islands at a time


@dataclass(frozen=True, slots=True)
class Owners:
    """Who adds up what of a chunk: a range per island, and whether the others are told the sum."""

    ranges: Sequence[Range]
    back: bool


async def all_reduce(op: Op, numbers: Tensor, fold: Fold) -> None:
    """Replace the numbers by what all ranks' fold to, the same bits on all ranks."""
    if numbers.nbytes <= SMALL_BYTES:
        await _small(op, numbers, fold, writes=True)
        return
    op.goes_native(numbers.dtype)
    await converge(op)
    await _reduce(op, numbers, fold, root=None)


async def reduce(op: Op, numbers: Tensor, fold: Fold, *, root: int) -> None:
    """As `all_reduce`, on one member only; the others keep what they have."""
    if numbers.nbytes <= SMALL_BYTES:
        await _small(op, numbers, fold, writes=op.layout.me == root)
        return
    op.goes_native(numbers.dtype)
    await converge(op)
    await _reduce(op, numbers, fold, root=root)


async def reduce_scatter(op: Op, source: Tensor, into: Tensor, fold: Fold) -> None:
    """Fold `source` [ranks * n] of all; member i of the group gets elements [i * n, (i + 1) * n) in `into` [n]."""
    if source.nbytes <= SMALL_BYTES:
        whole = source.clone()
        await _small(op, whole, fold, writes=True)
        into.copy_(whole.view(len(op.layout.ranks), -1)[op.layout.me])
        return
    op.goes_native(source.dtype)
    await converge(op)
    rows = source.view(len(op.layout.ranks), -1)
    unit_bytes = rows.shape[0] * source.element_size()
    columns = chunks(rows.shape[1], max(1, op.group.chunk_bytes // unit_bytes))
    window = asyncio.Semaphore(_WINDOW)
    parts = []
    async with op.island.up.turn(op.ticket):
        for index, span in enumerate(columns):
            ups = _reduce_rows(op, rows[:, span[0] : span[1]], index, fold)
            parts.append(
                op.spawn(_scatter_across(op, window, index, ups, into[slice(*span)], fold))
            )
    async with op.island.down.turn(op.ticket):
        pass
    await all_of(parts)


async def _small(op: Op, numbers: Tensor, fold: Fold, *, writes: bool) -> None:
    """Few bytes: fewest hops."""

    def together(payloads: Sequence[bytes]) -> bytes:
        if not payloads[0]:
            return b""
        terms = [torch.frombuffer(bytearray(one), dtype=numbers.dtype) for one in payloads]
        for term in terms[1:]:
            fold_into(terms[0], term, fold)
        return bytes(byte_view(terms[0]))

    total = await converge(op, bytes(byte_view(numbers)), together)
    if writes and total:
        numbers.copy_(torch.frombuffer(bytearray(total), dtype=numbers.dtype))


async def _reduce(op: Op, numbers: Tensor, fold: Fold, *, root: int | None) -> None:
    layout, island = op.layout, op.island
    size = len(layout.mine)
    unit = math.lcm(*(len(members) for members in layout.islands))
    ranges = chunks(numbers.numel(), op.group.chunk_bytes // numbers.element_size(), unit=unit)
    window = asyncio.Semaphore(_WINDOW)
    across = []
    async with island.up.turn(op.ticket):
        for index, (start, end) in enumerate(ranges):
            source = padded(numbers[start:end], size)
            if size == 1:  # nobody to add to; only the root may change what it has
                part = source if root in (None, layout.me) else source.clone()
                up = op.nothing()
            else:
                part = source.new_empty(source.numel() // size)
                up = island.up.reduce_scatter(Step(op.seq, index), source, part, fold)
            owners = _owners(op, end - start, root)
            chunk = _Chunk(index, end - start, part)
            across.append(op.spawn(_add_across(op, window, up, chunk, owners, fold)))
    receives = root is None or root in layout.mine
    downs: list[asyncio.Future[None]] = []
    wholes: list[Tensor] = []
    async with island.down.turn(op.ticket):
        for (start, end), task in zip(ranges, across, strict=True):
            result = await task
            if receives and size > 1:
                fits = (end - start) % size == 0 and root is None
                whole = numbers[start:end] if fits else result.new_empty(result.numel() * size)
                wholes.append(whole)
                downs.append(island.down.all_gather(Step(op.seq, len(downs)), result, whole))
    await all_of(downs)
    if wholes and root in (None, layout.me):
        for (start, end), whole in zip(ranges, wholes, strict=True):
            if whole.data_ptr() != numbers[start:end].data_ptr():
                numbers[start:end] = whole[: end - start]


def _owners(op: Op, count: int, root: int | None) -> Owners:
    """Two islands swap all; more of them share the adding, so that 2 (k - 1) / k of the bytes cross instead of k - 1."""
    islands = op.layout.islands
    if root is not None:
        return Owners(
            [(0, count) if root in members else (0, 0) for members in islands], back=False
        )
    if len(islands) == 2:
        return Owners([(0, count), (0, count)], back=False)
    return Owners(shares(count, len(islands)), back=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """A chunk of `count` numbers, of which this rank has a slice, added up inside its island."""

    index: int
    count: int
    part: Tensor

    def range_of(self, op: Op, member: int) -> Range:
        """The slice that a member of the group has."""
        members = next(members for members in op.layout.islands if member in members)
        return slices(self.count, len(members))[members.index(member)]


async def _add_across(
    op: Op,
    window: asyncio.Semaphore,
    up: asyncio.Future[None],
    chunk: _Chunk,
    owners: Owners,
    fold: Fold,
) -> Tensor:
    """Return this rank's slice of the chunk, added up over all islands (where it is an owner or told).

    The sum takes the place of what was sent: it is with the kernel when `moves` are done.
    """
    async with window:
        await up
        layout, part = op.layout, chunk.part
        mine = chunk.range_of(op, layout.me)
        owned = overlap(mine, owners.ranges[layout.home])
        moves: list[asyncio.Future[Any]] = []
        terms: list[Tensor] = []
        for number, members in enumerate(layout.islands):
            if number == layout.home:
                continue
            term = part.new_empty(owned[1] - owned[0])
            terms.append(term)
            wanted = overlap(mine, owners.ranges[number])
            for member in members:
                theirs = chunk.range_of(op, member)
                slot = Phase.ACROSS + chunk.index
                if piece := _piece(part, overlap(wanted, theirs), mine):
                    moves.append(op.send(member, slot, piece[0]))
                if piece := _piece(term, overlap(owned, theirs), owned):
                    moves.append(op.receive(member, slot, piece[0]))
        await all_of(moves)
        if owned[1] > owned[0]:
            total = part[owned[0] - mine[0] : owned[1] - mine[0]]
            for term in terms:
                fold_into(total, term, fold)
        if owners.back:
            await _tell_back(op, chunk, owners)
        return part


async def _tell_back(op: Op, chunk: _Chunk, owners: Owners) -> None:
    """Owners send sums to all that have the same slice; fills the rest of the slice."""
    layout, result = op.layout, chunk.part
    mine = chunk.range_of(op, layout.me)
    owned = overlap(mine, owners.ranges[layout.home])
    slot = Phase.BACK + chunk.index
    moves: list[asyncio.Future[Any]] = []
    for number, members in enumerate(layout.islands):
        if number == layout.home:
            continue
        told = overlap(mine, owners.ranges[number])
        for member in members:
            theirs = chunk.range_of(op, member)
            if piece := _piece(result, overlap(owned, theirs), mine):
                moves.append(op.send(member, slot, piece[0]))
            if piece := _piece(result, overlap(told, theirs), mine):
                moves.append(op.receive(member, slot, piece[0]))
    await all_of(moves)


def _piece(buffer: Tensor, span: Range, held: Range) -> list[Tensor]:
    """The part of a buffer, which holds `held` of a chunk, that is `span` of it; nothing if that is empty."""
    if span[0] == span[1]:
        return []
    return [buffer[span[0] - held[0] : span[1] - held[0]]]


def _reduce_rows(
    op: Op, rows: Tensor, index: int, fold: Fold
) -> list[tuple[Tensor, asyncio.Future[None]]]:
    """For each island, add up inside mine what its members will get: my slice of the rows of that island."""
    size, count = len(op.layout.mine), len(op.layout.islands)
    ups = []
    for number, members in enumerate(op.layout.islands):
        source = padded(rows[list(members)].reshape(-1), size)
        part = source.new_empty(source.numel() // size)
        step = Step(op.seq, index * count + number)
        ups.append((part, op.island.up.reduce_scatter(step, source, part, fold)))
    return ups


async def _scatter_across(
    op: Op,
    window: asyncio.Semaphore,
    index: int,
    ups: Sequence[tuple[Tensor, asyncio.Future[None]]],
    into: Tensor,
    fold: Fold,
) -> None:
    """Send each rank of other islands what mine has for it; add up what they have for this one."""
    async with window:
        await all_of([up for _, up in ups])
        layout, width = op.layout, into.numel()
        slot = Phase.ACROSS + index
        moves: list[asyncio.Future[Any]] = []
        terms: list[Tensor] = []
        row = (layout.place * width, (layout.place + 1) * width)
        for (part, _), members in zip(ups, layout.islands, strict=True):
            if layout.me in members:
                into.copy_(part)
                continue
            mine = slices(len(members) * width, len(layout.mine))[layout.place]
            theirs = slices(len(layout.mine) * width, len(members))
            term = torch.empty_like(into)
            terms.append(term)
            for number, member in enumerate(members):
                wanted = (number * width, (number + 1) * width)
                if piece := _piece(part, overlap(mine, wanted), mine):
                    moves.append(op.send(member, slot, piece[0]))
                if piece := _piece(term, overlap(row, theirs[number]), row):
                    moves.append(op.receive(member, slot, piece[0]))
        await all_of(moves)
        for term in terms:
            fold_into(into, term, fold)
