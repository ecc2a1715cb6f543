"""What ranks say to each other about checkpoints, over a gloo group that nothing else uses.

Saves run beside training; on a group of training their collectives would mix with those of a step and hang.
Words cross as JSON, tensors as raw bytes: nothing that a peer sends is run.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetrun.runtime.boundary import PeerLostError
from hetrun.runtime.checkpoint_files import memory_of

_TIMEOUT = timedelta(minutes=30)  # for the slowest disk; a lost peer is noticed by training
_CHUNK_BYTES = 256 << 20


class Exchange:
    """All ranks of the run, in a group of their own. Every rank must create it at the same point."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._size = dist.get_world_size()

    def all_say(self, value: Any) -> list[Any]:
        """What every rank says, in order of rank; `value` is anything that JSON can hold.

        Raises:
            PeerLostError: a rank does not answer.
        """
        mine = _bytes_of(json.dumps(value))
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self._size)]
        try:
            dist.all_gather(sizes, torch.tensor([mine.numel()]), group=self._group)
            longest = max(int(size.item()) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: mine.numel()] = mine
            rows = [torch.empty_like(padded) for _ in range(self._size)]
            dist.all_gather(rows, padded, group=self._group)
        except RuntimeError as error:
            raise PeerLostError(
                f"a rank said nothing about the checkpoint: {error}",
                hint="look at the log of the rank that failed first",
            ) from error
        return [
            json.loads(bytes(memory_of(row[: int(size.item())])))
            for row, size in zip(rows, sizes, strict=True)
        ]

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor of host memory; waits until it is taken.

        Raises:
            PeerLostError: the rank is gone.
        """
        for chunk in _raw(tensor).split(_CHUNK_BYTES):
            try:
                dist.send(chunk, to, group=self._group)
            except RuntimeError as error:
                raise PeerLostError(f"rank {to} did not take its state: {error}") from error

    def receive(self, into: Tensor, source: int) -> None:
        """Fill a tensor of host memory.

        Raises:
            PeerLostError: the rank is gone.
        """
        for chunk in _raw(into).split(_CHUNK_BYTES):
            try:
                dist.recv(chunk, source, group=self._group)
            except RuntimeError as error:
                raise PeerLostError(f"rank {source} did not send the state: {error}") from error


def _bytes_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
