"""What happens inside an island, behind one interface: by its native library, or by the bridge's own sockets.

Two lanes each: data goes up (from members to those that talk to other islands) on one and down on the other, so that
a chunk may go down while the next goes up. Native calls of all groups share two communicators; all members of the
island make them in the order of tickets, which its leader gives out when every member has asked for the operation.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from hetrun.bridge.fold import Fold, fold_into, native_op
from hetrun.bridge.frames import Key
from hetrun.bridge.mailbox import Mailbox
from hetrun.bridge.memory import byte_view


@dataclass(frozen=True, slots=True)
class Step:
    """One call on a lane: operation and step inside it; the same on all members."""

    seq: int
    index: int


class Lane(Protocol):
    """Collectives among the members of one island. Tensors are flat and must not change until the future is done."""

    def turn(self, ticket: int) -> AbstractAsyncContextManager[None]:
        """Calls may be made inside; those of lower tickets were made before."""
        ...

    def reduce_scatter(
        self, step: Step, source: Tensor, into: Tensor, fold: Fold
    ) -> asyncio.Future[None]:
        """Fold `source` [members * n] of all; member i gets elements [i * n, (i + 1) * n) of it in `into` [n]."""
        ...

    def all_gather(self, step: Step, source: Tensor, into: Tensor) -> asyncio.Future[None]:
        """Put `source` [n] of all members one behind the other into `into` [members * n]."""
        ...

    def broadcast(self, step: Step, tensor: Tensor, root: int) -> asyncio.Future[None]:
        """Copy the tensor of member `root` to all."""
        ...


@dataclass(frozen=True, slots=True)
class Island:
    """The two lanes of one rank."""

    up: Lane
    down: Lane
    tickets: Iterator[int] = field(default_factory=itertools.count)  # the leader's


class SocketLane:
    """Collectives by messages between all members: any part of an island, any dtype."""

    def __init__(
        self, mailbox: Mailbox, *, group: int, phase: int, members: Sequence[int], place: int
    ) -> None:
        """`members` are global ranks, `place` is the own number among them; keys have slots from `phase` on."""
        self._mailbox = mailbox
        self._group = group
        self._phase = phase
        self._members = members
        self._place = place

    @contextlib.asynccontextmanager
    async def turn(self, ticket: int) -> AsyncIterator[None]:
        """Nothing to wait for."""
        yield

    def reduce_scatter(
        self, step: Step, source: Tensor, into: Tensor, fold: Fold
    ) -> asyncio.Future[None]:
        """See `Lane`; adds in the order of members."""
        return asyncio.ensure_future(self._reduce_scatter(step, source, into, fold))

    def all_gather(self, step: Step, source: Tensor, into: Tensor) -> asyncio.Future[None]:
        """See `Lane`."""
        return asyncio.ensure_future(self._all_gather(step, source, into))

    def broadcast(self, step: Step, tensor: Tensor, root: int) -> asyncio.Future[None]:
        """See `Lane`."""
        return asyncio.ensure_future(self._broadcast(step, tensor, root))

    async def _reduce_scatter(self, step: Step, source: Tensor, into: Tensor, fold: Fold) -> None:
        rows = source.view(len(self._members), -1)
        got = torch.empty_like(rows)
        got[self._place] = rows[self._place]
        moves: list[asyncio.Future[Any]] = []
        for number, rank in self._others():
            moves.append(self._receive(rank, step, got[number]))
            moves.append(self._send(rank, step, rows[number]))
        await all_of(moves)
        into.copy_(got[0])
        for row in got[1:]:
            fold_into(into, row, fold)

    async def _all_gather(self, step: Step, source: Tensor, into: Tensor) -> None:
        rows = into.view(len(self._members), -1)
        rows[self._place] = source
        moves: list[asyncio.Future[Any]] = []
        for number, rank in self._others():
            moves.append(self._receive(rank, step, rows[number]))
            moves.append(self._send(rank, step, source))
        await all_of(moves)

    async def _broadcast(self, step: Step, tensor: Tensor, root: int) -> None:
        if self._place == root:
            await all_of([self._send(rank, step, tensor) for _, rank in self._others()])
        else:
            await self._receive(self._members[root], step, tensor)

    def _others(self) -> list[tuple[int, int]]:
        return [item for item in enumerate(self._members) if item[0] != self._place]

    def _key(self, step: Step) -> Key:
        return Key(self._group, self._phase + step.index, step.seq)

    def _send(self, rank: int, step: Step, tensor: Tensor) -> asyncio.Future[None]:
        return self._mailbox.send(rank, self._key(step), byte_view(tensor))

    def _receive(self, rank: int, step: Step, tensor: Tensor) -> asyncio.Future[bytes]:
        return self._mailbox.receive(rank, self._key(step), byte_view(tensor))


class NativeLane:
    """Collectives by the island's own library, in a thread that waits for them one after the other."""

    def __init__(self, backend: Any, name: str, loop: asyncio.AbstractEventLoop) -> None:
        """`backend` is a `torch.distributed.Backend` over exactly the ranks of the island."""
        self._backend = backend
        self._loop = loop
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._next_ticket = 0
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @contextlib.asynccontextmanager
    async def turn(self, ticket: int) -> AsyncIterator[None]:
        """See `Lane`. Who fails inside never lets the next in: the order is lost."""
        if ticket != self._next_ticket:
            mine = self._turns[ticket] = self._loop.create_future()
            await mine
        yield
        self._next_ticket += 1
        waiting = self._turns.pop(self._next_ticket, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def reduce_scatter(
        self, step: Step, source: Tensor, into: Tensor, fold: Fold
    ) -> asyncio.Future[None]:
        """See `Lane`."""
        options = c10d.ReduceScatterOptions()
        options.reduceOp = native_op(fold)
        return self._call(lambda: self._backend._reduce_scatter_base(into, source, options))  # noqa: SLF001

    def all_gather(self, step: Step, source: Tensor, into: Tensor) -> asyncio.Future[None]:
        """See `Lane`."""
        options = c10d.AllgatherOptions()
        return self._call(lambda: self._backend._allgather_base(into, source, options))  # noqa: SLF001

    def broadcast(self, step: Step, tensor: Tensor, root: int) -> asyncio.Future[None]:
        """See `Lane`."""
        options = c10d.BroadcastOptions()
        options.rootRank = root
        return self._call(lambda: self._backend.broadcast([tensor], options))

    def stop(self, timeout_s: float) -> None:
        """End the thread; one that the library holds is left behind."""
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _call(self, start: Callable[[], Any]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        self._calls.put((start, done))
        return done

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            start, done = item
            error: RuntimeError | None = None
            try:
                start().wait()
            except RuntimeError as raised:  # what torch raises for all that can happen to a group
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop ended meanwhile: nobody waits
                self._loop.call_soon_threadsafe(_settle, done, error)


async def all_of(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for all; the first error is raised at once."""
    if futures:
        await asyncio.gather(*futures)


def _settle(done: asyncio.Future[None], error: RuntimeError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
