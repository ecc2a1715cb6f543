"""stdout and stderr that may be closed, full, or a pipe whose reader left. What is written is left to `render.py`.

Talk that nobody can read is no reason to stop a run; data that could not be written is an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TextIO, cast

from hetrun.errors import ExitCode, StorageError


class Talk:
    """Today's sys.stderr, for a rich console; a write that fails is dropped, and so are all after it."""

    @property
    def encoding(self) -> str:
        """What decides whether tables have lines of letters or of boxes."""
        stream = self._stream
        return (stream.encoding if stream is not None else None) or "utf-8"

    @property
    def _stream(self) -> TextIO | None:
        stream = sys.stderr
        return cast("TextIO | None", getattr(stream, "rich_proxied_file", stream))

    def write(self, text: str) -> int:
        """Write what can be written."""
        stream = self._stream
        if stream is not None:
            try:
                stream.write(text)
            except (OSError, ValueError):
                _silence(stream)
        return len(text)

    def flush(self) -> None:
        """Write what waits."""
        stream = self._stream
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                _silence(stream)

    def isatty(self) -> bool:
        """Say whether a person may be watching."""
        stream = self._stream
        return stream is not None and not stream.closed and stream.isatty()

    def fileno(self) -> int:
        """Descriptor below, for the size of the terminal."""
        stream = self._stream
        if stream is None:
            raise OSError("stderr is closed")
        return stream.fileno()


def write_data(text: str) -> None:
    """Write to stdout, UTF-8 whatever the locale says, so that the next program can read it.

    Raises:
        BrokenPipeError: its reader left.
        StorageError: it is closed or full.
    """
    stream = sys.stdout
    if stream is None:  # closed before we started
        raise StorageError("stdout is closed", hint="drop `>&-`, or write to a file")
    try:
        stream.flush()
        stream.buffer.write(text.encode("utf-8", "backslashreplace"))
        stream.buffer.flush()
    except BrokenPipeError:
        _silence(stream)
        raise
    except OSError as error:
        _silence(stream)
        raise StorageError(
            f"stdout: cannot be written: {error.strerror}", hint="what it holds was saved before"
        ) from error


@contextmanager
def no_stdout() -> Iterator[None]:
    """Drop what libraries below Python write to stdout, which is for data."""
    kept = os.dup(1)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def fill_standard_descriptors() -> None:
    """Open /dev/null where 0, 1 or 2 is closed, lest the next file or socket becomes our stderr."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def causes(error: BaseException) -> list[BaseException]:
    """Return what an exception was raised from, and while handling what, innermost last."""
    found: list[BaseException] = []
    above = error.__cause__ or error.__context__
    while above is not None and above not in found:
        found.append(above)
        above = above.__cause__ or above.__context__
    return found


def leave_quietly() -> NoReturn:
    """End as a program that SIGPIPE ended: the reader of stdout (head, less) is gone, nobody is left to tell."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                _silence(stream)
    os._exit(int(ExitCode.READER_GONE))


def _silence(stream: TextIO) -> None:
    """Let the rest go nowhere, that what waits in the buffer fails no second time at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        return
