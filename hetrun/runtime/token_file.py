"""Files of token ids: hetrun's own, plain ones, and Megatron's pairs. Nothing here needs torch.

hetrun's own file is a header of 512 bytes and the ids behind it, little-endian. The header is `HETRTOK1` and a JSON
object, padded with spaces: {"dtype": "uint16" or "uint32", "num_tokens": N, "largest": highest id, "sha256": hash of
the bytes behind the header}. A plain file is the ids alone. A Megatron pair is PREFIX.bin, the ids alone, and PREFIX.idx:
`MMIDIDX` and two zero bytes; version 1 (8 bytes); a code of the number format (1 byte); the numbers of sequences and of
documents (8 bytes each); then the length of each sequence (4 bytes), its offset in the .bin (8 bytes), and the
sequence that each document begins with (8 bytes).
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetrun.errors import ConfigError, StorageError

MAGIC = b"HETRTOK1"
HEADER_BYTES = 512
ITEM_BYTES = {"uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "int64": 8}
MAX_UINT16 = (1 << 16) - 1

_ARRAY_CODE = {"uint16": "H", "uint32": "I"}
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Where the lengths and offsets of a Megatron pair's sequences lie in its .idx."""

    path: Path
    num_sequences: int
    lengths_at: int
    offsets_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """Where ids lie in a file; `largest` and `sha256` are None where the file does not say them."""

    path: Path
    dtype: str
    start: int  # byte of the first id
    num_tokens: int
    largest: int | None = None
    sha256: str | None = None
    index: Index | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of one id."""
        return ITEM_BYTES[self.dtype]


def open_tokens(path: Path, *, dtype: str | None) -> TokenFile:
    """Read the header of a token file; `dtype` is the format of one that has none.

    Raises:
        StorageError: it cannot be read.
        ConfigError: it is cut short, its header is damaged, or nobody says its format.
    """
    size = _size(path)
    head = _read(path, HEADER_BYTES)
    if head.startswith(MAGIC):
        return _with_header(path, head, size=size, dtype=dtype)
    if dtype is None:
        raise ConfigError(
            f"data: {path} has no header, so its number format must be said",
            hint="set data.token_dtype: uint16 or uint32",
        )
    return _plain(path, dtype, size)


def open_megatron(prefix: Path) -> TokenFile:
    """Read the index of PREFIX.bin and PREFIX.idx.

    Raises:
        StorageError: one of them cannot be read.
        ConfigError: one is cut short or damaged, they do not belong together, or the ids are no whole numbers.
    """
    tokens, path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    size, index_size = _size(tokens), _size(path)
    head = _read(path, _MEGATRON_HEADER.size)
    if len(head) < _MEGATRON_HEADER.size or not head.startswith(_MEGATRON_MAGIC):
        raise ConfigError(f"data: {path} is no Megatron index: it does not begin with MMIDIDX")
    _, version, code, num_sequences, num_documents = _MEGATRON_HEADER.unpack(head)
    if version != 1:
        raise ConfigError(f"data: {path} has version {version}, need 1")
    if code not in _MEGATRON_DTYPES:
        raise ConfigError(f"data: {path} has number format {code}, need whole numbers")
    index = Index(
        path=path,
        num_sequences=num_sequences,
        lengths_at=_MEGATRON_HEADER.size,
        offsets_at=_MEGATRON_HEADER.size + 4 * num_sequences,
    )
    least = index.offsets_at + 8 * num_sequences + 8 * num_documents
    if index_size not in (
        least,
        least + num_sequences,
    ):  # one byte each more: modes of pictures and text
        raise ConfigError(
            f"data: {path} has {index_size} bytes, need {least} for {num_sequences} sequences in"
            f" {num_documents} documents",
            hint="it was cut short or is still being written: copy it again",
        )
    plain = _plain(tokens, _MEGATRON_DTYPES[code], size)
    _check_end(index, plain, size)
    return TokenFile(
        path=tokens, dtype=plain.dtype, start=0, num_tokens=plain.num_tokens, index=index
    )


def write_tokens(path: Path, documents: Iterable[Iterable[Sequence[int]]], *, dtype: str) -> None:
    """Write a token file with a header, which comes last: a file that was cut short has none.

    A document is a run of pieces; a piece of `bytes` is one id per byte.

    Raises:
        StorageError: it cannot be written.
    """
    digest = hashlib.sha256()
    num_tokens, largest = 0, 0
    try:
        with path.open("wb") as file:
            file.write(bytes(HEADER_BYTES))
            for pieces in documents:
                for piece in pieces:
                    if not piece:
                        continue
                    data = _packed(piece, dtype)
                    digest.update(data)
                    file.write(data)
                    num_tokens += len(piece)
                    largest = max(largest, max(piece))
            header = {
                "dtype": dtype,
                "num_tokens": num_tokens,
                "largest": largest,
                "sha256": digest.hexdigest(),
            }
            file.seek(0)
            file.write((MAGIC + json.dumps(header).encode()).ljust(HEADER_BYTES))
    except OSError as error:
        raise StorageError(
            f"data: cannot write {path}: {error.strerror}",
            hint="free space there, or write elsewhere",
        ) from error


def _with_header(path: Path, head: bytes, *, size: int, dtype: str | None) -> TokenFile:
    hint = "write it again: python -m hetrun.runtime.tokenize"
    try:
        fields: Any = json.loads(head[len(MAGIC) :])
        found = TokenFile(
            path=path,
            dtype=str(fields["dtype"]),
            start=HEADER_BYTES,
            num_tokens=int(fields["num_tokens"]),
            largest=int(fields["largest"]),
            sha256=str(fields["sha256"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"data: {path} has a damaged header", hint=hint) from error
    if found.dtype not in _ARRAY_CODE:
        raise ConfigError(f"data: {path} holds {found.dtype!r}, need uint16 or uint32", hint=hint)
    if dtype not in (None, found.dtype):
        raise ConfigError(
            f"data: {path} holds {found.dtype} by its header, data.token_dtype is {dtype}",
            hint="leave data.token_dtype out",
        )
    needed = HEADER_BYTES + found.num_tokens * found.item_bytes
    if size != needed:
        raise ConfigError(
            f"data: {path} has {size} bytes, its header needs {needed}",
            hint="it was cut short or is still being copied: copy it again",
        )
    return found


def _plain(path: Path, dtype: str, size: int) -> TokenFile:
    item_bytes = ITEM_BYTES[dtype]
    if size % item_bytes:
        raise ConfigError(
            f"data: {path} has {size} bytes, need a multiple of {item_bytes} for {dtype}",
            hint="it was cut short, or holds another number format",
        )
    return TokenFile(path=path, dtype=dtype, start=0, num_tokens=size // item_bytes)


def _check_end(index: Index, tokens: TokenFile, size: int) -> None:
    """Refuse a .bin that does not end where the last sequence does."""
    if index.num_sequences == 0:
        raise ConfigError(f"data: {index.path} has no sequence")
    last = index.num_sequences - 1
    (length,) = struct.unpack("<i", _read(index.path, 4, at=index.lengths_at + 4 * last))
    (offset,) = struct.unpack("<q", _read(index.path, 8, at=index.offsets_at + 8 * last))
    end = offset + length * tokens.item_bytes
    if end != size:
        raise ConfigError(
            f"data: {tokens.path} has {size} bytes, its index ends at {end}",
            hint="it was cut short, or belongs to another .idx: copy both again",
        )


def _packed(ids: Sequence[int], dtype: str) -> bytes | bytearray:
    """Ids as they stand in a file."""
    if isinstance(ids, bytes):
        buffer = bytearray(len(ids) * ITEM_BYTES[dtype])
        buffer[:: ITEM_BYTES[dtype]] = ids
        return buffer
    return array(_ARRAY_CODE[dtype], ids).tobytes()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(path: Path, num_bytes: int, *, at: int = 0) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read(num_bytes)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"data: cannot read {path}: {error.strerror}", hint="the path is one on this host"
    )
