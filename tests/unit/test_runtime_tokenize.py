"""Documents become the same ids however they are read, and a prepared file is whole or not there."""

from __future__ import annotations

import fcntl
import json
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetrun.errors import ConfigError, JobError, StorageError
from hetrun.model import DataKind, DataSpec
from hetrun.runtime import documents, tokenize
from hetrun.runtime.data import open_stream
from hetrun.runtime.documents import documents_of
from hetrun.runtime.mapped import MappedTokens
from hetrun.runtime.prepare import Cache, write_whole
from hetrun.runtime.token_file import open_tokens
from hetrun.runtime.tokenizer import open_tokenizer
from tests.unit.token_files import write_sentencepiece, write_tokenizer_json

ROSE = [1, 2, 3, 1, 2]  # "a rose is a rose" of token_files.WORDS


def _cache(folder: Path) -> Cache:
    return Cache(folder=folder / "cache", timeout_s=0.2)


def _ids(data: DataSpec, folder: Path, *, vocab_size: int = 300) -> list[int]:
    """Ids that a recipe's text becomes."""
    cache = _cache(folder)
    path = tokenize.cached_tokens(data, vocab_size=vocab_size, cache=cache)
    tokens = MappedTokens(open_tokens(path, dtype=None), vocab_size=vocab_size, cache=cache)
    ids: list[int] = tokens.tokens(0, tokens.num_tokens).tolist()
    return ids


def _jsonl(path: Path, *lines: object) -> DataSpec:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return DataSpec(seq_len=2, kind=DataKind.JSONL, path=str(path), field="text")


def _text(folder: Path, **texts: str) -> DataSpec:
    (folder / "texts").mkdir()
    for name, text in texts.items():
        (folder / "texts" / f"{name}.txt").write_text(text)
    return DataSpec(seq_len=2, kind=DataKind.TEXT, path=str(folder / "texts"))


def _with(data: DataSpec, tokenizer: Path, end_token: str | None = None) -> DataSpec:
    return DataSpec(
        seq_len=2, kind=data.kind, path=data.path, field=data.field,
        tokenizer=str(tokenizer), end_token=end_token,
    )  # fmt: skip


def test_each_json_line_is_a_document_of_bytes(tmp_path: Path) -> None:
    data = _jsonl(tmp_path / "d.jsonl", {"text": "ab", "id": 1}, "", {"text": ""}, {"text": "é"})
    assert _ids(data, tmp_path) == [97, 98, 299, 0xC3, 0xA9, 299]
    assert _ids(data, tmp_path, vocab_size=256) == [97, 98, 0xC3, 0xA9]


def test_a_folder_of_json_lines_is_read_in_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        _jsonl(tmp_path / f"{name}.jsonl", {"text": name})
    data = DataSpec(seq_len=2, kind=DataKind.JSONL, path=str(tmp_path), field="text")
    assert _ids(data, tmp_path, vocab_size=256) == [97, 98]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "cut', "line 2 is no JSON object of text"),
        ('{"body": "x"}', "line 2 has no field 'text'"),
        ('{"text": 7}', "line 2: field is no text"),
        ('["text"]', "line 2: is no JSON object"),
        ('{"text": "\\ud800"}', "line 2 is no JSON object of text"),
    ],
)
def test_a_wrong_line_is_named_and_leaves_nothing(line: str, says: str, tmp_path: Path) -> None:
    data = _jsonl(tmp_path / "d.jsonl", {"text": "fine"}, line)
    with pytest.raises(ConfigError, match=f"d.jsonl {says}"):
        _ids(data, tmp_path)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("aé€🌹\n"), size=st.integers(1, 5))
def test_pieces_never_cut_a_character(
    text: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", size)
    path = tmp_path / "t.txt"
    path.write_bytes(text.encode())
    data = DataSpec(seq_len=2, kind=DataKind.TEXT, path=str(path))
    ((source, pieces),) = documents_of(data, [path])
    assert source == path
    assert "".join(piece.decode() for piece in pieces) == text


def test_pieces_end_with_a_line_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 8)
    path = tmp_path / "t.txt"
    path.write_text("one two three\nfour\nfive six\nseven")
    data = DataSpec(seq_len=2, kind=DataKind.TEXT, path=str(path))
    ((_, pieces),) = documents_of(data, [path])
    assert list(pieces) == [b"one two three\n", b"four\nfive six\n", b"seven"]


def test_tokenizer_json_makes_the_ids_and_ends_each_document(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path / "tokenizer.json")
    data = _text(tmp_path, b="a red rose", a="a rose is a rose", c="", aa=" \n")  # two without ids
    data = _with(data, tmp_path / "tokenizer.json", "<end>")
    assert _ids(data, tmp_path) == [*ROSE, 0, 1, 4, 2, 0]


