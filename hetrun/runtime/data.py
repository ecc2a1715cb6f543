"""One global stream of rows that does not depend on the plan: step k of batch G takes rows [kG, (k+1)G).

Text becomes byte tokens; who computes which rows is left to `loop.py`.
"""

from __future__ import annotations

import hashlib
import mmap
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from hetrun.errors import ConfigError, StorageError
from hetrun.model import DataKind, DataSpec

NUM_BYTE_TOKENS = 256
STDLIB_BYTES = 4 << 20  # enough for a smoke run, read in a moment
_MAP_BYTES = 16 << 20  # files from this size on are mapped, not read

# Not the same on two hosts with one Python version: installed packages, tests (often packaged apart), build settings.
_LEFT_OUT = ("site-packages", "dist-packages", "__pycache__", "test", "tests")
_LEFT_OUT_PREFIX = ("_sysconfigdata", "sitecustomize", "_distutils_system_mod")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some rows of the stream: what goes in, what should come out, and which of that counts (1 or 0)."""

    inputs: Tensor  # int64, (rows, seq_len), like the others
    targets: Tensor
    valid: Tensor


class TokenStream:
    """Rows of `seq_len` tokens, each predicted from its row's start; shuffled anew in every pass over the text."""

    def __init__(
        self,
        documents: Sequence[bytes | mmap.mmap],
        *,
        seq_len: int,
        vocab_size: int,
        seed: int,
        row_length: Callable[[int], int] | None = None,
    ) -> None:
        """Join documents to one stream, with the last id of the vocabulary after each if it is no byte.

        `row_length` gives the number of valid targets in each row of the stream; all of them when None.

        Raises:
            ConfigError: the vocabulary cannot hold bytes, or the text is shorter than one row.
        """
        if vocab_size < NUM_BYTE_TOKENS:
            raise ConfigError(
                f"model: vocab_size {vocab_size}, need at least {NUM_BYTE_TOKENS} for byte tokens"
            )
        self.seq_len = seq_len
        self._documents = documents
        self._separator = vocab_size - 1 if vocab_size > NUM_BYTE_TOKENS else None
        extra = 0 if self._separator is None else 1
        self._ends = tuple(accumulate(len(document) + extra for document in documents))
        num_tokens = self._ends[-1] if self._ends else 0
        self.num_rows = (num_tokens - 1) // seq_len  # the last target is one token further
        if self.num_rows < 1:
            raise ConfigError(
                f"data: {num_tokens} tokens, need at least seq_len + 1 = {seq_len + 1}"
            )
        self._seed = seed
        self._row_length = row_length

    def rows(self, first: int, count: int) -> Rows:
        """Rows [first, first + count) of the endless stream."""
        windows = [self._window(self._place(row)) for row in range(first, first + count)]
        tokens_BT = torch.tensor(windows, dtype=torch.int64).view(count, self.seq_len + 1)
        lengths_B1 = torch.tensor(
            [self._num_valid(row) for row in range(first, first + count)]
        ).unsqueeze(1)
        valid_BT = torch.arange(self.seq_len).unsqueeze(0) < lengths_B1
        return Rows(
            inputs=tokens_BT[:, :-1].contiguous(),
            targets=tokens_BT[:, 1:].contiguous(),
            valid=valid_BT.to(torch.int64),
        )

    def num_valid_tokens(self, first: int, count: int) -> int:
        """Targets that count in rows [first, first + count); any rank can tell without asking the others."""
        if self._row_length is None:
            return count * self.seq_len
        return sum(self._num_valid(row) for row in range(first, first + count))

    def fingerprint(self) -> str:
        """Hash of the text, its cuts and its order: equal on two ranks exactly if their rows are equal."""
        digest = hashlib.sha256(repr((self.seq_len, self._separator, self._ends)).encode())
        digest.update(repr([self._place(row) for row in range(8)]).encode())
        for document in self._documents:
            digest.update(document)
        return digest.hexdigest()

    def _num_valid(self, row: int) -> int:
        return self.seq_len if self._row_length is None else self._row_length(row)

    def _place(self, row: int) -> int:
        """Where a row of the stream lies in the text: each pass is a new permutation of all places."""
        epoch, place = divmod(row, self.num_rows)
        return permuted(place, self.num_rows, key=f"{self._seed}/{epoch}")

    def _window(self, place: int) -> list[int]:
        """seq_len + 1 tokens; the last one is the next place's first."""
        start = place * self.seq_len
        end = start + self.seq_len + 1
        tokens: list[int] = []
        number = bisect_right(self._ends, start)
        while len(tokens) < end - start:
            document = self._documents[number]
            begin = self._ends[number - 1] if number else 0
            tokens.extend(document[start + len(tokens) - begin : end - begin])
            if self._separator is not None and len(tokens) < end - start:
                tokens.append(self._separator)
            number += 1
        return tokens


def open_stream(data: DataSpec, *, vocab_size: int, seed: int) -> TokenStream:
    """The stream that a recipe asks for, from this host's own files."""
    match data.kind:
        case DataKind.STDLIB_SOURCE:
            documents: Sequence[bytes | mmap.mmap] = read_stdlib()
        case DataKind.TEXT:
            documents = read_text(Path(data.path or ""))
    return TokenStream(documents, seq_len=data.seq_len, vocab_size=vocab_size, seed=seed)


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


def read_text(path: Path) -> list[bytes | mmap.mmap]:
    """One file, or every .txt below a folder in order of their names.

    Raises:
        StorageError: nothing there, or it cannot be read.
    """
    paths: Iterable[Path] = [path]
    if path.is_dir():
        paths = sorted(path.rglob("*.txt"), key=lambda file: file.relative_to(path).as_posix())
    documents = [document for document in map(_read, paths) if len(document)]
    if not documents:
        raise StorageError(f"data: no text in {path}", hint="the path is one on this host")
    return documents


def permuted(place: int, size: int, *, key: str) -> int:
    """Image of `place` under a permutation of range(size) that the key selects.

    A Feistel network over the next power of four, walked until it falls inside: constant memory for any size,
    and the same on every version of Python and torch.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = place >> half_bits, place & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        place = left << half_bits | right
        if place < size:
            return place


def _read(path: Path) -> bytes | mmap.mmap:
    try:
        if path.stat().st_size < _MAP_BYTES:
            return path.read_bytes()
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StorageError(f"data: cannot read {path}: {error.strerror}") from error


def _sources(folder: Path) -> Iterator[Path]:
    """Python files below a folder in order of names; never walks into installed packages, which may be vast."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in _LEFT_OUT:
                yield from _sources(path)
        elif path.suffix == ".py" and not path.name.startswith(_LEFT_OUT_PREFIX):
            yield path
