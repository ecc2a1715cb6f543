"""The backend "het" of torch.distributed: which group of it is a bridge, and which an island's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hetrun.bridge.bridge import Bridge, meet
from hetrun.bridge.failure import BridgeError
from hetrun.bridge.process_group import BridgeProcessGroup
from hetrun.bridge.topology import Settings, read_settings

NAME = "het"


@dataclass(slots=True)
class _Process:
    """The bridge of this process."""

    settings: Settings | None = None
    bridge: Bridge | None = None


_process = _Process()


def register(settings: Settings | None = None) -> None:
    """Make `init_process_group("het")` work in this process, for tensors in host memory.

    `settings` say where this rank is; without them, the file that HETRUN_BRIDGE names is read when the group is made.
    """
    _process.settings = settings
    if NAME.upper() not in dist.Backend._plugins:  # noqa: SLF001 - registering twice is refused
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def traffic() -> dict[int, tuple[int, int]]:
    """Bytes sent to and received from each rank over the bridge's sockets so far, headers included.

    Raises:
        BridgeError: there is no bridge in this process.
    """
    if _process.bridge is None:
        raise BridgeError("no group of several islands was made in this process")
    counted = _process.bridge.transport.traffic()
    return {rank: (bytes_.sent, bytes_.received) for rank, bytes_ in counted.items()}


class _World(BridgeProcessGroup):
    """The group of all ranks, which takes the bridge with it when it ends."""

    def shutdown(self) -> None:
        """Leave in order."""
        _end(Bridge.close)

    def abort(self) -> None:
        """Leave at once; operations fail here and on all ranks."""
        _end(Bridge.abort)


def _create(options: Any, _backend_options: Any) -> dist.ProcessGroup:
    """Make a group as torch asks for it; only its members are here.

    A group inside one island is the island's own, so that it costs nothing and does all that the library does.
    """
    # Its last prefix is the name of a device, by which unlike islands would never meet.
    store = options.store.underlying_store
    ranks = list(options.global_ranks_in_group)
    is_world = not ranks
    if is_world:
        settings = _process.settings or read_settings(os.environ)
        bridge = meet(
            settings,
            store,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout,
        )
        if len(bridge.plan.islands) == 1:  # nothing to bridge: no thread, no socket
            bridge.close()
        _process.bridge = bridge
        ranks = list(range(options.group_size))
    elif _process.bridge is None:
        raise BridgeError(
            "the first group of all ranks is no bridge", hint="init_process_group('het')"
        )
    try:
        return _group(_process.bridge, options, store, ranks)
    except BridgeError:
        if is_world:
            _end(Bridge.abort)
        raise


def _group(bridge: Bridge, options: Any, store: dist.Store, ranks: list[int]) -> dist.ProcessGroup:
    timeout: timedelta = options.timeout
    islands = {bridge.plan.island_of(rank) for rank in ranks}
    if len(islands) == 1:
        return bridge.library.group(
            store, rank=options.group_rank, size=options.group_size, timeout=timeout
        )
    group = bridge.group(options.group_id, ranks, timeout_s=timeout.total_seconds())
    kind = (
        _World
        if len(ranks) == len(bridge.plan.cards) and not options.global_ranks_in_group
        else BridgeProcessGroup
    )
    return kind(bridge, group, timeout=timeout)


def _end(how: Callable[[Bridge], None]) -> None:
    bridge, _process.bridge = _process.bridge, None
    if bridge is not None:
        how(bridge)
