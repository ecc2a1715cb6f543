"""What any lane of an island must do, the library's own and the bridge's: members are forked ranks."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hetrun.bridge.backend import _process
from hetrun.bridge.failure import NotBridgedError
from hetrun.bridge.fold import NATIVE_DTYPES, Fold
from hetrun.bridge.group import Phase
from hetrun.bridge.island import Lane, NativeLane, SocketLane, Step
from hetrun.bridge.native import Library
from tests.dist.bridges import join_bridge
from tests.dist.ranks import run_ranks

pytestmark = pytest.mark.dist

MEMBERS = 3
COUNT = 30_000


def _plugin(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A library that torch knows as a plug-in only."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def lane_of(kind: str, rank: int, store_path: Path) -> tuple[Lane, asyncio.AbstractEventLoop]:
    """A lane of an island of three; a fourth rank, on another island, makes it a bridge."""
    end = _process.bridge
    assert end is not None
    loop = end.thread.loop
    if kind == "sockets":
        mailbox = end.transport.mailbox
        return SocketLane(mailbox, group=5, phase=Phase.UP, members=range(3), place=rank), loop
    if kind == "gloo":
        assert end.native is not None
        return end.native.up, loop
    dist.Backend.register_backend("vendor", _plugin, devices=["cpu"])
    store = dist.PrefixStore("test", dist.FileStore(str(store_path), 4))
    backend = Library("vendor", "").communicator(
        store, rank=rank, size=MEMBERS, timeout=timedelta(seconds=20)
    )
    lane = NativeLane(backend, "test-lane", loop)
    end.lanes.append(lane)
    return lane, loop


def contract(rank: int, store_path: Path, kind: str) -> list[str]:
    join_bridge(rank, store_path, "aaab")
    wrong: list[str] = []
    if rank < MEMBERS:
        lane, loop = lane_of(kind, rank, store_path)
        wrong = asyncio.run_coroutine_threadsafe(_use(lane, rank), loop).result(40)
    dist.barrier()
    dist.destroy_process_group()
    return wrong


async def _use(lane: Lane, rank: int) -> list[str]:
    async with lane.turn(0):
        pass
    rows = torch.arange(MEMBERS * COUNT).view(MEMBERS, COUNT) % 7 + 1
    got: list[tuple[str, Tensor, Tensor]] = []
    pending = []
    async with lane.turn(1):  # all at once: calls of one lane do not disturb each other
        for index, dtype in enumerate(sorted(NATIVE_DTYPES, key=str)):
            source = (rows.flatten() * (rank + 1) % 5).to(dtype)
            into = torch.zeros(COUNT, dtype=dtype)
            pending.append(lane.reduce_scatter(Step(1, 3 * index), source, into, Fold.SUM))
            terms = torch.stack([rows[rank] * (member + 1) % 5 for member in range(MEMBERS)])
            got.append(("reduce_scatter", into, terms.sum(0).to(dtype)))
            whole = torch.zeros(MEMBERS * COUNT, dtype=dtype)
            pending.append(lane.all_gather(Step(1, 3 * index + 1), rows[rank].to(dtype), whole))
            got.append(("all_gather", whole, rows.flatten().to(dtype)))
            root = index % MEMBERS
            copy = rows[rank].to(dtype).clone()
            pending.append(lane.broadcast(Step(1, 3 * index + 2), copy, root))
            got.append(("broadcast", copy, rows[root].to(dtype)))
    await asyncio.gather(*pending)
    functions = {Fold.MAX: torch.amax, Fold.MIN: torch.amin, Fold.PRODUCT: torch.prod}
    for index, (fold, function) in enumerate(functions.items()):
        source = rows.flatten() + rank
        into = torch.zeros(COUNT, dtype=torch.int64)
        await lane.reduce_scatter(Step(2, index), source, into, fold)
        terms = torch.stack([rows[rank] + member for member in range(MEMBERS)])
        got.append((fold.name, into, function(terms, 0)))
    return [f"{what} {one.dtype}" for what, one, want in got if not torch.equal(one, want)]


@pytest.mark.parametrize("kind", ["gloo", "sockets", "plug-in"])
def test_lane_does_what_the_bridge_needs(kind: str, tmp_path: Path) -> None:
    assert run_ranks(contract, 4, tmp_path, kind) == [[]] * 4


class _Instant:
    """A library whose calls are over at once; notes their order."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def broadcast(self, tensors: list[torch.Tensor], _options: object) -> _Instant:
        self.order.append(int(tensors[0]))
        return self

    def wait(self) -> None: ...


def test_native_calls_are_made_in_the_order_of_tickets_not_of_arrival() -> None:
    library = _Instant()

    async def use() -> None:
        lane = NativeLane(library, "test-lane", asyncio.get_running_loop())

        async def call(ticket: int) -> None:
            async with lane.turn(ticket):
                await lane.broadcast(Step(0, 0), torch.tensor(ticket), 0)

        await asyncio.wait_for(asyncio.gather(*map(call, (3, 1, 0, 4, 2))), 10)
        lane.stop(5)

    asyncio.run(use())
    assert library.order == [0, 1, 2, 3, 4]


def test_library_that_torch_does_not_have_is_named() -> None:
    with pytest.raises(NotBridgedError, match="'nosuch'"):
        Library("nosuch", "127.0.0.1")
