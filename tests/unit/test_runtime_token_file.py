"""Token files read back what was written; a damaged one is named before a step is trained on it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetrun.errors import ConfigError, StorageError
from hetrun.model import DataKind, DataSpec, TokenDtype
from hetrun.runtime import mapped
from hetrun.runtime.data import TokenStream, open_stream
from hetrun.runtime.mapped import MappedTokens
from hetrun.runtime.prepare import Cache
from hetrun.runtime.token_file import (
    HEADER_BYTES,
    TokenFile,
    open_megatron,
    open_tokens,
    write_tokens,
)
from tests.unit.token_files import write_megatron

IDS = list(range(10, 40))


def _cache(folder: Path) -> Cache:
    return Cache(folder=folder / "cache", timeout_s=5.0)


def _tokens(path: Path, *, dtype: str | None = None, vocab_size: int = 1 << 32) -> MappedTokens:
    found = open_tokens(path, dtype=dtype)
    return MappedTokens(found, vocab_size=vocab_size, cache=_cache(path.parent))


def _all(tokens: MappedTokens) -> list[int]:
    ids: list[int] = tokens.tokens(0, tokens.num_tokens).tolist()
    return ids


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=4))),
    dtype=st.sampled_from(["uint16", "uint32"]),
)
def test_what_is_written_is_read(
    documents: list[list[list[int]]], dtype: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, documents, dtype=dtype)
    ids = [number for pieces in documents for piece in pieces for number in piece]
    found = open_tokens(path, dtype=None)
    assert (found.num_tokens, found.largest) == (len(ids), max(ids, default=0))
    if ids:
        assert _all(_tokens(path)) == ids


def test_large_ids_survive(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", [[[70_000, (1 << 32) - 1], b"\x00\xff"]], dtype="uint32")
    assert _all(_tokens(tmp_path / "t")) == [70_000, (1 << 32) - 1, 0, 255]


@pytest.mark.parametrize(("dtype", "letter"), [("uint16", "H"), ("uint32", "I")])
def test_a_plain_file_holds_ids_alone(dtype: str, letter: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(struct.pack(f"<30{letter}", *IDS))
    assert _all(_tokens(tmp_path / "t", dtype=dtype)) == IDS
    with pytest.raises(ConfigError, match="no header") as caught:
        _tokens(tmp_path / "t")
    assert caught.value.hint == "set data.token_dtype: uint16 or uint32"


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", [[IDS]], dtype="uint16")
    whole = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match="has 571 bytes, its header needs 572"):
        _tokens(tmp_path / "t")
    (tmp_path / "t").write_bytes(whole[: HEADER_BYTES - 450])
    with pytest.raises(ConfigError, match="damaged header"):
        _tokens(tmp_path / "t")
    (tmp_path / "t").write_bytes(whole[HEADER_BYTES:-1])
    with pytest.raises(ConfigError, match="has 59 bytes, need a multiple of 2 for uint16"):
        _tokens(tmp_path / "t", dtype="uint16")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b'"uint16"', b'"fp8"   ', "holds 'fp8', need uint16 or uint32"),
        (b'"num_tokens"', b'"num_cookies"', "damaged header"),
        (b'{"dtype"', b'["dtype"', "damaged header"),
    ],
)
def test_a_damaged_header_is_refused(old: bytes, new: bytes, says: str, tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", [[IDS]], dtype="uint16")
    whole = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(whole.replace(old, new))
    with pytest.raises(ConfigError, match=says):
        _tokens(tmp_path / "t")


def test_a_recipe_cannot_contradict_a_header(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", [[IDS]], dtype="uint16")
    with pytest.raises(ConfigError, match=r"uint16 by its header, data\.token_dtype is uint32"):
        _tokens(tmp_path / "t", dtype="uint32")


def test_a_file_without_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"")
    with pytest.raises(ConfigError, match="holds no tokens"):
        _tokens(tmp_path / "t", dtype="uint16")
    with pytest.raises(StorageError, match="cannot read"):
        _tokens(tmp_path / "none", dtype="uint16")


def test_ids_beyond_the_vocabulary_are_refused_with_and_without_a_header(tmp_path: Path) -> None:
    write_tokens(tmp_path / "with", [[IDS]], dtype="uint16")
    (tmp_path / "plain").write_bytes((tmp_path / "with").read_bytes()[HEADER_BYTES:])
    for name, dtype in (("with", None), ("plain", "uint16")):
        assert _all(_tokens(tmp_path / name, dtype=dtype, vocab_size=40)) == IDS
        says = f"{name} holds token id 39, model.vocab_size is 39"
        with pytest.raises(ConfigError, match=says) as caught:
            _tokens(tmp_path / name, dtype=dtype, vocab_size=39)
        assert "at least 40" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")]
)
def test_megatron_pairs_are_their_sequences_in_order(
    code: int, letter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "_CHUNK_ITEMS", 3)  # several pieces
    sequences = [IDS[:4], IDS[4:5], IDS[5:20], IDS[20:29], IDS[29:]]
    write_megatron(tmp_path / "t", sequences, code=code, letter=letter)
    found = open_megatron(tmp_path / "t")
    assert _all(MappedTokens(found, vocab_size=40, cache=_cache(tmp_path))) == IDS
    with pytest.raises(ConfigError, match=r"holds token id 39, model\.vocab_size is 39"):
        MappedTokens(found, vocab_size=39, cache=_cache(tmp_path))


def _spoil(path: Path, at: int, data: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(data)] = data
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("name", "at", "data", "says"),
    [
        ("t.idx", 0, b"X", "does not begin with MMIDIDX"),
        ("t.idx", 9, b"\x02", "has version 2, need 1"),
        ("t.idx", 17, b"\x07", "number format 7, need whole numbers"),
        ("t.idx", 18, b"\x09", "bytes, need .* for 9 sequences"),
        ("t.idx", 34, struct.pack("<i", 5), "do not follow each other"),
        ("t.idx", 34 + 12 + 8, struct.pack("<q", 6), "do not follow each other"),
        ("t.idx", 34 + 8, struct.pack("<i", 9), "has 60 bytes, its index ends at 58"),
        ("t.idx", None, 3, "bytes, need"),
        ("t.bin", None, 2, "has 58 bytes, its index ends at 60"),
        ("t.bin", None, 1, "has 59 bytes, need a multiple of 2"),
    ],
)
def test_a_damaged_megatron_pair_is_refused(
    name: str, at: int | None, data: bytes | int, says: str, tmp_path: Path
) -> None:
    write_megatron(tmp_path / "t", [IDS[:4], IDS[4:20], IDS[20:]])
    path = tmp_path / name
    if isinstance(data, int):
        path.write_bytes(path.read_bytes()[:-data])
    else:
        _spoil(path, at or 0, data)
    with pytest.raises(ConfigError, match=says):
        MappedTokens(open_megatron(tmp_path / "t"), vocab_size=99, cache=_cache(tmp_path))


def test_a_negative_id_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "t", [[1, 2, -1]], code=4, letter="i")
    with pytest.raises(ConfigError, match="holds token id -1, need 0 or more"):
        MappedTokens(open_megatron(tmp_path / "t"), vocab_size=99, cache=_cache(tmp_path))


def test_a_plain_file_is_looked_through_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    path.write_bytes(struct.pack("<30H", *IDS))
    looks = []
    summarise = mapped._summarise

    def look(found: TokenFile, out: Path) -> None:
        looks.append(found.path)
        summarise(found, out)

    monkeypatch.setattr(mapped, "_summarise", look)
    prints = [_tokens(path, dtype="uint16").fingerprint() for _ in range(3)]
    assert len(looks) == 1
    path.write_bytes(struct.pack("<31H", *IDS, 7))
    prints.append(_tokens(path, dtype="uint16").fingerprint())
    assert len(looks) == 2
    assert len(set(prints)) == 2
    assert len(list((tmp_path / "cache").glob("*.summary-*"))) == 1  # the old one is gone


def test_a_file_and_its_plain_form_and_its_megatron_form_yield_the_same_rows(
    tmp_path: Path,
) -> None:
    write_tokens(tmp_path / "with", [[IDS]], dtype="uint16")
    (tmp_path / "plain").write_bytes(struct.pack("<30H", *IDS))
    write_megatron(tmp_path / "pair", [IDS[:11], IDS[11:]])
    prints = set()
    for name, kind, dtype in (
        ("with", DataKind.TOKENS, None),
        ("plain", DataKind.TOKENS, TokenDtype.UINT16),
        ("pair", DataKind.MEGATRON, None),
    ):
        spec = DataSpec(seq_len=4, kind=kind, path=str(tmp_path / name), token_dtype=dtype)
        stream: TokenStream = open_stream(spec, vocab_size=40, seed=3, cache=_cache(tmp_path))
        rows = stream.rows(0, 14)
        assert sorted(rows.inputs[:7].tolist()) == [IDS[4 * n : 4 * n + 4] for n in range(7)]
        assert rows.targets.equal(rows.inputs + 1)
        prints.add(stream.fingerprint())
    assert len(prints) == 1
