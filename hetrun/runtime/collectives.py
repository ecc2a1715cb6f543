"""What one rank of a group does to be timed: meet the others, add up tensors of many sizes, send them to and fro.

Rank 0 decides how often each size is run and says so through the store, so that any backend will do. A figure is
the median of its own times. Processes and their environment are left to `collectivebench.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hetrun.errors import JobError, PreflightError
from hetrun.model import CurvePoint
from hetrun.runtime.collectivebench import CollectiveRequest, CollectiveResult
from hetrun.runtime.device import open_device, synchronize

_ELEMENT_BYTES = 4  # fp32, which every backend can add
_LONGEST_S = 1.5  # of one operation; larger sizes are left out
_MIN_SIZES = 5
_GROWTH = 4  # no size is expected to take longer than so many times the one before


def measure(
    request: CollectiveRequest, rank: int, *, port: int, listen_fd: int | None
) -> CollectiveResult:
    """Take the part of one rank; all ranks return, those but rank 0 without figures.

    Raises:
        JobError: a rank did not come, or is gone.
    """
    try:
        store = _open_store(request, port=port, listen_fd=listen_fd)
        device, why = _open_device(request, rank)
        if said := _agree(store, request, rank, why):
            return CollectiveResult(why=said)
        store.set_timeout(timedelta(seconds=request.connect_s))  # all are there: none is far behind
        dist.init_process_group(
            request.backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=request.world_size,
            timeout=timedelta(seconds=request.connect_s),
        )
        return _measure(Pacer(request, store, rank, device))
    except RuntimeError as error:  # what torch raises for all that can happen to a group
        raise JobError(f"rank {rank} of {request.backend} lost the others: {error}") from error


def _open_store(request: CollectiveRequest, *, port: int, listen_fd: int | None) -> dist.Store:
    """Open torch's store; keys begin with what only those know who hold the token."""
    store = dist.TCPStore(
        request.server_addr,
        port,
        is_master=listen_fd is not None,
        timeout=timedelta(seconds=request.start_s),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
        use_libuv=False,  # which takes no open socket before torch 2.8
    )
    return dist.PrefixStore(request.token, store)


def _open_device(request: CollectiveRequest, rank: int) -> tuple[torch.device, str]:
    """Return the rank's device, and why it cannot take part if so."""
    seat = next(seat for seat in request.seats if seat.rank == rank)
    try:
        device = open_device(seat.torch_device, seat.torch_plugin, seat.index)
    except PreflightError as error:
        return torch.device("cpu"), error.message
    if not dist.is_backend_available(request.backend):
        return device, f"torch {torch.__version__} has no backend {request.backend!r}"
    return device, ""


def _agree(store: dist.Store, request: CollectiveRequest, rank: int, why: str) -> str:
    """Wait for all ranks; return the first reason that any of them has not to go on, "" if none has."""
    store.set(f"ready/{rank}", why)
    keys = [f"ready/{number}" for number in range(request.world_size)]
    store.wait(keys, timedelta(seconds=request.start_s))
    said = [(number, store.get(key).decode()) for number, key in enumerate(keys)]
    reasons = [f"rank {number}: {reason}" for number, reason in said if reason]
    if reasons:  # rank 0 keeps the store until all have read it
        store.set(f"read/{rank}", "")
        if rank == 0:
            others = [f"read/{number}" for number in range(request.world_size)]
            store.wait(others, timedelta(seconds=request.connect_s))
    return reasons[0] if reasons else ""


@dataclass(slots=True)
class Pacer:
    """Runs one operation over the sizes, as often on every rank as rank 0 says."""

    request: CollectiveRequest
    store: dist.Store
    rank: int
    device: torch.device

    def curve(self, what: str, action: Callable[[Tensor], None]) -> list[CurvePoint]:
        """Time an operation; other ranks than 0 time it as well, and may throw that away."""
        points: list[CurvePoint] = []
        started_s = time.monotonic()
        for size in (_ELEMENT_BYTES, *self.request.sizes):
            repeats = self._repeats(f"{what}/{size}", points, time.monotonic() - started_s)
            if repeats == 0:
                break
            tensor = torch.zeros(size // _ELEMENT_BYTES, dtype=torch.float32, device=self.device)
            self._timed(action, tensor)  # connections and windows open
            times = [self._timed(action, tensor) for _ in range(repeats)]
            points.append(
                CurvePoint(
                    num_bytes=tensor.numel() * _ELEMENT_BYTES, seconds=statistics.median(times)
                )
            )
        return points

    def _repeats(self, key: str, points: Sequence[CurvePoint], spent_s: float) -> int:
        if self.rank == 0:
            self.store.set(key, str(repeats_for(self.request, points, spent_s)))
        return int(self.store.get(key))

    def _timed(self, action: Callable[[Tensor], None], tensor: Tensor) -> float:
        synchronize(self.device)
        start_s = time.perf_counter()
        action(tensor)
        synchronize(self.device)
        return time.perf_counter() - start_s


def repeats_for(request: CollectiveRequest, points: Sequence[CurvePoint], spent_s: float) -> int:
    """Return how often the next size is run: within its budget, 0 where it would take too long."""
    if not points:
        return request.max_repeats
    next_s = _GROWTH * points[-1].seconds
    turns_s = (1 + request.min_repeats) * next_s
    if len(points) >= _MIN_SIZES and (
        next_s > _LONGEST_S or spent_s + turns_s > request.deadline_s / 2
    ):
        return 0
    return max(request.min_repeats, min(request.max_repeats, int(request.budget_s / next_s)))


def _measure(pacer: Pacer) -> CollectiveResult:
    all_reduce = pacer.curve("all_reduce", _all_reduce)
    p2p: list[CurvePoint] = []
    if pacer.request.p2p and pacer.rank < 2:
        there_and_back = pacer.curve("p2p", _first if pacer.rank == 0 else _second)
        p2p = [
            CurvePoint(num_bytes=point.num_bytes, seconds=point.seconds / 2)
            for point in there_and_back
        ]
    _part(pacer)
    if pacer.rank != 0:
        return CollectiveResult()
    return CollectiveResult(all_reduce=tuple(all_reduce), p2p=tuple(p2p))


def _part(pacer: Pacer) -> None:
    """Nobody leaves while others still measure; rank 0, which has the store, leaves last."""
    store, limit = pacer.store, timedelta(seconds=pacer.request.deadline_s)
    if pacer.rank == 0:
        store.set("end", "")
        others = [f"gone/{number}" for number in range(1, pacer.request.world_size)]
        store.wait(others, limit)
    else:
        store.wait(["end"], limit)
        store.set(f"gone/{pacer.rank}", "")


def _all_reduce(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def _first(tensor: Tensor) -> None:
    dist.send(tensor, 1)
    dist.recv(tensor, 1)


def _second(tensor: Tensor) -> None:
    dist.recv(tensor, 0)
    dist.send(tensor, 0)
