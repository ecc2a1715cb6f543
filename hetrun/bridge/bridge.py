"""What a process has once, whatever the number of its groups: plan, sockets, thread, and its island's communicators.

Made when the first group is, by all ranks together. What groups do is left to `group.py`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetrun.bridge.callbacks import Callbacks
from hetrun.bridge.failure import (
    BridgeError,
    BridgeTimeoutError,
    PeerGoneError,
    unpack_failure,
)
from hetrun.bridge.frames import Key
from hetrun.bridge.group import Group, Op
from hetrun.bridge.island import Island, NativeLane
from hetrun.bridge.loop import LoopThread
from hetrun.bridge.native import Library
from hetrun.bridge.plan import BridgePlan, group_id, make_layout, make_plan, read_plan
from hetrun.bridge.spread import barrier
from hetrun.bridge.tcp import TcpTransport, open_listeners
from hetrun.bridge.topology import Card, Settings, card_from
from hetrun.bridge.transport import Listeners
from hetrun.bridge.work import BridgeWork
from hetrun.errors import HetrunError

_SWITCH_S = 0.0005  # how long a busy Python thread may keep the bridge's thread waiting
_STOP_S = 1.0


@dataclass(slots=True, eq=False)
class Bridge:
    """One rank's end; `group` makes groups of it."""

    plan: BridgePlan
    rank: int
    library: Library
    thread: LoopThread
    transport: TcpTransport
    callbacks: Callbacks
    native: Island | None = None
    groups: dict[int, Group] = field(default_factory=dict)
    early: dict[int, BridgeError] = field(
        default_factory=dict
    )  # groups that failed before this rank made them
    lanes: list[NativeLane] = field(default_factory=list)

    def group(self, name: str, ranks: Sequence[int], *, timeout_s: float) -> Group:
        """Make a group of several islands; all its members call this, and wait for each other.

        Raises:
            BridgeError: a member cannot be reached or does not come; names it.
        """
        layout = make_layout(self.plan, ranks, self.rank)
        number = group_id(name, ranks)
        native = self.native if layout.whole[layout.home] else None
        group = Group(
            number=number,
            layout=layout,
            transport=self.transport,
            loop=self.thread.loop,
            chunk_bytes=self.plan.chunk_bytes,
            native=native,
            fellows=self,
        )
        near = [ranks[member] for member in layout.neighbours()]
        self.thread.call(self._add(group, near), timeout_s=timeout_s)
        work = BridgeWork("new_group", [], self.callbacks)
        op = Op(group, work.what, work.what.encode(), work, timeout_s)
        self.thread.loop.call_soon_threadsafe(group.start, op, barrier)
        work.wait()
        return group

    async def _add(self, group: Group, near: list[int]) -> None:
        self.groups[group.number] = group
        if group.number in self.early:
            group.fail(self.early[group.number])
        await self.transport.reach(near)

    def failed(self, group: Group, error: BridgeError) -> None:
        """Fail the groups that share the island's communicators with one that failed: their order is lost."""
        if group.native is not None:
            for other in list(self.groups.values()):
                if other.native is not None:
                    other.fail(error)

    def drop(self, group: Group) -> None:
        """Forget a group that its user destroyed."""
        self.groups.pop(group.number, None)

    def close(self) -> None:
        """End in order: what is queued is sent, peers hear a goodbye, threads end."""
        with contextlib.suppress(TimeoutError):
            self.thread.call(self.transport.close(), timeout_s=10 * _STOP_S)
        self._end()

    def abort(self) -> None:
        """End at once: operations fail here, and at all members by what they are told."""
        self.thread.call(self._abort(), timeout_s=10 * _STOP_S)
        self._end()

    async def _abort(self) -> None:
        for group in list(self.groups.values()):
            group.fail(BridgeError(f"rank {self.rank} aborted"))
        await self.transport.close()

    def _end(self) -> None:
        self.thread.stop()
        for lane in self.lanes:
            lane.stop(_STOP_S)
        self.callbacks.stop(_STOP_S)

    def lost(self, rank: int, error: PeerGoneError) -> None:
        """Fail all groups of a rank that is gone."""
        for group in list(self.groups.values()):
            if rank in group.layout.ranks:
                group.fail(error)

    def told(self, rank: int, key: Key, news: bytes) -> None:
        """Fail a group that failed elsewhere."""
        error = unpack_failure(news, rank)
        group = self.groups.get(key.group)
        if group is None:
            self.early[key.group] = error
        else:
            group.fail(error)


