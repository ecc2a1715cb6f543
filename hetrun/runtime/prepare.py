"""Files that one process of a host makes and all its ranks use. What is in them is left to the caller.

A file appears whole or not at all: it is written under another name, synced and renamed. What a process that was
killed left behind is removed by the next one.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hetrun.errors import JobError, StorageError

_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Where prepared files of this host are kept, and how long a rank waits for another that prepares one."""

    folder: Path
    timeout_s: float

    def once(self, what: str, state: str, make: Callable[[Path], None]) -> Path:
        """Return the file of `what` in this `state`; the first to ask makes it, those of other states go.

        Raises:
            StorageError: the folder or the file cannot be written.
            JobError: another process has been at it for too long.
        """
        path = self.folder / f"{what}-{state}"
        try:
            if path.exists():
                return path
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _lock(self.folder / f"{what}.lock", self.timeout_s):
                for left in self.folder.glob(f".{what}-*.part"):
                    left.unlink()
                if not path.exists():
                    write_whole(path, make)
                    for other in self.folder.glob(f"{what}-*"):
                        if other != path:
                            other.unlink()
        except OSError as error:
            raise StorageError(
                f"data: cannot write to {self.folder}: {error.strerror}",
                hint="free space there, or give the host another work_dir in the inventory",
            ) from error
        return path


def write_whole(path: Path, make: Callable[[Path], None]) -> None:
    """Let `make` write under another name beside `path`, then put it in place."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        make(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold a lock that ends with this process, however it ends."""
    deadline_s = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise JobError(
                        f"data: another process has been preparing {path.with_suffix('')} for {timeout_s:.0f} s",
                        hint="raise launch.start_timeout_s in the recipe, or write a token file beforehand:"
                        " python -m hetrun.runtime.tokenize",
                    ) from None
                time.sleep(_POLL_S)
            else:
                break
        yield
