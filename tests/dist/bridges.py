"""Ranks of a bridge in forked processes on loopback, and what they do there."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetrun import bridge
from tests.dist.ranks import run_ranks

SECRET = b"\x05" * 32
TIMEOUT_S = 20.0


def join_bridge(
    rank: int,
    store_path: Path,
    islands: str,
    *,
    timeout_s: float = TIMEOUT_S,
    addrs: tuple[str, ...] = ("127.0.0.1",),
) -> None:
    """Make the world's group; rank i is on the island that letter i of `islands` names."""
    torch.set_num_threads(1)  # as torchrun does
    bridge.register(
        bridge.Settings(island=islands[rank], backend="gloo", addrs=addrs, secret=SECRET)
    )
    dist.init_process_group(
        "het",
        store=dist.FileStore(str(store_path), len(islands)),
        rank=rank,
        world_size=len(islands),
        timeout=timedelta(seconds=timeout_s),
    )


def on_islands(
    act: Callable[..., Any],
    islands: str,
    folder: Path,
    *args: Any,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Call `act(rank, islands, *args)` on every rank of a bridge; return what they return."""
    return run_ranks(_inside, len(islands), folder, act, islands, timeout_s, args)


def _inside(
    rank: int,
    store_path: Path,
    act: Callable[..., Any],
    islands: str,
    timeout_s: float,
    args: tuple[Any, ...],
) -> Any:
    join_bridge(rank, store_path, islands, timeout_s=timeout_s)
    answer = act(rank, islands, *args)
    dist.destroy_process_group()
    return answer


def num_threads() -> int:
    """Threads of this process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - numbers of threads, no files
