"""A closed or full stdout is an error in words; a closed or full stderr stops nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetrun.cli import render
from hetrun.cli.streams import no_stdout
from hetrun.errors import StorageError
from tests.unit import report_factory

pytestmark = pytest.mark.slow


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return report_factory.write_run(tmp_path / "run", report_factory.make_plan(), outcome=None)


def _report(run_dir: Path, redirect: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -m hetrun report "$1" --json {redirect}', sys.executable, run_dir],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize(
    ("redirect", "words"),
    [(">&-", "stdout is closed"), (">/dev/full", "No space left on device")],
)
def test_data_that_cannot_be_written_is_an_error(run_dir: Path, redirect: str, words: str) -> None:
    done = _report(run_dir, redirect)
    assert done.returncode == 1
    assert words in done.stderr
    assert "hint: " in done.stderr
    assert "bug in hetrun" not in done.stderr


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", "<&- 2>&-"])
def test_talk_that_nobody_can_read_stops_nothing(run_dir: Path, redirect: str) -> None:
    done = _report(run_dir, redirect)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("{")


@pytest.mark.parametrize(
    ("status", "as_json"), [("failed", True), ("failed", False), ("done", False)]
)
def test_the_end_of_a_run_counts_for_more_than_a_closed_stdout(
    monkeypatch: pytest.MonkeyPatch, status: str, as_json: bool
) -> None:
    outcome = report_factory.make_outcome(report_factory.make_plan(), status)
    monkeypatch.setattr("sys.stdout", None)
    render.show_outcome(outcome, Path("runs/x"), as_json=as_json)


def test_an_outcome_that_was_asked_for_and_is_lost_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome = report_factory.make_outcome(report_factory.make_plan())
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(StorageError, match="stdout is closed"):
        render.show_outcome(outcome, Path("runs/x"), as_json=True)


def test_a_reader_that_leaves_ends_the_command_without_a_word(run_dir: Path) -> None:
    command = 'exec 3>&1; { sleep 1; "$0" -m hetrun report "$1" --json; echo $? >&3; } | exec true'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, run_dir],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_ctrl_c_says_what_was_stopped_and_leaves_nothing(tmp_path: Path) -> None:
    stub = tmp_path / "python-stub"
    stub.write_text("#!/bin/sh\ntrap '' TERM INT\nsleep 777\nsleep 778\n")
    stub.chmod(0o755)
    inventory = tmp_path / "here.yaml"
    inventory.write_text(f"hosts:\n  a: {{ connection: local, python: {stub} }}\n")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hetrun",
            "probe",
            str(inventory),
            "-o",
            str(tmp_path / "facts.json"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline_s = time.monotonic() + 30
    while not _running(str(stub)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    interrupted_s = time.monotonic()
    _, said = process.communicate(timeout=20)
    took_s = time.monotonic() - interrupted_s
    assert process.returncode == 130
    assert "probe interrupted at 0 of 1 hosts" in said
    assert not (tmp_path / "facts.json").exists()
    assert not _running(str(stub))
    assert took_s < 5.0  # below 2 s on an idle machine


def _running(word: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                if line.startswith(f"/bin/sh {word}"):
                    found.append(line)
    return found


def test_what_libraries_write_below_python_is_no_data(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, b"before ")
    with no_stdout():
        os.write(1, b"announced by a solver")
    os.write(1, b"after")
    assert capfd.readouterr().out == "before after"
