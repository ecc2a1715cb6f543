"""Documents -> token file, in a job where a recipe asks for it, or by hand where the tokenizer is installed:

    python -m hetrun.runtime.tokenize OUT --path PATH [--kind jsonl --field NAME]
        [--tokenizer FILE [--end-token TEXT]] [--vocab-size N]

The options are the keys of a recipe's `data` and `model.vocab_size` (for bytes: whether an id is left for the end of a
document). Exit code 0 = OUT is there and whole, else it is not there. Needs no torch.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from hetrun.errors import ConfigError, HetrunError
from hetrun.model import DataKind, DataSpec
from hetrun.runtime.documents import documents_of, list_files
from hetrun.runtime.prepare import Cache, write_whole
from hetrun.runtime.token_file import MAX_UINT16, write_tokens
from hetrun.runtime.tokenizer import Tokenizer, open_tokenizer

log = logging.getLogger(__name__)


def cached_tokens(data: DataSpec, *, vocab_size: int, cache: Cache) -> Path:
    """The token file of a recipe's text on this host; made anew when a file or the tokenizer has changed.

    Raises:
        ConfigError, StorageError: the text or the tokenizer is not what the recipe says.
        JobError: the tokenizer's package is missing, or another rank takes too long.
    """
    tokenizer = open_tokenizer(data.tokenizer, end_token=data.end_token, vocab_size=vocab_size)
    files = list_files(data)
    stats = [(path, path.stat()) for path in files]
    state = [(str(path), found.st_size, found.st_mtime_ns) for path, found in stats]
    what = short_hash(data.kind.value, str(data.path), str(data.field), str(data.tokenizer))
    return cache.once(
        f"{what}.tokens",
        short_hash(tokenizer.name, repr(state)),
        partial(tokenize, data, files, tokenizer),
    )


def tokenize(data: DataSpec, files: Sequence[Path], tokenizer: Tokenizer, path: Path) -> None:
    """Write the ids of all documents to `path`, each document's end after it where there is an id for it."""
    dtype = "uint16" if tokenizer.num_ids - 1 <= MAX_UINT16 else "uint32"
    documents = (_ids(pieces, tokenizer, source) for source, pieces in documents_of(data, files))
    write_tokens(path, documents, dtype=dtype)


def short_hash(*words: str) -> str:
    """A name for what these words say."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one token file; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m hetrun.runtime.tokenize", description="Write a token file for kind: tokens."
    )
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--path", type=Path, required=True, help="a file or a folder")
    parser.add_argument("--kind", choices=["text", "jsonl"], default="text")
    parser.add_argument("--field", help="of each JSON line: which field is the text")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json or sentencepiece .model")
    parser.add_argument("--end-token", help="after each document")
    parser.add_argument("--vocab-size", type=int, default=257, help="for bytes; 256: no end")
    given = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    try:
        data = DataSpec(
            seq_len=2,  # of no meaning here
            kind=DataKind(given.kind),
            path=str(given.path.resolve()),
            field=given.field,
            tokenizer=str(given.tokenizer.resolve()) if given.tokenizer else None,
            end_token=given.end_token,
        )
    except ValueError as error:
        parser.error(str(error))
    try:
        _write(given.out, data, vocab_size=given.vocab_size)
    except HetrunError as error:
        log.error("error: %s\nhint: %s", error, error.hint or "see docs/data.md")  # noqa: TRY400 - it says all
        return 1
    return 0


def _write(out: Path, data: DataSpec, *, vocab_size: int) -> None:
    tokenizer = open_tokenizer(data.tokenizer, end_token=data.end_token, vocab_size=vocab_size)
    write_whole(out, partial(tokenize, data, list_files(data), tokenizer))
    log.info("wrote %s: %s bytes", out, f"{out.stat().st_size:,}")


def _ids(pieces: Iterator[bytes], tokenizer: Tokenizer, path: Path) -> Iterator[Sequence[int]]:
    """Ids of one document, piece by piece, and its end; nothing where the document yields none."""
    is_empty = True
    for piece in pieces:
        try:
            ids = tokenizer.encode(piece)
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"data: {path} is not UTF-8: {error}", hint="convert it to UTF-8"
            ) from error
        is_empty = is_empty and not ids
        yield ids
    if tokenizer.end_id is not None and not is_empty:
        yield [tokenizer.end_id]


if __name__ == "__main__":
    sys.exit(main())
