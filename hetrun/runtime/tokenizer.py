"""Text -> token ids: bytes, a Hugging Face tokenizer.json, or a sentencepiece model.

The last two need the packages `tokenizers` and `sentencepiece`, which are used where they are and never installed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hetrun.errors import ConfigError, JobError
from hetrun.runtime.documents import unreadable

NUM_BYTE_TOKENS = 256


class Tokenizer(Protocol):
    """What makes ids of text."""

    @property
    def num_ids(self) -> int:
        """All ids are below."""
        ...

    @property
    def end_id(self) -> int | None:
        """Put after each document."""
        ...

    @property
    def name(self) -> str:
        """Equal names mean equal ids."""
        ...

    def encode(self, text: bytes) -> Sequence[int]:
        """Ids of UTF-8 text, without marks for its begin or end.

        Raises:
            UnicodeDecodeError: it is no UTF-8, and this tokenizer needs it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteTokenizer:
    """One id per byte; where the vocabulary has room, its last id ends a document."""

    num_ids: int
    end_id: int | None
    name: str

    def encode(self, text: bytes) -> bytes:
        """The bytes themselves."""
        return text


class JsonTokenizer:
    """A tokenizer.json, by the package `tokenizers`."""

    def __init__(self, path: Path, end_token: str) -> None:
        package = _import("tokenizers", path)
        digest = _sha256(path)
        try:
            known = isinstance(json.loads(path.read_bytes()).get("model"), dict)
        except (ValueError, AttributeError):
            known = False
        if not known:
            raise ConfigError(f"data: {path} is no tokenizer.json: it has no object `model`")
        self._tokenizer: Any = package.Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.num_ids = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        end_id = self._tokenizer.token_to_id(end_token)
        if end_id is None:
            raise _no_such_token(path, end_token)
        self.end_id: int | None = end_id
        self.name = f"tokenizers {_version('tokenizers')} {digest} {end_id}"

    def encode(self, text: bytes) -> Sequence[int]:
        """Ids without special tokens."""
        ids: list[int] = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
        return ids


class SentencePieceTokenizer:
    """A sentencepiece .model, by the package `sentencepiece`."""

    def __init__(self, path: Path, end_token: str | None) -> None:
        package = _import("sentencepiece", path)
        digest = _sha256(path)
        try:
            self._processor: Any = package.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"data: {path} is no sentencepiece model: {error}") from error
        self.num_ids: int = self._processor.get_piece_size()
        end_id: int = self._processor.eos_id()
        if end_token is not None:
            end_id = self._processor.piece_to_id(end_token)
            if self._processor.id_to_piece(end_id) != end_token:
                raise _no_such_token(path, end_token)
        elif end_id < 0:
            raise ConfigError(
                f"data: {path} does not say which token ends a document",
                hint="set data.end_token to one of its pieces",
            )
        self.end_id: int | None = end_id
        self.name = f"sentencepiece {_version('sentencepiece')} {digest} {end_id}"

    def encode(self, text: bytes) -> Sequence[int]:
        """Ids without marks for begin and end."""
        ids: list[int] = self._processor.encode(text.decode())
        return ids


def open_tokenizer(path: str | None, *, end_token: str | None, vocab_size: int) -> Tokenizer:
    """The tokenizer of a recipe's `data`; `vocab_size` tells whether bytes leave room for an end.

    Raises:
        ConfigError: the model cannot hold its ids, or the file is not what its name says.
        StorageError: the file cannot be read.
        JobError: the package that it needs is not there.
    """
    if path is None:
        tokenizer: Tokenizer = bytes_for(vocab_size)
    elif path.endswith(".json"):
        tokenizer = JsonTokenizer(Path(path), end_token or "")
    else:
        tokenizer = SentencePieceTokenizer(Path(path), end_token)
    return tokenizer


def bytes_for(vocab_size: int) -> ByteTokenizer:
    """Bytes for a vocabulary of this size.

    Raises:
        ConfigError: it cannot hold them.
    """
    if vocab_size < NUM_BYTE_TOKENS:
        raise ConfigError(
            f"model: vocab_size {vocab_size}, need at least {NUM_BYTE_TOKENS} for byte tokens"
        )
    end_id = vocab_size - 1 if vocab_size > NUM_BYTE_TOKENS else None
    return ByteTokenizer(num_ids=vocab_size, end_id=end_id, name=f"bytes {end_id}")


def _import(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise JobError(
            f"data: {path} needs the Python package `{name}`, which is not installed here",
            hint="install it on this host, or write a token file where it is installed (python -m"
            " hetrun.runtime.tokenize), copy that to all hosts and use kind: tokens",
        ) from error


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def _no_such_token(path: Path, token: str) -> ConfigError:
    return ConfigError(
        f"data: {path} has no token {token!r}", hint="data.end_token is one of its tokens"
    )
