"""broadcast, all_gather, gather, scatter and all_to_all over several islands. All of it is bytes.

Each byte crosses the links between two islands once: a slice for each member on the other side, which they then
gather among themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hetrun.bridge.agree import converge
from hetrun.bridge.group import Op, Phase
from hetrun.bridge.island import Step, all_of
from hetrun.bridge.memory import byte_view
from hetrun.bridge.plan import SMALL_BYTES, Range, chunks, overlap, slices


async def barrier(op: Op) -> None:
    """Wait for all ranks."""
    await converge(op)


async def broadcast(op: Op, data: Tensor, *, root: int) -> None:
    """Copy the root's bytes [n] to all members."""
    layout = op.layout
    if data.nbytes <= SMALL_BYTES:
        said = await converge(op, bytes(byte_view(data)) if layout.me == root else b"")
        if layout.me != root and said:
            data.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        return
    op.goes_native(data.dtype)
    await converge(op)
    parts = chunks(data.numel(), op.group.chunk_bytes)
    if root in layout.mine:
        await _broadcast_out(op, data, parts, layout.mine.index(root))
    else:
        source = next(members for members in layout.islands if root in members)
        await _broadcast_in(op, data, parts, source)


async def _broadcast_out(op: Op, data: Tensor, parts: Sequence[Range], root: int) -> None:
    """On the root's island: copy inside, then each member sends its slices on."""
    sends = []
    async with op.island.up.turn(op.ticket):
        for index, (start, end) in enumerate(parts):
            part = data[start:end]
            up = op.island.up.broadcast(Step(op.seq, index), part, root)
            sends.append(op.spawn(_send_slices(op, up, index, part)))
    async with op.island.down.turn(op.ticket):
        pass
    await all_of(sends)


async def _send_slices(op: Op, up: asyncio.Future[None], index: int, part: Tensor) -> None:
    await up
    layout = op.layout
    mine = slices(part.numel(), len(layout.mine))[layout.place]
    moves: list[asyncio.Future[Any]] = []
    for number, members in enumerate(layout.islands):
        if number == layout.home:
            continue
        for member, wanted in zip(members, slices(part.numel(), len(members)), strict=True):
            start, end = overlap(mine, wanted)
            if start < end:
                moves.append(op.send(member, Phase.ACROSS + index, part[start:end]))
    await all_of(moves)


