"""Sends and receives between two ranks of a group: posted at once, beside the collectives, in order per tag.

Also inside an island they take the bridge's own sockets: the memory is the host's.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from torch import Tensor

from hetrun.bridge.failure import NotBridgedError
from hetrun.bridge.frames import Key
from hetrun.bridge.group import Group, Phase
from hetrun.bridge.memory import byte_view
from hetrun.bridge.work import BridgeWork

_COUNTER_BITS = 32
_MAX_TAG = 2**31


def check_tag(tag: int) -> None:
    """Refuse tags that no message can carry.

    Raises:
        NotBridgedError: below 0 or too large.
    """
    if not 0 <= tag < _MAX_TAG:
        raise NotBridgedError(f"tag {tag}: the bridge takes 0 to {_MAX_TAG - 1}")


class PointToPoint:
    """The sends and receives of one rank in one group; members are numbers inside the group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sent: defaultdict[tuple[int, int], int] = defaultdict(int)  # by member and tag
        self._received: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._any: dict[int, asyncio.Task[None]] = {}  # by tag: the last receive from any member

    def send(self, work: BridgeWork, data: Tensor, member: int, *, tag: int) -> None:
        """Send flat contiguous elements."""
        if self._group.refuse(work):
            return
        key = self._next_key(self._sent, member, tag)
        rank = self._group.layout.ranks[member]
        done = self._group.transport.mailbox.send(rank, key, byte_view(data), announce=True)
        self._track(work, self._group.spawn(_until(done)), member)

    def receive(self, work: BridgeWork, into: Tensor, member: int, *, tag: int) -> None:
        """Fill flat contiguous elements with the next message of that member and tag."""
        if self._group.refuse(work):
            return
        before = self._any.get(tag)
        if before is None or before.done():
            self._track(work, self._group.spawn(_until(self._post(into, member, tag))), member)
        else:  # which message the earlier one takes is not known yet
            self._track(work, self._group.spawn(self._after(before, into, member, tag)), member)

    def receive_any(self, work: BridgeWork, into: Tensor, *, tag: int) -> None:
        """As `receive`, with the message that is there first; the work tells whose it was."""
        if self._group.refuse(work):
            return
        task = self._group.spawn(self._receive_any(work, into, tag, self._any.get(tag)))
        self._any[tag] = task
        self._track(work, task, None)

    async def _receive_any(
        self, work: BridgeWork, into: Tensor, tag: int, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        ranks = self._group.layout.ranks
        keys = {
            rank: self._key(member, tag, self._received[member, tag])
            for member, rank in enumerate(ranks)
            if member != self._group.layout.me
        }
        rank = await self._group.transport.mailbox.first_of(keys)
        member = ranks.index(rank)
        await self._post(into, member, tag)
        work.finish(None, source=member)

    async def _after(self, before: asyncio.Task[None], into: Tensor, member: int, tag: int) -> None:
        await asyncio.wait({before})
        await self._post(into, member, tag)

    def _post(self, into: Tensor, member: int, tag: int) -> asyncio.Future[bytes]:
        key = self._next_key(self._received, member, tag)
        rank = self._group.layout.ranks[member]
        return self._group.transport.mailbox.receive(rank, key, byte_view(into))

    def _track(self, work: BridgeWork, task: asyncio.Task[None], member: int | None) -> None:
        self._group.pending.add(work)

        def ended(done: asyncio.Task[None]) -> None:
            self._group.pending.discard(work)
            if not done.cancelled() and done.exception() is None:
                work.finish(None, source=member)

        task.add_done_callback(ended)

    def _next_key(self, counts: defaultdict[tuple[int, int], int], member: int, tag: int) -> Key:
        number = counts[member, tag]
        counts[member, tag] += 1
        return self._key(member, tag, number)

    def _key(self, _member: int, tag: int, number: int) -> Key:
        number %= 1 << _COUNTER_BITS
        return Key(self._group.number, Phase.P2P, (tag << _COUNTER_BITS) | number)


async def _until(done: asyncio.Future[Any]) -> None:
    await done