def meet(
    settings: Settings, store: dist.Store, *, rank: int, size: int, timeout: timedelta
) -> Bridge:
    """Find all other ranks by torch's store, and agree on rank 0's plan.

    Raises:
        HetrunError: a rank did not come, cannot be reached or does not fit; names it.
    """
    sockets = open_listeners(settings.addrs)
    try:
        library = Library(settings.backend, settings.addrs[0])
        card = Card(
            rank=rank,
            island=settings.island,
            backend=settings.backend,
            torch=str(torch.__version__),
            addrs=settings.addrs,
            ports=tuple(one.getsockname()[1] for one in sockets),
        )
        store = dist.PrefixStore("hetrun-bridge", store)
        plan = _agree(store, card, size=size, timeout=timeout)
    except HetrunError:
        for one in sockets:
            one.close()
        raise
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
    thread = LoopThread()
    ends: list[Bridge] = []
    transport = TcpTransport(
        plan,
        rank,
        secret=settings.secret,
        sockets=sockets,
        loop=thread.loop,
        listeners=Listeners(
            lost=lambda peer, error: ends[0].lost(peer, error),
            told=lambda peer, key, news: ends[0].told(peer, key, news),
        ),
    )
    bridge = Bridge(plan, rank, library, thread, transport, Callbacks())
    ends.append(bridge)
    thread.call(transport.start(), timeout_s=timeout.total_seconds())
    try:
        _join_island(bridge, store, timeout)
    except RuntimeError as error:  # what torch raises for all that can happen to a group
        bridge.abort()
        island = plan.cards[rank].island
        raise BridgeError(f"rank {rank}: no {library.name} on island {island}: {error}") from error
    return bridge


def _join_island(bridge: Bridge, store: dist.Store, timeout: timedelta) -> None:
    """Make the two communicators of this rank's island, where there is more than one rank and more than one island."""
    plan, loop = bridge.plan, bridge.thread.loop
    number = plan.island_of(bridge.rank)
    members = plan.islands[number]
    if len(plan.islands) == 1 or len(members) == 1:
        return
    for name in ("up", "down"):
        backend: Any = bridge.library.communicator(
            dist.PrefixStore(f"island/{number}/{name}", store),
            rank=members.index(bridge.rank),
            size=len(members),
            timeout=timeout,
        )
        bridge.lanes.append(NativeLane(backend, f"hetrun-bridge-{name}", loop))
    up, down = bridge.lanes
    bridge.native = Island(up, down)


def _agree(store: dist.Store, card: Card, *, size: int, timeout: timedelta) -> BridgePlan:
    """Put one's card down; rank 0 makes the plan of all cards, the others read it."""
    store.set(f"card/{card.rank}", card.to_json())
    if card.rank == 0:
        plan = _lead(store, size, timeout)
    else:
        said = _read(store, "plan", timeout, who="rank 0, which makes the plan,")
        if said[:1] != b"+":
            raise BridgeError(f"rank 0: {said[1:].decode(errors='replace')}")
        plan = read_plan(said[1:])
    if plan.cards[card.rank] != card:
        raise BridgeError(f"two processes say that they are rank {card.rank}")
    return plan


def _lead(store: dist.Store, size: int, timeout: timedelta) -> BridgePlan:
    try:
        said = [_read(store, f"card/{rank}", timeout, who=f"rank {rank}") for rank in range(size)]
        plan = make_plan([card_from(_parsed(text)) for text in said])
    except HetrunError as error:
        store.set("plan", "-" + error.message)
        raise
    store.set("plan", "+" + plan.to_bytes().decode())
    return plan


def _read(store: dist.Store, key: str, timeout: timedelta, *, who: str) -> bytes:
    try:
        store.wait([key], timeout)
        return bytes(store.get(key))
    except RuntimeError as error:  # torch's errors of a store
        limit_s = timeout.total_seconds()
        raise BridgeTimeoutError(f"{who} did not come within {limit_s:g} s") from error


def _parsed(text: bytes) -> Mapping[str, Any]:
    try:
        data: Mapping[str, Any] = json.loads(text)
    except ValueError as error:
        raise BridgeError("a rank's card is no JSON") from error
    return data
