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
from hetrun.runtime import data, documents
from hetrun.runtime.data import ByteText, TokenStream, open_stream, permuted
from hetrun.runtime.documents import list_files, read_files, read_stdlib
from hetrun.runtime.prepare import Cache

TEXT = (b"the first document", b"and a second one, longer", b"x")


def _stream(
    documents: tuple[bytes, ...] = TEXT,
    *,
    seq_len: int = 5,
    vocab_size: int = 300,
    seed: int = 1,
    held_out_rows: int = 0,
) -> TokenStream:
    text = ByteText(documents, vocab_size=vocab_size)
    return TokenStream(text, seq_len=seq_len, seed=seed, held_out_rows=held_out_rows)


def _opened(spec: DataSpec, folder: Path, *, vocab_size: int = 300, seed: int = 3) -> TokenStream:
    cache = Cache(folder=folder / "cache", timeout_s=5.0)
    return open_stream(spec, vocab_size=vocab_size, seed=seed, cache=cache)


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
    text = ByteText(TEXT, vocab_size=256)
    stream = TokenStream(text, seq_len=5, seed=0, row_length=lambda row: row % 6)
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
    read = read_stdlib()
    assert read == read_stdlib()
    assert 1 << 20 < sum(map(len, read)) <= documents.STDLIB_BYTES
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "abc.py").read_bytes() in read
    assert not any(path.read_bytes() in read for path in root.glob("_sysconfigdata*.py"))


def test_folder_of_texts_is_read_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "d.md").write_text("no text")
    for path, texts in ((tmp_path, [b"first", b"second"]), (tmp_path / "a.txt", [b"first"])):
        spec = DataSpec(seq_len=5, kind=DataKind.TEXT, path=str(path))
        assert read_files(list_files(spec)) == texts


def test_large_text_is_packed_into_a_file_and_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    for number, text in enumerate((*TEXT, b"", b"\xff\x80 no UTF-8")):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(text)
    spec = DataSpec(seq_len=5, kind=DataKind.TEXT, path=str(tmp_path / "texts"), held_out_rows=2)
    for vocab_size in (256, 300):
        monkeypatch.setattr(data, "MAX_BYTES_IN_MEMORY", 1 << 20)
        read = _opened(spec, tmp_path, vocab_size=vocab_size)
        assert not (tmp_path / "cache").exists() or vocab_size == 300
        monkeypatch.setattr(data, "MAX_BYTES_IN_MEMORY", 1)
        packed = _opened(spec, tmp_path, vocab_size=vocab_size)
        assert packed.num_rows == read.num_rows
        assert packed.rows(0, 30).inputs.equal(read.rows(0, 30).inputs)
        assert packed.rows(0, 30).targets.equal(read.rows(0, 30).targets)
        assert packed.held_out(0, 2).inputs.equal(read.held_out(0, 2).inputs)


def test_missing_text_is_a_storage_error(tmp_path: Path) -> None:
    for name, says in (("none.txt", "cannot read .*none.txt"), ("", "no text in")):
        spec = DataSpec(seq_len=5, kind=DataKind.TEXT, path=str(tmp_path / name))
        with pytest.raises(StorageError, match=says):
            _opened(spec, tmp_path)


@given(
    batch=st.integers(1, 7),
    other_batch=st.integers(1, 7),
    held_out_rows=st.integers(0, 3),
    seed=st.integers(0, 3),
)
def test_a_new_plan_repeats_and_skips_nothing(
    batch: int, other_batch: int, held_out_rows: int, seed: int
) -> None:
    """Steps of one plan's batches, then of another's: together each pass has each row once, none held out."""
    stream = _stream((bytes(range(200)),), seed=seed, held_out_rows=held_out_rows)
    assert stream.num_rows == 40 - held_out_rows
    taken: list[list[int]] = []
    for size, end in ((batch, 50), (other_batch, 2 * stream.num_rows)):
        while len(taken) < end:
            taken += stream.rows(len(taken), size).targets.tolist()
    held_out = stream.held_out(0, held_out_rows).targets.tolist() if held_out_rows else []
    for start in (0, stream.num_rows):
        one_pass = taken[start : start + stream.num_rows]
        assert len({tuple(row) for row in one_pass}) == stream.num_rows
        assert not [row for row in one_pass if row in held_out]


def test_held_out_rows_are_the_last_of_the_text_whatever_the_seed() -> None:
    stream = _stream((bytes(range(101)),), vocab_size=256, held_out_rows=3)
    rows = stream.held_out(0, 5)
    assert rows.inputs[:, 0].tolist() == [85, 90, 95, 95, 95]
    assert rows.targets[:, 4].tolist() == [90, 95, 100, 100, 100]
    assert rows.valid.sum(1).tolist() == [5, 5, 5, 0, 0]
    other = _stream((bytes(range(101)),), vocab_size=256, held_out_rows=3, seed=8)
    assert other.held_out(0, 5).inputs.equal(rows.inputs)


def test_text_with_no_row_left_to_train_on_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"need at least \(held_out_rows \+ 1\) \* seq_len \+ 1 = 106"
    ):
        _stream((bytes(101),), vocab_size=256, held_out_rows=20)


def test_recipe_without_a_text_trains_on_the_standard_library(tmp_path: Path) -> None:
    stream = _opened(DataSpec(seq_len=64), tmp_path, vocab_size=257)
    assert stream.num_rows > 10_000
