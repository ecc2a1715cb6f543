"""One JSON line per event of a rank, readable while the run goes on. What an event means is said in `hetrun.model`."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TextIO

from hetrun.errors import StorageError
from hetrun.model import ErrorEvent, Event


class EventWriter:
    """Appends events to one file; each line is whole on disk before `write` returns."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            StorageError: no permission, no space, no folder.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("w", encoding="utf-8", newline="\n")
        except OSError as error:
            raise _storage_error(path, error) from error

    def write(self, event: Event) -> None:
        """Append one event.

        Raises:
            StorageError: the disk is full, or the file is gone.
        """
        line = json.dumps(asdict(event), allow_nan=False) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise _storage_error(self.path, error) from error

    def close(self) -> None:
        """End the file.

        Raises:
            StorageError: something was left to write, and there is no room for it.
        """
        try:
            self._file.close()
        except OSError as error:
            raise _storage_error(self.path, error) from error


def error_event(
    error: BaseException,
    trace: TracebackType | None,
    *,
    rank: int,
    host: str,
    step: int | None,
) -> ErrorEvent:
    """Last words of a rank: class, message and traceback of what it raised."""
    return ErrorEvent(
        rank=rank,
        host=host,
        wall_s=time.time(),
        step=step,
        kind=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(type(error), error, trace)),
    )


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write events to {path}: {error.strerror}",
        hint="free space there, or give the host another work_dir in the inventory",
    )
