"""Tells the host's guard how far a rank is, beside stdout and events. Reading it is left to `transport/guard_progress.py`.

One small file per rank, written in place: three signed 64-bit integers, little-endian: the step that the rank is in
(-1 before the first), a count that grows with every action, and 1 while it is outside a step (saving, evaluating).
The guard sees each write at once, since both use the kernel's page cache.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from hetrun.errors import StorageError

_FORM = struct.Struct("<qqq")


class Heartbeat:
    """The file of one rank; without a path nothing is written."""

    def __init__(self, path: Path | None = None) -> None:
        """Create the file with its room on the disk, so that a disk that fills up later does no harm.

        Raises:
            StorageError: it cannot be written.
        """
        self._fd: int | None = None
        self._step = -1
        self._count = 0
        self._outside = 1
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._write()
        except OSError as error:
            raise StorageError(
                f"cannot write {path}: {error.strerror}",
                hint="free space there, or give the host another work_dir in the inventory",
            ) from error

    def step(self, number: int) -> None:
        """A step begins."""
        self._step, self._outside = number, 0
        self.tick()

    def outside(self) -> None:
        """A step has ended, and something else follows that takes its own time."""
        self._outside = 1
        self.tick()

    def tick(self) -> None:
        """Something moved."""
        self._count += 1
        self._write()

    def _write(self) -> None:
        if self._fd is not None:
            os.pwrite(self._fd, _FORM.pack(self._step, self._count, self._outside), 0)
