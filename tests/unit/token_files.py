"""Token files, Megatron pairs and tokenizers of a few words, written by the formats' descriptions."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

WORDS = ("<end>", "a", "rose", "is", "red", "<unknown>")


def write_megatron(
    prefix: Path, sequences: Sequence[Sequence[int]], *, code: int = 8, letter: str = "H"
) -> None:
    """PREFIX.bin and PREFIX.idx; every sequence is a document."""
    items = [struct.pack(f"<{len(ids)}{letter}", *ids) for ids in sequences]
    Path(f"{prefix}.bin").write_bytes(b"".join(items))
    count = len(sequences)
    offsets = [sum(map(len, items[:number])) for number in range(count)]
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, count, count + 1)
        + struct.pack(f"<{count}i", *map(len, sequences))
        + struct.pack(f"<{count}q", *offsets)
        + struct.pack(f"<{count + 1}q", *range(count + 1))
    )


def write_tokenizer_json(path: Path) -> None:
    """One id per word of WORDS."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_truncation(3)  # as many files have it; training must not cut texts
    tokenizer.save(str(path))


def write_sentencepiece(folder: Path) -> Path:
    """A model learnt from a line of text; its end of text is `</s>`."""
    import sentencepiece

    text = folder / "learnt.txt"
    text.write_text("a rose is a rose is a red rose\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "sp"), vocab_size=12, minloglevel=2
    )
    return folder / "sp.model"
