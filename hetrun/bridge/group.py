"""One group of ranks on several islands: operations under way, who agreed to what, and what happens when one fails.

What the operations do with tensors is left to `reduce.py` and `spread.py`. All of this lives on the bridge's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from hetrun.bridge.failure import BridgeError, BridgeTimeoutError, PeerGoneError, pack_failure
from hetrun.bridge.fold import NATIVE_DTYPES
from hetrun.bridge.frames import Key
from hetrun.bridge.island import Island, SocketLane
from hetrun.bridge.memory import byte_view
from hetrun.bridge.plan import Layout
from hetrun.bridge.transport import Transport
from hetrun.bridge.work import BridgeWork

log = logging.getLogger(__name__)
T = TypeVar("T")

_HEARSAY_S = 0.2
_GRACE_S = 0.3  # members wait longer than their leader, who knows best whom it waits for


class Phase(IntEnum):
    """First slot of the messages of one part of an operation; below it is room for 2^24 indices."""

    GATHER = 1 << 24  # from members to their leader
    AGREE = 2 << 24  # between leaders
    REPLY = 3 << 24  # back to the members
    UP = 4 << 24
    DOWN = 5 << 24
    ACROSS = 6 << 24
    BACK = 7 << 24
    DIRECT = 8 << 24
    P2P = 9 << 24


@dataclass(slots=True, eq=False)
class Op:
    """One collective as one rank runs it."""

    group: Group
    name: str
    fingerprint: bytes  # the same on all ranks, or the call was wrong
    work: BridgeWork
    timeout_s: float
    seq: int = -1
    ticket: int = -1
    native: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def layout(self) -> Layout:
        """The group as this rank sees it."""
        return self.group.layout

    @property
    def island(self) -> Island:
        """The lanes that this operation takes."""
        return self.group.island(native=self.native)

    def goes_native(self, dtype: torch.dtype) -> None:
        """Take the island's library where it can; the same decision on all members."""
        self.native = self.group.native is not None and dtype in NATIVE_DTYPES

    def send(self, member: int, slot: int, tensor: Tensor) -> asyncio.Future[None]:
        """Send a contiguous tensor to a member of the group."""
        key = Key(self.group.number, slot, self.seq)
        rank = self.layout.ranks[member]
        mailbox = self.group.transport.mailbox
        return mailbox.send(rank, key, byte_view(tensor), announce=slot >= Phase.DIRECT)

    def receive(self, member: int, slot: int, tensor: Tensor) -> asyncio.Future[bytes]:
        """Fill a contiguous tensor with what a member sends."""
        key = Key(self.group.number, slot, self.seq)
        rank = self.layout.ranks[member]
        return self.group.transport.mailbox.receive(rank, key, byte_view(tensor))

    def nothing(self) -> asyncio.Future[None]:
        """A call that is over already."""
        done: asyncio.Future[None] = self.group.loop.create_future()
        done.set_result(None)
        return done

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a part of the operation beside the others."""
        return self.group.spawn(work)


class Fellows(Protocol):
    """The other groups of the process, as far as one group needs them."""

    def failed(self, group: Group, error: BridgeError) -> None:
        """Hear that a group failed."""
        ...


@dataclass(slots=True, eq=False)
class Group:
    """State of one group."""

    number: int  # the same on all ranks
    layout: Layout
    transport: Transport
    loop: asyncio.AbstractEventLoop
    chunk_bytes: int
    native: Island | None  # None where the group has only a part of this rank's island
    fellows: Fellows
    failure: BridgeError | None = None
    _next_seq: int = 0
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _ops: set[Op] = field(default_factory=set)
    _plain: Island | None = None
    pending: set[BridgeWork] = field(default_factory=set)  # sends and receives

    def island(self, *, native: bool) -> Island:
        """The lanes of the island's library, or those of the bridge's own sockets."""
        if native and self.native is not None:
            return self.native
        if self._plain is None:
            members = [self.layout.ranks[member] for member in self.layout.mine]
            up, down = (
                SocketLane(
                    self.transport.mailbox,
                    group=self.number,
                    phase=phase,
                    members=members,
                    place=self.layout.place,
                )
                for phase in (Phase.UP, Phase.DOWN)
            )
            self._plain = Island(up, down)
        return self._plain

    def start(self, op: Op, act: Callable[[Op], Coroutine[Any, Any, None]]) -> None:
        """Begin an operation; those of one group are numbered in the order of these calls."""
        if self.refuse(op.work):
            return
        op.seq = self._next_seq
        self._next_seq += 1
        self._ops.add(op)
        leads = self.layout.me == self.layout.mine[0]
        limit_s = op.timeout_s + (0.0 if leads else _GRACE_S)
        op.timer = self.loop.call_later(limit_s, self._expire, op, False)
        task = self.loop.create_task(act(op))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._finish(op, done))

    def refuse(self, work: BridgeWork) -> bool:
        """Finish the work with an error if the group failed or a member is gone; say whether."""
        if self.failure is None:
            absent = self.transport.absent()
            for rank in absent.keys() & set(self.layout.ranks):
                self.fail(PeerGoneError(f"rank {rank}: {absent[rank]}"))
                break
        if self.failure is not None:
            work.finish(self.failure)
        return self.failure is not None

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something of which an error ends the group."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._part_ended)
        return task

    def fail(self, error: BridgeError) -> None:
        """End everything under way, and tell the members."""
        if self.failure is not None:
            return
        self.failure = error
        log.warning("group %016x: %s", self.number, error)
        news = pack_failure(error)
        for member in self.layout.neighbours():
            self.transport.tell(self.layout.ranks[member], Key(self.number, 0, 0), news)
        for op in list(self._ops):
            self._close(op, error)
        for work in list(self.pending):
            work.finish(error)
        self.pending.clear()
        for task in list(self._tasks):
            task.cancel()
        self.transport.mailbox.forget(self.number)
        self.fellows.failed(self, error)

    def _finish(self, op: Op, task: asyncio.Task[None]) -> None:
        self._part_ended(task)
        if self.failure is not None:
            self._close(op, self.failure)
        elif not task.cancelled() and task.exception() is None:
            self._close(
                op, None
            )  # else `fail` closes it, now or soon: it must never seem to have gone well

    def _close(self, op: Op, error: BridgeError | None) -> None:
        if op.timer is not None:
            op.timer.cancel()
        self._ops.discard(op)
        op.work.finish(error)

    def _part_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (raised := task.exception()) is None:
            return
        if isinstance(raised, BridgeError):
            self.fail(raised)
        else:
            log.error("inside the bridge", exc_info=raised)
            error = BridgeError(f"rank {self.layout.ranks[self.layout.me]}: {raised}")
            # A library tells that a connection broke; the sockets may know a moment later whose.
            self.loop.call_later(_HEARSAY_S, self.fail, error)

    def _expire(self, op: Op, is_last_call: bool) -> None:
        awaited = sorted(self.transport.mailbox.waits_for(self.number, op.seq))
        at_home = {self.layout.ranks[member] for member in self.layout.mine}
        if awaited and not is_last_call and not at_home.intersection(awaited):
            # Another island is late: its leader may know which of its ranks is.
            op.timer = self.loop.call_later(_GRACE_S / 2, self._expire, op, True)
            return
        for_whom = f", waits for ranks {awaited}" if awaited else ""
        me = self.layout.ranks[self.layout.me]
        text = f"rank {me}: {op.name} (number {op.seq} of its group) was not done within {op.timeout_s:g} s{for_whom}"
        self.fail(BridgeTimeoutError(text))
