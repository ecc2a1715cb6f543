"""The run's folder: events and logs as they come, launch.json at the end, even on a full disk.

Deciding what a line means is left to `monitor.py`.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from hetrun.errors import StorageError
from hetrun.model import Noun, Plan, RunOutcome
from hetrun.model.base import UNPRINTABLE
from hetrun.store import dumps, save, save_text

log = logging.getLogger(__name__)

_RESERVE = 1 << 18  # bytes kept back so that a full disk still takes launch.json
_MAX_LINE = 1 << 16
_MIN_SECRET = 4  # shorter values would blacken ordinary words
_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_UNPRINTABLE = re.compile(f"[{UNPRINTABLE}]")


class RunDir:
    """One folder below the run root, private to the user; every write that fails names it."""

    def __init__(self, run_root: Path, recipe: str, now: datetime, secrets: Iterable[str]) -> None:
        """Create it, with a name that no other run has."""
        self._files: dict[str, BinaryIO] = {}
        self._sizes: dict[str, int] = {}
        self._redact = [
            (form, b"***")
            for value in secrets
            if len(value) >= _MIN_SECRET
            for form in _forms(value)
        ]
        self.path = run_root
        try:
            run_root.mkdir(parents=True, exist_ok=True)
            self.path = _new_folder(run_root, f"{now:%Y%m%d-%H%M%S}-{recipe}")
            for name in ("events", "logs"):
                (self.path / name).mkdir()
            self._reserve.write_bytes(bytes(_RESERVE))
        except OSError as error:
            raise self._fault(error) from error

    @property
    def run_id(self) -> str:
        """Name of the folder."""
        return self.path.name

    @property
    def _reserve(self) -> Path:
        return self.path / ".reserve"

    def save_plan(self, plan: Plan) -> None:
        """Write plan.json, so that the report needs no other file."""
        save(plan, self.path / "plan.json")

    def save(self, noun: Noun, name: str) -> None:
        """Write one more file of the run, without values of secrets."""
        save_text(self.hide(dumps(noun).encode()).decode(), self.path / name)

    def append(self, name: str, line: bytes, *, limit: int | None = None) -> None:
        """Append one line to a file of the run; readers see it at once. A log stops at its limit and says so.

        Raises:
            StorageError: the disk is full, or the folder is gone.
        """
        size = self._sizes.get(name, 0)
        if limit is not None and size > limit:
            return
        self._sizes[name] = size + len(line) + 1
        if limit is not None and self._sizes[name] > limit:
            line = b"[hetrun: this log ends here, it is full]"
        try:
            if name not in self._files:
                self._files[name] = (self.path / name).open("ab", buffering=0)
            self._files[name].write(line + b"\n")
        except OSError as error:
            raise self._fault(error) from error

    def hide(self, line: bytes) -> bytes:
        """Return the line without values of secrets."""
        for secret, stars in self._redact:
            line = line.replace(secret, stars)
        return line

    def begin_again(self, number: int | None) -> None:
        """Make room for another attempt; what attempt `number` left is kept aside, without one it is dropped.

        Raises:
            StorageError: the disk is full, or the folder is gone.
        """
        self.close()
        try:
            if number is None:
                (self.path / "launch.json").unlink(missing_ok=True)
            else:
                aside = self.path / "attempts" / str(number)
                aside.mkdir(parents=True)
                for name in ("events", "launch.json"):
                    (self.path / name).rename(aside / name)
                shutil.copyfile(self.path / "plan.json", aside / "plan.json")
                (self.path / "events").mkdir()
            self._reserve.write_bytes(bytes(_RESERVE))
        except OSError as error:
            raise self._fault(error) from error

    def close(self) -> None:
        """Close all files; a later line opens its file again."""
        while self._files:
            self._files.popitem()[1].close()

    def finish(self, outcome: RunOutcome) -> None:
        """Write launch.json with the room that was kept for it."""
        self.close()
        try:
            self._reserve.unlink(missing_ok=True)
        except OSError as error:
            raise self._fault(error) from error
        text = self.hide(dumps(outcome).encode()).decode()
        json.loads(text)  # hiding a secret must not break the file
        try:
            (self.path / "launch.json").write_text(text, encoding="utf-8")
        except OSError as error:
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> StorageError:
        return StorageError(
            f"cannot write to {self.path}: {error.strerror or error}",
            hint="free space there, or choose another folder with --run-root",
        )


def _new_folder(root: Path, name: str) -> Path:
    for number in range(1, 1000):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{root / name}-*: 999 runs of one second")


def _forms(value: str) -> list[bytes]:
    """How a value may stand in a line: as it is, or inside JSON."""
    plain = value.encode(errors="surrogateescape")
    return sorted({plain, json.dumps(value)[1:-1].encode()}, key=len, reverse=True)


def clean_line(line: bytes) -> str:
    """Return a line fit for a terminal: no escapes, no controls, of a progress bar its last state."""
    line = line.rstrip(b"\r\n").rpartition(b"\r")[2]
    text = _ESCAPES.sub(b"", line[: _MAX_LINE * 2]).decode(errors="replace")
    text = _UNPRINTABLE.sub("", text)
    return text if len(text) <= _MAX_LINE else text[:_MAX_LINE] + " [cut]"


class Lines:
    """Cuts a stream into whole lines; one that never ends is cut at a limit."""

    def __init__(self, max_bytes: int = 1 << 26) -> None:
        self._rest = b""
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes, return the lines that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._max_bytes:
            lines.append(self._rest)
            self._rest = b""
        return lines

    def flush(self) -> list[bytes]:
        """Return what is left as a last line."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []
