"""The run's folder and the lines in it."""

from __future__ import annotations

import errno
from datetime import datetime, timezone
from pathlib import Path

import pytest

from hetrun import store
from hetrun.errors import StorageError
from hetrun.launch.rundir import Lines, RunDir, clean_line
from hetrun.model import Failure, RunOutcome

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def _outcome(what: str = "x") -> RunOutcome:
    failure = Failure(host="a1", rank=0, when_s=1.0, what=what)
    return RunOutcome(
        run_id="r",
        plan_sha="0",
        started="2030-01-01T00:00:00+00:00",
        wall_s=1.0,
        exit_code=1,
        status="failed",
        failures=(failure,),
    )


def test_runs_of_one_second_get_names_of_their_own(tmp_path: Path) -> None:
    names = [RunDir(tmp_path / "runs", "tiny", NOW, ()).run_id for _ in range(3)]
    assert names == ["20300102-030405-tiny", "20300102-030405-tiny-2", "20300102-030405-tiny-3"]
    assert (tmp_path / "runs" / names[0]).stat().st_mode & 0o777 == 0o700


def test_a_run_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match="runs: File exists"):
        RunDir(tmp_path / "runs", "tiny", NOW, ())


def test_appended_lines_are_there_at_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "tiny", NOW, ())
    run.append("logs/rank-0000.log", b"one")
    run.append("logs/rank-0000.log", b"two")
    assert (run.path / "logs/rank-0000.log").read_bytes() == b"one\ntwo\n"
    run.finish(_outcome())


def test_a_log_ends_at_its_limit_and_says_so(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "tiny", NOW, ())
    for _ in range(5):
        run.append("all.log", b"1234567", limit=20)
    run.close()
    lines = (run.path / "all.log").read_text().splitlines()
    assert lines == ["1234567", "1234567", "[hetrun: this log ends here, it is full]"]


def test_the_outcome_fits_on_a_disk_that_is_full_but_for_the_reserve(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "tiny", NOW, ())
    reserve = run.path / ".reserve"
    assert reserve.stat().st_blocks * 512 >= 1 << 18
    run.finish(_outcome())
    assert not reserve.exists()
    assert store.load(RunOutcome, run.path / "launch.json") == _outcome()


def test_a_write_that_fails_is_a_storage_error_with_a_way_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "tiny", NOW, ())
    (run.path / "all.log").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="No space left on device") as caught:
        run.append("all.log", b"x")
    assert caught.value.__cause__.errno == errno.ENOSPC  # type: ignore[union-attr]
    assert "--run-root" in (caught.value.hint or "")
    run.finish(_outcome())


def test_secrets_are_hidden_also_inside_json(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "tiny", NOW, ['pa"ss-word', "abc"])
    assert run.hide(b'it is pa"ss-word') == b"it is ***"
    assert run.hide(b'{"m": "pa\\"ss-word"}') == b'{"m": "***"}'
    assert run.hide(b"abcdef") == b"abcdef"
    run.finish(_outcome('raised E: pa"ss-word'))
    assert store.load(RunOutcome, run.path / "launch.json").failures[0].what == "raised E: ***"


def test_terminal_escapes_and_controls_are_taken_out() -> None:
    assert clean_line(b"\x1b[31mred\x1b[0m\x1b]0;title\x07 \x00\x08ok\r\n") == "red ok"
    assert clean_line(b"10 %\r20 %\r30 %") == "30 %"
    assert clean_line("tab\tumlaut ä\u202etxt.exe".encode()) == "tab\tumlaut ätxt.exe"
    assert clean_line(b"\xff") == "�"
    assert clean_line(b"x" * 100_000).endswith(" [cut]")


def test_lines_are_never_torn_and_an_endless_one_is_cut() -> None:
    lines = Lines(max_bytes=8)
    assert lines.feed(b"one\ntw") == [b"one"]
    assert lines.feed(b"o\n") == [b"two"]
    assert lines.feed(b"123456789") == [b"123456789"]
    assert lines.feed(b"rest") == []
    assert lines.flush() == [b"rest"]
    assert lines.flush() == []
