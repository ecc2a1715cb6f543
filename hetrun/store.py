"""Model objects <-> JSON files of the chain. What stands in them is left to the steps that write them.

A reader refuses another schema version and names the command that rewrites the file; a writer replaces a
file in one move, so that nobody ever reads half of one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from pathlib import Path
from typing import NoReturn, TypeVar

from pydantic_core import to_json

from hetrun.errors import ConfigError, StorageError
from hetrun.model import (
    SCHEMA_VERSION,
    Facts,
    Noun,
    Plan,
    Profile,
    RunOutcome,
    RunReport,
)
from hetrun.strictyaml import BadKeysError, config_error, read_text, to_noun

T = TypeVar("T", bound=Noun)

MAX_BYTES = 1 << 30
_NO_NUMBER = re.compile(rb"(?:NaN|Infinity),?$", re.MULTILINE)  # text would end in a quote
_WRITERS: dict[type[Noun], str] = {
    Facts: "hetrun probe",
    Profile: "hetrun profile",
    Plan: "hetrun plan",
    RunOutcome: "hetrun launch",
    RunReport: "hetrun report",
}


def load(kind: type[T], path: Path) -> T:
    """Return the `kind` that a file holds.

    Raises:
        ConfigError: no such file, damaged, of another kind, or of another schema version.
    """
    writer = _WRITERS.get(kind)
    hint = f"`{writer}` writes this file" if writer else None
    data = _parse(read_text(path, max_bytes=MAX_BYTES, hint=hint), path, hint)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds no JSON object", hint=hint)
    if writer and data.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema_version {data.get('schema_version')!r}, this hetrun reads {SCHEMA_VERSION}",
            hint=f"write it again with `{writer}`",
        )
    try:
        return to_noun(kind, data)
    except BadKeysError as error:
        raise config_error(path, error.problems, hint=hint) from error


def dumps(noun: Noun) -> str:
    """Return a model object as the JSON text that `save` writes.

    Raises:
        ValueError: a number is infinite or none; no file of ours can hold that.
    """
    data = to_json(noun, indent=1, inf_nan_mode="constants")
    if _NO_NUMBER.search(data):
        raise ValueError("infinite numbers and NaN are not JSON compliant")
    return data.decode() + "\n"


def save(noun: Noun, path: Path) -> None:
    """Write a model object, whole or not at all; the file is readable by all (it holds no secrets).

    Raises:
        StorageError: the folder is missing or closed, or the disk is full; the old file stands as it was.
    """
    save_text(dumps(noun), path)


def save_text(text: str, path: Path) -> None:
    """Write a text file, whole or not at all, as `save` does.

    Raises:
        StorageError: as `save`.
    """
    if path.exists() and not path.is_file():
        raise StorageError(f"{path}: is no plain file", hint="name a file to write to")
    target = path.resolve()
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name[:64]}.", dir=target.parent)
    except OSError as error:
        _refuse(path, error)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o644)
        part.replace(target)
    except OSError as error:
        _refuse(path, error)
    finally:
        part.unlink(missing_ok=True)


def _parse(text: str, path: Path, hint: str | None) -> object:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{path}: {where}: not JSON: {error.msg}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON of ours: {error}", hint=hint) from error


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _refuse(path: Path, error: OSError) -> NoReturn:
    hint = {
        errno.ENOSPC: f"free some space on the disk of {path.parent}",
        errno.EDQUOT: f"free some of your quota on the disk of {path.parent}",
        errno.ENOENT: f"make the folder first: mkdir -p {path.parent}",
        errno.EACCES: "choose another file with --out",
        errno.EROFS: "choose another file with --out",
    }.get(error.errno or 0)
    raise StorageError(f"{path}: cannot be written: {error.strerror}", hint=hint) from error
