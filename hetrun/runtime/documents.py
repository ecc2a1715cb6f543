"""Documents of text files, folders and JSON lines, piece by piece, so that none has to fit into memory.

What a tokenizer makes of them is left to `tokenizer.py`.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path

from hetrun.errors import ConfigError, StorageError
from hetrun.model import DataKind, DataSpec

STDLIB_BYTES = 4 << 20  # enough for a smoke run, read in a moment
PIECE_BYTES = (
    1 << 20
)  # pieces are about this long and end with a line where lines are not longer than this
_MAX_LINE_BYTES = 1 << 30  # of a JSON object
_SUFFIX = {DataKind.TEXT: ".txt", DataKind.JSONL: ".jsonl"}

# Not the same on two hosts with one Python version: installed packages, tests (often packaged apart), build settings.
_LEFT_OUT = ("site-packages", "dist-packages", "__pycache__", "test", "tests")
_LEFT_OUT_PREFIX = ("_sysconfigdata", "sitecustomize", "_distutils_system_mod")


def read_stdlib() -> list[bytes]:
    """Source files of this interpreter's standard library in order of their names, up to 4 MiB."""
    documents: list[bytes] = []
    num_bytes = 0
    for path in _sources(Path(sysconfig.get_path("stdlib"))):
        document = path.read_bytes()
        num_bytes += len(document)
        if num_bytes > STDLIB_BYTES:
            break
        if document:
            documents.append(document)
    return documents


def list_files(data: DataSpec) -> list[Path]:
    """The file, or all files of its kind (.txt, .jsonl) below the folder in order of their names; no empty ones.

    Raises:
        StorageError: nothing there.
    """
    path = Path(data.path or "")
    suffix = _SUFFIX[data.kind]
    try:
        paths = [path]
        if path.is_dir():
            found = path.rglob(f"*{suffix}")
            paths = sorted(found, key=lambda file: file.relative_to(path).as_posix())
        files = [file for file in paths if file.stat().st_size > 0]
    except OSError as error:
        raise unreadable(Path(error.filename or path), error) from error
    if not files:
        raise StorageError(
            f"data: no text in {path}",
            hint=f"the path is one on this host; in a folder, files that end in {suffix} count",
        )
    return files


def read_files(files: Sequence[Path]) -> list[bytes]:
    """What is in these files.

    Raises:
        StorageError: one cannot be read.
    """
    try:
        return [path.read_bytes() for path in files]
    except OSError as error:
        raise unreadable(Path(error.filename), error) from error


def documents_of(data: DataSpec, files: Sequence[Path]) -> Iterator[tuple[Path, Iterator[bytes]]]:
    """The documents in these files in order, each in pieces of UTF-8 text, with their files; no piece is empty.

    Raises:
        StorageError: a file cannot be read.
        ConfigError: a line of JSON is not what the recipe says; names file and line.
    """
    for path in files:
        if data.kind is DataKind.JSONL:
            for text in _texts(path, data.field or ""):
                yield path, iter([text])
        else:
            yield path, _pieces(path)


def unreadable(path: Path, error: OSError) -> StorageError:
    """The error for a file of the user's that is not there or not readable."""
    return StorageError(
        f"data: cannot read {path}: {error.strerror}", hint="the path is one on this host"
    )


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece + file.readline(PIECE_BYTES) + _rest_of_character(file)
    except OSError as error:
        raise unreadable(path, error) from error


def _rest_of_character(file: BufferedReader) -> bytes:
    """Bytes up to the next that may begin a character; none after a whole line."""
    rest = b""
    while (byte := file.peek(1)[:1]) and 0x80 <= byte[0] < 0xC0:
        rest += file.read(1)
    return rest


def _texts(path: Path, field: str) -> Iterator[bytes]:
    """The field of every line that is not blank, where it is not empty."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_MAX_LINE_BYTES):
                number += 1
                if line.strip() and (text := _text(line, field, f"{path} line {number}")):
                    yield text
    except OSError as error:
        raise unreadable(path, error) from error


def _text(line: bytes, field: str, where: str) -> bytes:
    try:
        fields = json.loads(line)
        text = fields[field] if isinstance(fields, dict) else None
        if isinstance(text, str):
            return text.encode()
    except KeyError as error:
        raise ConfigError(
            f"data: {where} has no field {field!r}", hint="data.field names the field of the text"
        ) from error
    except (ValueError, RecursionError) as error:  # of JSON, and of characters that UTF-8 lacks
        raise ConfigError(f"data: {where} is no JSON object of text: {error}") from error
    what = "field is no text" if isinstance(fields, dict) else "is no JSON object"
    raise ConfigError(f"data: {where}: {what}", hint="each line is an object with the text in it")


def _sources(folder: Path) -> Iterator[Path]:
    """Python files below a folder in order of names; never walks into installed packages, which may be vast."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in _LEFT_OUT:
                yield from _sources(path)
        elif path.suffix == ".py" and not path.name.startswith(_LEFT_OUT_PREFIX):
            yield path
