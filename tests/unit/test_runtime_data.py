"""Rows depend on the text and the seed, never on who asks for which of them."""

from __future__ import annotations

import sysconfig
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun.errors import ConfigError, StorageError
from hetrun.model import DataKind, DataSpec
from hetrun.runtime import data
from hetrun.runtime.data import TokenStream, open_stream, permuted, read_stdlib, read_text

TEXT = (b"the first document", b"and a second one, longer", b"x")


def _stream(
    documents: tuple[bytes, ...] = TEXT, *, seq_len: int = 5, vocab_size: int = 300, seed: int = 1
) -> TokenStream:
    return TokenStream(documents, seq_len=seq_len, vocab_size=vocab_size, seed=seed)


@given(st.integers(1, 70), st.text("ab", max_size=3))
def test_permutation_hits_every_place_once(size: int, key: str) -> None:
    assert sorted(permuted(n, size, key=key) for n in range(size)) == list(range(size))


def test_permutation_mixes() -> None:
    image = [permuted(n, 1000, key="k") for n in range(1000)]
    assert sum(place == n for n, place in enumerate(image)) < 20
    assert image != [permuted(n, 1000, key="other") for n in range(1000)]


@given(first=st.integers(0, 40), counts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_rows_do_not_depend_on_how_they_are_asked_for(first: int, counts: list[int]) -> None:
    stream = _stream()
    whole = stream.rows(first, sum(counts))
    start = 0
    for count in counts:
        part = stream.rows(first + start, count)
        assert part.inputs.equal(whole.inputs[start : start + count])
        assert part.targets.equal(whole.targets[start : start + count])
        start += count


def test_one_pass_predicts_every_token_once() -> None:
    stream = _stream()
    joined = b"".join(document + b"\xff" for document in TEXT)  # \xff stands for the separator
    tokens = [299 if byte == 255 else byte for byte in joined]
    assert stream.num_rows == (len(tokens) - 1) // 5
    rows = stream.rows(0, stream.num_rows)
    assert Counter(rows.targets.flatten().tolist()) == Counter(tokens[1 : 5 * stream.num_rows + 1])
    inputs = {tuple(row) for row in rows.inputs.tolist()}
    assert inputs == {tuple(tokens[5 * n : 5 * n + 5]) for n in range(stream.num_rows)}


def test_targets_are_the_inputs_one_later() -> None:
    rows = _stream().rows(0, 6)
    assert rows.inputs[:, 1:].equal(rows.targets[:, :-1])


def test_next_pass_has_another_order() -> None:
    stream = _stream((bytes(range(200)),))
    first = stream.rows(0, stream.num_rows).inputs
    second = stream.rows(stream.num_rows, stream.num_rows).inputs
    assert not first.equal(second)
    assert sorted(first.tolist()) == sorted(second.tolist())


def test_vocabulary_of_bytes_has_no_separator() -> None:
    stream = _stream(vocab_size=256)
    assert stream.num_rows == (sum(map(len, TEXT)) - 1) // 5
    assert int(stream.rows(0, stream.num_rows).targets.max()) < 256


def test_ragged_rows_count_their_valid_tokens() -> None:
    stream = TokenStream(TEXT, seq_len=5, vocab_size=256, seed=0, row_length=lambda row: row % 6)
    rows = stream.rows(2, 4)
    assert rows.valid.tolist() == [[1] * n + [0] * (5 - n) for n in (2, 3, 4, 5)]
    assert stream.num_valid_tokens(2, 4) == 14
    assert _stream().num_valid_tokens(2, 4) == 20


def test_fingerprint_tells_texts_cuts_and_seeds_apart() -> None:
    prints = {
        _stream().fingerprint(),
        _stream(seed=2).fingerprint(),
        _stream(seq_len=6).fingerprint(),
        _stream(vocab_size=256).fingerprint(),
        _stream((*TEXT, b"more")).fingerprint(),
        _stream((TEXT[0] + TEXT[1], TEXT[2])).fingerprint(),
    }
    assert len(prints) == 6
    assert _stream().fingerprint() in prints


def test_small_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size 255, need at least 256"):
        _stream(vocab_size=255)


@pytest.mark.parametrize("documents", [(), (b"12345",)])
def test_text_shorter_than_a_row_is_refused(documents: tuple[bytes, ...]) -> None:
    with pytest.raises(ConfigError, match=r"need at least seq_len \+ 1 = 7"):
        _stream(documents, seq_len=6)


def test_standard_library_is_read_in_one_order_up_to_a_limit() -> None:
    documents = read_stdlib()
    assert documents == read_stdlib()
    assert 1 << 20 < sum(map(len, documents)) <= data.STDLIB_BYTES
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "abc.py").read_bytes() in documents
    assert not any(path.read_bytes() in documents for path in root.glob("_sysconfigdata*.py"))


def test_folder_of_texts_is_read_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "d.md").write_text("no text")
    assert read_text(tmp_path) == [b"first", b"second"]
    assert read_text(tmp_path / "a.txt") == [b"first"]


def test_large_file_is_mapped_and_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(TEXT))
    spec = DataSpec(seq_len=5, kind=DataKind.TEXT, path=str(path))
    read = open_stream(spec, vocab_size=300, seed=3)
    monkeypatch.setattr(data, "_MAP_BYTES", 1)
    mapped = open_stream(spec, vocab_size=300, seed=3)
    assert not isinstance(read_text(path)[0], bytes)
    assert mapped.fingerprint() == read.fingerprint()
    assert mapped.rows(0, 9).inputs.equal(read.rows(0, 9).inputs)


def test_missing_text_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read"):
        read_text(tmp_path / "none.txt")
    with pytest.raises(StorageError, match="no text in"):
        read_text(tmp_path)


def test_recipe_without_a_text_trains_on_the_standard_library() -> None:
    stream = open_stream(DataSpec(seq_len=64), vocab_size=257, seed=0)
    assert stream.num_rows > 10_000