async def _broadcast_in(
    op: Op, data: Tensor, parts: Sequence[Range], source: Sequence[int]
) -> None:
    """On another island: receive a slice, and gather the others' slices."""
    layout = op.layout
    async with op.island.up.turn(op.ticket):
        pass
    arrivals = []
    for index, (start, end) in enumerate(parts):
        held = slices(end - start, len(layout.mine))[layout.place]
        buffer = data.new_empty(-(-(end - start) // len(layout.mine)))
        moves: list[asyncio.Future[Any]] = []
        for member, theirs in zip(source, slices(end - start, len(source)), strict=True):
            first, last = overlap(held, theirs)
            if first < last:
                piece = buffer[first - held[0] : last - held[0]]
                moves.append(op.receive(member, Phase.ACROSS + index, piece))
        arrivals.append((buffer, moves))
    downs, wholes = [], []
    async with op.island.down.turn(op.ticket):
        for index, (buffer, moves) in enumerate(arrivals):
            await all_of(moves)
            whole = buffer.new_empty(buffer.numel() * len(layout.mine))
            wholes.append(whole)
            downs.append(op.island.down.all_gather(Step(op.seq, index), buffer, whole))
    await all_of(downs)
    for (start, end), whole in zip(parts, wholes, strict=True):
        data[start:end] = whole[: end - start]


async def all_gather(op: Op, source: Tensor, rows: Sequence[Tensor]) -> None:
    """Put the bytes of member i, `source` there, into `rows[i]` of all; rows may differ in length."""
    layout = op.layout
    sizes = [row.numel() for row in rows]
    if sum(sizes) <= SMALL_BYTES:
        said = await converge(op, bytes(byte_view(source)))
        at = 0
        for member in (member for members in layout.islands for member in members):
            if sizes[member]:
                part = bytearray(said[at : at + sizes[member]])
                rows[member].copy_(torch.frombuffer(part, dtype=torch.uint8))
            at += sizes[member]
        return
    op.goes_native(source.dtype)
    await converge(op)
    homes = op.spawn(_gather_home(op, source, rows))
    sends = op.spawn(_send_block(op, source, sizes))
    async with op.island.down.turn(op.ticket):
        index = 0
        blocks = []
        for number, members in enumerate(layout.islands):
            if number != layout.home:
                block = _Block(op, members, sizes, index)
                blocks.append(block)
                index += len(block.parts)
        for block in blocks:
            block.receive()
        for block in blocks:
            await block.go_down()
    await all_of([homes, sends])
    for block in blocks:
        await block.write(rows)


async def _gather_home(op: Op, source: Tensor, rows: Sequence[Tensor]) -> None:
    """Inside the island, by its library; rows are padded to the longest."""
    mine = op.layout.mine
    longest = max(rows[member].numel() for member in mine)
    gathered, ups = [], []
    async with op.island.up.turn(op.ticket):
        for index, (start, end) in enumerate(chunks(longest, op.group.chunk_bytes)):
            part = source.new_zeros(end - start)
            own = source[start : min(end, source.numel())]
            part[: own.numel()] = own
            whole = source.new_empty(len(mine), end - start)
            gathered.append((start, whole))
            ups.append(op.island.up.all_gather(Step(op.seq, index), part, whole.view(-1)))
    for (start, whole), up in zip(gathered, ups, strict=True):
        await up
        for got, member in zip(whole, mine, strict=True):
            row = rows[member][start : start + got.numel()]
            row.copy_(got[: row.numel()])


def _places(members: Sequence[int], sizes: Sequence[int]) -> list[Range]:
    """Where each member's row lies in the block of its island: rows one behind the other."""
    places, at = [], 0
    for member in members:
        places.append((at, at + sizes[member]))
        at += sizes[member]
    return places


async def _send_block(op: Op, source: Tensor, sizes: Sequence[int]) -> None:
    """Send this rank's row to other islands: to each of their members what falls into its slice of a chunk."""
    layout = op.layout
    places = _places(layout.mine, sizes)
    row = places[layout.place]
    moves: list[asyncio.Future[Any]] = []
    for number, members in enumerate(layout.islands):
        if number == layout.home:
            continue
        for index, (start, end) in enumerate(chunks(places[-1][1], op.group.chunk_bytes)):
            for member, (first, last) in zip(
                members, slices(end - start, len(members)), strict=True
            ):
                piece = overlap(row, (start + first, start + last))
                if piece[0] < piece[1]:
                    data = source[piece[0] - row[0] : piece[1] - row[0]]
                    moves.append(op.send(member, Phase.ACROSS + index, data))
    await all_of(moves)


class _Block:
    """The rows of another island on their way to all members of mine."""

    def __init__(self, op: Op, members: Sequence[int], sizes: Sequence[int], index: int) -> None:
        """`index` is that of the first step on the way down."""
        self._op = op
        self._members = members
        self._places = _places(members, sizes)
        self._first = index
        self.parts = chunks(self._places[-1][1], op.group.chunk_bytes)
        self._arrivals: list[tuple[Tensor, list[asyncio.Future[Any]]]] = []
        self._wholes: list[Tensor] = []
        self._downs: list[asyncio.Future[None]] = []

    def receive(self) -> None:
        """Make room for this rank's slices."""
        layout = self._op.layout
        for index, (start, end) in enumerate(self.parts):
            first, last = slices(end - start, len(layout.mine))[layout.place]
            buffer = torch.empty(-(-(end - start) // len(layout.mine)), dtype=torch.uint8)
            moves: list[asyncio.Future[Any]] = []
            for member, place in zip(self._members, self._places, strict=True):
                piece = overlap(place, (start + first, start + last))
                if piece[0] < piece[1]:
                    room = buffer[piece[0] - start - first : piece[1] - start - first]
                    moves.append(self._op.receive(member, Phase.ACROSS + index, room))
            self._arrivals.append((buffer, moves))

    async def go_down(self) -> None:
        """Gather the slices of all members, each chunk when it is there."""
        op = self._op
        for index, (buffer, moves) in enumerate(self._arrivals):
            await all_of(moves)
            whole = buffer.new_empty(buffer.numel() * len(op.layout.mine))
            self._wholes.append(whole)
            step = Step(op.seq, self._first + index)
            self._downs.append(op.island.down.all_gather(step, buffer, whole))

    async def write(self, rows: Sequence[Tensor]) -> None:
        """Put the rows where they belong."""
        for (start, end), whole, down in zip(self.parts, self._wholes, self._downs, strict=True):
            await down
            for member, place in zip(self._members, self._places, strict=True):
                first, last = overlap(place, (start, end))
                if first < last:
                    row = rows[member][first - place[0] : last - place[0]]
                    row.copy_(whole[first - start : last - start])


async def all_to_all(op: Op, sources: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Send `sources[i]` to member i, and fill `into[i]` with what it sends; straight, on the bridge's own sockets."""
    await converge(op)
    moves: list[asyncio.Future[Any]] = []
    for member in range(len(op.layout.ranks)):
        if member == op.layout.me:
            into[member].copy_(sources[member])
            continue
        moves.append(op.receive(member, Phase.DIRECT, into[member]))
        moves.append(op.send(member, Phase.DIRECT, sources[member]))
    await all_of(moves)


async def gather(op: Op, source: Tensor, into: Sequence[Tensor], *, root: int) -> None:
    """Send `source` to the root, which fills `into[i]` from member i; `into` is empty elsewhere."""
    await converge(op)
    if op.layout.me != root:
        await op.send(root, Phase.DIRECT, source)
        return
    into[root].copy_(source)
    others = [member for member in range(len(into)) if member != root]
    await all_of([op.receive(member, Phase.DIRECT, into[member]) for member in others])


async def scatter(op: Op, sources: Sequence[Tensor], into: Tensor, *, root: int) -> None:
    """Fill `into` with what the root has for this member; `sources` is empty elsewhere."""
    await converge(op)
    if op.layout.me != root:
        await op.receive(root, Phase.DIRECT, into)
        return
    into.copy_(sources[root])
    others = [member for member in range(len(sources)) if member != root]
    await all_of([op.send(member, Phase.DIRECT, sources[member]) for member in others])
