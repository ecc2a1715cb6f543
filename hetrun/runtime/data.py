"""One global stream of rows that does not depend on the plan: step k of batch G takes rows [kG, (k+1)G).

Documents are joined, each with its end behind it, and cut into rows; a row may hold parts of several documents. All
of its tokens count, and attention is causal over the row. Who computes which rows is left to `loop.py`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hetrun.errors import ConfigError
from hetrun.model import DataKind, DataSpec
from hetrun.runtime.documents import list_files, read_files, read_stdlib
from hetrun.runtime.mapped import MappedTokens
from hetrun.runtime.prepare import Cache
from hetrun.runtime.token_file import open_megatron, open_tokens
from hetrun.runtime.tokenize import cached_tokens
from hetrun.runtime.tokenizer import bytes_for

MAX_BYTES_IN_MEMORY = 16 << 20  # of text; more is packed into a file once per host and mapped


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some rows of the stream: what goes in, what should come out, and which of that counts (1 or 0)."""

    inputs: Tensor  # int64, (rows, seq_len), like the others
    targets: Tensor
    valid: Tensor


class Tokens(Protocol):
    """All documents, joined."""

    num_tokens: int

    def tokens(self, start: int, end: int) -> Tensor:
        """Ids [start, end), int64."""
        ...

    def fingerprint(self) -> str:
        """Hash of all ids: equal on two hosts exactly if their ids are."""
        ...


class ByteText:
    """Byte tokens of a text in memory, with the last id of the vocabulary after each document if it is no byte."""

    def __init__(self, documents: Sequence[bytes], *, vocab_size: int) -> None:
        """Join documents, none of them empty.

        Raises:
            ConfigError: the vocabulary cannot hold bytes.
        """
        self._documents = documents
        self._separator = bytes_for(vocab_size).end_id
        extra = 0 if self._separator is None else 1
        self._ends = tuple(accumulate(len(document) + extra for document in documents))
        self.num_tokens = self._ends[-1] if self._ends else 0

    def tokens(self, start: int, end: int) -> Tensor:
        """Ids [start, end), int64."""
        ids: list[int] = []
        number = bisect_right(self._ends, start)
        while len(ids) < end - start:
            document = self._documents[number]
            begin = self._ends[number - 1] if number else 0
            ids.extend(document[start + len(ids) - begin : end - begin])
            if self._separator is not None and len(ids) < end - start:
                ids.append(self._separator)
            number += 1
        return torch.tensor(ids, dtype=torch.int64)

    def fingerprint(self) -> str:
        """Hash of the text and where its documents end."""
        digest = hashlib.sha256(repr((self._separator, self._ends)).encode())
        for document in self._documents:
            digest.update(document)
        return digest.hexdigest()


class TokenStream:
    """Rows of `seq_len` tokens, each predicted from its row's start; shuffled anew in every pass over the text.

    The last `held_out_rows` rows of the text are in no pass.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        seq_len: int,
        seed: int,
        held_out_rows: int = 0,
        row_length: Callable[[int], int] | None = None,
    ) -> None:
        """Cut tokens into rows.

        `row_length` gives the number of valid targets in each row of the stream; all of them when None.

        Raises:
            ConfigError: there are no tokens for one row beside those held out.
        """
        self.seq_len = seq_len
        self.num_held_out = held_out_rows
        self._tokens = tokens
        # The last target is one token further.
        self.num_rows = (tokens.num_tokens - 1) // seq_len - held_out_rows
        if self.num_rows < 1:
            needed = (held_out_rows + 1) * seq_len + 1
            raise ConfigError(
                f"data: {tokens.num_tokens} tokens, need at least"
                f" {'seq_len' if not held_out_rows else '(held_out_rows + 1) * seq_len'} + 1 = {needed}",
                hint="lower data.seq_len or data.held_out_rows, or give more text",
            )
        self._seed = seed
        self._row_length = row_length

    def rows(self, first: int, count: int) -> Rows:
        """Rows [first, first + count) of the endless stream."""
        numbers = range(first, first + count)
        lengths = [self._num_valid(row) for row in numbers]
        return self._cut([self._place(row) for row in numbers], lengths)

    def held_out(self, first: int, count: int) -> Rows:
        """Held-out rows [first, first + count); behind the last one come copies of it in which nothing counts."""
        numbers = range(first, first + count)
        places = [self.num_rows + min(row, self.num_held_out - 1) for row in numbers]
        return self._cut(places, [self.seq_len * (row < self.num_held_out) for row in numbers])

    def num_valid_tokens(self, first: int, count: int) -> int:
        """Targets that count in rows [first, first + count); any rank can tell without asking the others."""
        if self._row_length is None:
            return count * self.seq_len
        return sum(self._num_valid(row) for row in range(first, first + count))

    def fingerprint(self) -> str:
        """Hash of the tokens and their order: equal on two ranks exactly if their rows are equal."""
        digest = hashlib.sha256(self._tokens.fingerprint().encode())
        places = [self._place(row) for row in range(8)]
        digest.update(repr((self.seq_len, self.num_held_out, places)).encode())
        return digest.hexdigest()

    def _num_valid(self, row: int) -> int:
        return self.seq_len if self._row_length is None else self._row_length(row)

    def _place(self, row: int) -> int:
        """Where a row of the stream lies in the text: each pass is a new permutation of all places."""
        epoch, place = divmod(row, self.num_rows)
        return permuted(place, self.num_rows, key=f"{self._seed}/{epoch}")

    def _cut(self, places: Sequence[int], lengths: Sequence[int]) -> Rows:
        """Rows at these places of the text, of which the first `lengths` targets count."""
        size = self.seq_len
        windows = [self._tokens.tokens(at * size, (at + 1) * size + 1) for at in places]
        tokens_BT = torch.stack(windows)
        valid_BT = torch.arange(size).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
        return Rows(
            inputs=tokens_BT[:, :-1].contiguous(),
            targets=tokens_BT[:, 1:].contiguous(),
            valid=valid_BT.to(torch.int64),
        )


def open_stream(data: DataSpec, *, vocab_size: int, seed: int, cache: Cache) -> TokenStream:
    """The stream that a recipe asks for, from this host's own files.

    Raises:
        ConfigError: data, tokenizer and model do not fit together, or a file is damaged.
        StorageError: a file is not there, or the cache cannot be written.
        JobError: the tokenizer's package is missing, or another rank prepares the data for too long.
    """
    return TokenStream(
        _open(data, vocab_size, cache),
        seq_len=data.seq_len,
        seed=seed,
        held_out_rows=data.held_out_rows,
    )


def _open(data: DataSpec, vocab_size: int, cache: Cache) -> Tokens:
    path = Path(data.path or "")
    match data.kind:
        case DataKind.STDLIB_SOURCE:
            return ByteText(read_stdlib(), vocab_size=vocab_size)
        case DataKind.TOKENS:
            found = open_tokens(path, dtype=data.token_dtype and data.token_dtype.value)
        case DataKind.MEGATRON:
            found = open_megatron(path)
        case DataKind.TEXT | DataKind.JSONL:
            if data.kind is DataKind.TEXT and data.is_bytes:
                files = list_files(data)
                if sum(file.stat().st_size for file in files) <= MAX_BYTES_IN_MEMORY:
                    return ByteText(read_files(files), vocab_size=vocab_size)
            packed = cached_tokens(data, vocab_size=vocab_size, cache=cache)
            found = open_tokens(packed, dtype=None)
    return MappedTokens(found, vocab_size=vocab_size, cache=cache)


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
