"""Reads how far each rank is from the files that `runtime/heartbeat.py` writes. Needs the standard library only."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

_FORM = struct.Struct("<qqq")
EVERY_S = 0.5


class Progress:
    """The files of one job's ranks on this host."""

    def __init__(self, folder: Path, ranks: list[int]) -> None:
        self._paths = {rank: folder / f"rank-{rank:04d}" for rank in ranks}
        self._seen: dict[int, bytes] = {}
        self._looked_s = 0.0

    def news(self, now_s: float) -> list[list[int]]:
        """Return [rank, step, count, outside a step] of those that moved since the last look."""
        if now_s - self._looked_s < EVERY_S:
            return []
        self._looked_s = now_s
        found = []
        for rank, path in self._paths.items():
            data = b""
            with contextlib.suppress(OSError):  # not there yet
                data = path.read_bytes()
            if len(data) == _FORM.size and data != self._seen.get(rank):
                self._seen[rank] = data
                found.append([rank, *_FORM.unpack(data)])
        return found