def test_sentencepiece_makes_the_ids_and_knows_its_end(tmp_path: Path) -> None:
    import sentencepiece

    path = write_sentencepiece(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    texts = ("a rose is a rose", "red")
    data = _jsonl(tmp_path / "d.jsonl", *({"text": text} for text in texts))
    first, second = (processor.encode(text) for text in texts)
    assert _ids(_with(data, path), tmp_path) == [*first, 2, *second, 2]
    assert _ids(_with(data, path, "<s>"), tmp_path) == [*first, 1, *second, 1]


def test_a_token_that_is_not_there_cannot_end_documents(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path / "tokenizer.json")
    paths = (tmp_path / "tokenizer.json", write_sentencepiece(tmp_path))
    for path in paths:
        with pytest.raises(ConfigError, match="has no token '<fin>'"):
            open_tokenizer(str(path), end_token="<fin>", vocab_size=300)


@pytest.mark.parametrize("name", ["tokenizer.json", "sp.model"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\x00"])
def test_a_damaged_tokenizer_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(StorageError, match="cannot read"):
        open_tokenizer(str(path), end_token="x", vocab_size=300)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} is no"):
        open_tokenizer(str(path), end_token="x", vocab_size=300)


@pytest.mark.parametrize(
    ("name", "package"), [("tokenizer.json", "tokenizers"), ("sp.model", "sentencepiece")]
)
def test_a_missing_package_is_named_with_the_way_out(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(JobError, match=f"needs the Python package `{package}`") as caught:
        open_tokenizer(str(tmp_path / name), end_token="x", vocab_size=300)
    assert "python -m hetrun.runtime.tokenize" in str(caught.value.hint)
    assert "kind: tokens" in str(caught.value.hint)


def test_a_vocabulary_too_small_for_the_text_is_refused(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path / "tokenizer.json")
    data = _with(_text(tmp_path, a="a red rose"), tmp_path / "tokenizer.json", "<end>")
    assert _ids(data, tmp_path, vocab_size=5) == [1, 4, 2, 0]
    with pytest.raises(ConfigError, match=r"token id 4, model\.vocab_size is 4"):
        _ids(data, tmp_path, vocab_size=4)


def test_text_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path / "tokenizer.json")
    data = _with(_text(tmp_path, a="fine"), tmp_path / "tokenizer.json", "<end>")
    (tmp_path / "texts" / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"b\.txt is not UTF-8"):
        _ids(data, tmp_path)


def test_changed_text_is_tokenised_anew_and_unchanged_text_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _text(tmp_path, a="aa", b="b")
    first = tokenize.cached_tokens(data, vocab_size=256, cache=_cache(tmp_path))
    with monkeypatch.context() as patch:
        patch.delattr(tokenize, "write_tokens")
        assert tokenize.cached_tokens(data, vocab_size=256, cache=_cache(tmp_path)) == first
    (tmp_path / "texts" / "c.txt").write_text("c")
    assert _ids(data, tmp_path, vocab_size=256) == [97, 97, 98, 99]
    assert not first.exists()


def test_a_stream_of_tokenised_text_needs_no_text_any_more(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path / "tokenizer.json")
    data = _with(_text(tmp_path, a="a rose is red " * 9), tmp_path / "tokenizer.json", "<end>")
    stream = open_stream(data, vocab_size=6, seed=0, cache=_cache(tmp_path))
    (tmp_path / "texts" / "a.txt").unlink()
    rows = stream.rows(0, stream.num_rows)
    assert sorted(rows.inputs.tolist()) == [[1, 2]] * 9 + [[3, 4]] * 9


# --- prepared files -----------------------------------------------------------------------------------------


def test_what_fails_or_dies_leaves_nothing_half_written(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise ConfigError("no")

    cache = _cache(tmp_path)
    with pytest.raises(ConfigError):
        cache.once("x", "1", fail)
    (cache.folder / ".x-1.4711.part").write_text("half, by a process that was killed")
    assert [path.suffix for path in cache.folder.glob("x-*")] == []

    def make(path: Path) -> None:
        path.write_text("whole")

    made = cache.once("x", "1", make)
    assert made.read_text() == "whole"
    assert sorted(path.name for path in cache.folder.iterdir()) == ["x-1", "x.lock"]
    with pytest.raises(ConfigError):
        write_whole(made, fail)
    assert made.read_text() == "whole"


def test_ranks_of_a_host_prepare_once(tmp_path: Path) -> None:
    made: list[int] = []
    start = threading.Barrier(4)

    def ask() -> None:
        start.wait()
        Cache(folder=tmp_path, timeout_s=5.0).once("x", "1", make)

    def make(path: Path) -> None:
        made.append(1)
        path.write_text("x")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert made == [1]


def test_waiting_for_another_rank_has_an_end(tmp_path: Path) -> None:
    with (tmp_path / "x.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(JobError, match=r"another process has been preparing .*/x for 0 s") as e:
            Cache(folder=tmp_path, timeout_s=0.1).once("x", "1", Path.touch)
    assert "launch.start_timeout_s" in str(e.value.hint)


def test_a_cache_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write to"):
        Cache(folder=tmp_path / "file" / "data", timeout_s=0.1).once("x", "1", Path.touch)


# --- by hand ------------------------------------------------------------------------------------------------


def test_by_hand_it_writes_what_a_job_would(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path / "tokenizer.json")
    data = _text(tmp_path, a="a rose is a rose", b="red")
    data = _with(data, tmp_path / "tokenizer.json", "<end>")
    arguments = [
        "--path",
        str(data.path),
        "--tokenizer",
        str(data.tokenizer),
        "--end-token",
        "<end>",
    ]
    assert tokenize.main([str(tmp_path / "out.bin"), *arguments]) == 0
    spec = DataSpec(seq_len=2, kind=DataKind.TOKENS, path=str(tmp_path / "out.bin"))
    streams = [open_stream(s, vocab_size=6, seed=0, cache=_cache(tmp_path)) for s in (data, spec)]
    assert streams[0].fingerprint() == streams[1].fingerprint()


def test_by_hand_a_failure_leaves_no_file(tmp_path: Path) -> None:
    _jsonl(tmp_path / "d.jsonl", {"text": "x"}, "nonsense")
    arguments = ["--path", str(tmp_path / "d.jsonl"), "--kind", "jsonl"]
    assert tokenize.main([str(tmp_path / "out"), *arguments, "--field", "text"]) == 1
    with pytest.raises(SystemExit) as left:  # no field
        tokenize.main([str(tmp_path / "out"), *arguments])
    assert left.value.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]
