"""What goes wrong in a run that a user starts: each is a clear error with a hint and an exit code, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chain import ROOT, argv, done, hetrun, plan_chain
from tests.ssh.lab import call

pytestmark = pytest.mark.ssh


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    plan_chain(folder, ROOT / "inventories" / "localhost.yaml", steps=400)
    return folder


MARK = "HETRUN_TEST_MARK"


def marked(mark: str) -> list[str]:
    """Return the command lines of processes that inherited the mark from a launch of ours."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(" ".join(process.cmdline()))
    return found


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark what this test starts, and fail if any of it is left at the end."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield mark
    monkeypatch.delenv(MARK)
    deadline_s = time.monotonic() + 20.0
    while left := marked(mark):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def test_full_disk_in_the_run_directory_is_named(planned: Path, tmp_path: Path, mark: str) -> None:
    small = tmp_path / "small"
    small.mkdir()
    call("mount", "-t", "tmpfs", "-o", "size=128k", "none", str(small))
    try:
        result = hetrun("launch", "--run-root", small, cwd=planned)
    finally:
        call("umount", "-l", str(small))
    assert result.returncode == 1, result.stderr
    assert "No space left on device" in result.stderr
    assert "hint:" in result.stderr
    assert "Traceback" not in result.stderr


def test_rank_that_raises_is_the_root_cause(planned: Path, mark: str) -> None:
    result = hetrun("launch", "--json", cwd=_with_env(planned, HETRUN_TEST_FAULT="raise:2:1"))
    assert result.returncode == 1, result.stderr
    outcome = json.loads(result.stdout)
    assert outcome["status"] == "failed"
    assert outcome["failures"][0]["rank"] == 2
    assert "rank 2" in result.stderr
    assert "logs/rank-0002.log" in result.stderr


def test_ctrl_c_stops_the_run_and_still_gives_a_report(planned: Path, mark: str) -> None:
    process = subprocess.Popen(
        argv("launch"),
        cwd=planned,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _wait_for_steps(process, planned)
        assert len(marked(mark)) > 4  # so that an empty answer means something
        os.killpg(process.pid, signal.SIGINT)
        _, talk = process.communicate(timeout=40)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 130, talk
    assert "Traceback" not in talk
    report = json.loads(done("report", "--json", cwd=planned).stdout)
    assert report["status"] == "interrupted"
    assert report["steps"] >= 1


def test_wrong_interpreter_is_a_preflight_error(planned: Path, tmp_path: Path, mark: str) -> None:
    plan = json.loads((planned / "plan.json").read_text())
    for host in plan["hosts"]:
        host["python"] = "/nowhere/python3"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    result = hetrun("launch", cwd=tmp_path)
    assert result.returncode == 3, result.stderr
    assert "/nowhere/python3" in result.stderr
    assert "hint:" in result.stderr


def _with_env(planned: Path, **env: str) -> Path:
    """Write a plan beside the good one whose ranks get these variables."""
    folder = planned / "with-env"
    folder.mkdir(exist_ok=True)
    plan = json.loads((planned / "plan.json").read_text())
    plan["recipe"]["launch"]["env"] = env
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def _wait_for_steps(process: subprocess.Popen[str], folder: Path) -> None:
    deadline_s = time.monotonic() + 40.0
    while time.monotonic() < deadline_s and process.poll() is None:
        for path in folder.glob("runs/*/events/rank-0000.jsonl"):
            if '"step"' in path.read_text() and not (path.parents[1] / "launch.json").exists():
                return
        time.sleep(0.1)
    raise AssertionError(f"no step within 40 s, exit code {process.poll()}")
