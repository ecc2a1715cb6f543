"""Token files mapped into memory, never read whole, and looked through once per host before their ids are trusted.

The formats are those of `token_file.py`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hetrun.errors import ConfigError
from hetrun.runtime.documents import unreadable
from hetrun.runtime.prepare import Cache
from hetrun.runtime.token_file import Index, TokenFile
from hetrun.runtime.tokenize import short_hash

_CHUNK_ITEMS = 4 << 20
_DTYPES = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "uint16": torch.uint16,
    "int16": torch.int16,
    "uint32": torch.uint32,
    "int32": torch.int32,
    "int64": torch.int64,
}


class MappedTokens:
    """Ids of a token file; only the pages that rows touch are in memory."""

    def __init__(self, found: TokenFile, *, vocab_size: int, cache: Cache) -> None:
        """Map a file, after a look at all its ids where its header does not vouch for them.

        Raises:
            ConfigError: no ids, or one that the vocabulary does not have; an index that skips or repeats some.
            StorageError: the file cannot be read.
        """
        if found.num_tokens == 0:
            raise ConfigError(f"data: {found.path} holds no tokens")
        largest, self._sha256 = found.largest, found.sha256
        if largest is None or self._sha256 is None:
            largest, self._sha256 = _summary(found, cache)
        if largest >= vocab_size:
            raise ConfigError(
                f"data: {found.path} holds token id {largest}, model.vocab_size is {vocab_size}",
                hint=f"model.vocab_size must be at least {largest + 1} for this data",
            )
        self.num_tokens = found.num_tokens
        self._found = found
        try:
            with found.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._map.madvise(mmap.MADV_RANDOM)  # rows lie anywhere
        except OSError as error:
            raise unreadable(found.path, error) from error

    def tokens(self, start: int, end: int) -> Tensor:
        """Ids [start, end), int64."""
        found = self._found
        first, last = (found.start + at * found.item_bytes for at in (start, end))
        return _ids(self._map[first:last], found.dtype)

    def fingerprint(self) -> str:
        """Hash of the number format and all ids."""
        return f"{self._found.dtype} {self._sha256}"


def _summary(found: TokenFile, cache: Cache) -> tuple[int, str]:
    """Largest id and hash of a file without a header; found out once per host and state of the file."""
    paths = [found.path] + ([found.index.path] if found.index else [])
    try:
        stats = [path.stat() for path in paths]
    except OSError as error:
        raise unreadable(found.path, error) from error
    state = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
    path = cache.once(
        f"{short_hash(str(found.path), found.dtype)}.summary",
        short_hash(repr(state)),
        partial(_summarise, found),
    )
    try:
        said = json.loads(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    return int(said["largest"]), str(said["sha256"])


def _summarise(found: TokenFile, path: Path) -> None:
    """Look at every id and write down what was seen.

    Raises:
        ConfigError: an id below 0, or an index that does not cover the file from end to end.
    """
    digest = hashlib.sha256()
    largest = 0
    for data in _chunks(found.path, found.start, found.num_tokens * found.item_bytes):
        digest.update(data)
        ids = _ids(data, found.dtype)
        if int(ids.min()) < 0:
            raise ConfigError(f"data: {found.path} holds token id {int(ids.min())}, need 0 or more")
        largest = max(largest, int(ids.max()))
    if found.index is not None:
        _check_index(found.index, found.item_bytes)
    path.write_text(json.dumps({"largest": largest, "sha256": digest.hexdigest()}))


def _check_index(index: Index, item_bytes: int) -> None:
    """Refuse sequences that do not follow each other without a gap."""
    lengths = _chunks(index.path, index.lengths_at, 4 * index.num_sequences, item_bytes=4)
    offsets = _chunks(index.path, index.offsets_at, 8 * index.num_sequences, item_bytes=8)
    expected = 0
    for raw_lengths, raw_offsets in zip(lengths, offsets, strict=True):
        ends = _ids(raw_lengths, "int32").mul(item_bytes).cumsum(0) + expected
        starts = torch.cat((torch.tensor([expected]), ends[:-1]))
        if not starts.equal(_ids(raw_offsets, "int64")):
            raise ConfigError(
                f"data: sequences in {index.path} do not follow each other in the .bin",
                hint="write the pair again with Megatron's preprocessing",
            )
        expected = int(ends[-1])


def _chunks(path: Path, start: int, num_bytes: int, *, item_bytes: int = 8) -> Iterator[bytes]:
    """A part of a file in pieces of equally many items."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            left = num_bytes
            while left > 0:
                data = file.read(min(left, _CHUNK_ITEMS * item_bytes))
                if not data:
                    raise ConfigError(f"data: {path} became shorter while it was read")
                left -= len(data)
                yield data
    except OSError as error:
        raise unreadable(path, error) from error


def _ids(data: bytes, dtype: str) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype]).to(torch.int64)
