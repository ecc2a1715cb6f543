"""Keeps a growing log within a bound while its writer goes on writing. Needs the standard library only."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

KEPT_BYTES = 64 << 20  # on disk of one log: half of it the beginning, half of it the end
_SLACK_BYTES = 4 << 20  # what may gather before the next cut
_BLOCK = 1 << 16  # holes begin and end at multiples of it, as file systems want
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class Cap:
    """One log: its middle gives its blocks back to the disk; what the writer holds open stays valid."""

    def __init__(self, path: Path, kept_bytes: int = KEPT_BYTES) -> None:
        self._path = path
        self._head = kept_bytes // 2
        self._tail = kept_bytes - self._head
        self._hole_end = self._head

    def cut(self, size: int) -> None:
        """Free what lies between beginning and end of the file, which has `size` bytes now, and say so in it.

        Where the file system knows no holes the file is cut after its beginning; a writer that does not append
        goes on at its place, and what lies between takes no room there either.
        """
        if size < self._hole_end:  # it was cut, and its writer appends
            self._hole_end = self._head
        end = (size - self._tail) // _BLOCK * _BLOCK
        if end - self._hole_end < min(_SLACK_BYTES, self._tail):
            return
        notice = f"\n[hetrun: bytes {self._head} to {end} of this log were dropped, it is full]\n"
        fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if not _punch(fd, self._hole_end, end - self._hole_end):
                os.ftruncate(fd, self._head)
            os.pwrite(fd, notice.encode(), self._head)
        finally:
            os.close(fd)
        self._hole_end = end


def _punch(fd: int, start: int, length: int) -> bool:
    fallocate = getattr(ctypes.CDLL(None), "fallocate64", None)
    if fallocate is None:
        return False
    sizes = ctypes.c_int64(start), ctypes.c_int64(length)
    return bool(fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, *sizes) == 0)
