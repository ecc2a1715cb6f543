"""Jobs on this machine without any SSH: the same guard, the same launch."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.errors import HangError, JobError, PreflightError
from hetrun.launch import launch
from hetrun.launch.monitor import Monitor
from hetrun.model import Connection, DataKind, DataSpec, HostSpec, RunOutcome
from hetrun.store import load
from hetrun.transport.bundle import build_bundle
from hetrun.transport.connect import open_transport
from hetrun.transport.jobs import run_module
from hetrun.transport.local import LocalTransport
from hetrun.transport.script import run_script
from tests.ssh.lab import descendants
from tests.ssh.plans import FAKE, Recorder, fake_env, make_plan

pytestmark = pytest.mark.dist

MODULE = b"""
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
wish = (folder / "wish").read_text()
if wish == "fail":
    print("nothing works"); raise ValueError("bad wish")
if wish == "hang":
    subprocess.Popen(["sleep", "600"], start_new_session=True); time.sleep(600)
(folder / "out" / "answer").write_text(wish + " " + os.environ["GREETING"])
"""
BUNDLE = build_bundle({"hetrun_wish.py": MODULE})


@pytest.fixture
def before() -> set[int]:
    """Processes of the lab, if other tests started it."""
    return set(descendants(os.getpid()))


@pytest.fixture
def spec(tmp_path: Path) -> HostSpec:
    return HostSpec(
        name="me",
        connection=Connection.LOCAL,
        python=sys.executable,
        work_dir=str(tmp_path),
        env={"GREETING": "hello $(id) 'x'"},
    )


def _wish(spec: HostSpec, wish: str, timeout_s: float = 20.0) -> dict[str, bytes]:
    transport = open_transport(spec)
    try:
        files = {"wish": wish.encode()}
        return run_module(transport, "hetrun_wish", files, timeout_s=timeout_s, bundle=BUNDLE)
    finally:
        transport.close()


def _jobs(spec: HostSpec) -> list[Path]:
    return list((Path(spec.work_dir or "") / f"hetrun-{os.getuid()}" / "jobs").iterdir())


def test_a_module_gets_its_files_and_its_answer_comes_back(
    spec: HostSpec, before: set[int]
) -> None:
    assert _wish(spec, "rain") == {"answer": b"rain hello $(id) 'x'"}
    assert _jobs(spec) == []
    assert descendants(os.getpid()).keys() <= before


def test_a_module_that_fails_is_an_error_with_its_last_lines(spec: HostSpec) -> None:
    with pytest.raises(JobError) as caught:
        _wish(spec, "fail")
    assert caught.value.message.startswith("hetrun_wish ended with exit code 1:\n  nothing works")
    assert caught.value.message.endswith("ValueError: bad wish")


def test_a_module_that_hangs_is_ended_with_its_children(spec: HostSpec, before: set[int]) -> None:
    with pytest.raises(HangError, match="did not finish within 2 s"):
        _wish(spec, "hang", timeout_s=2.0)
    assert descendants(os.getpid()).keys() <= before


def test_a_changed_bundle_is_sent_again(spec: HostSpec) -> None:
    _wish(spec, "rain")
    (path,) = (Path(spec.work_dir or "") / f"hetrun-{os.getuid()}" / "bundles").iterdir()
    path.write_bytes(b"evil")
    assert _wish(spec, "sun") == {"answer": b"sun hello $(id) 'x'"}


def test_an_open_work_dir_is_refused(spec: HostSpec, tmp_path: Path) -> None:
    (tmp_path / f"hetrun-{os.getuid()}").mkdir(mode=0o700)
    (tmp_path / f"hetrun-{os.getuid()}").chmod(0o777)
    with pytest.raises(PreflightError, match="not a private folder") as caught:
        _wish(spec, "rain")
    assert "work_dir" in (caught.value.hint or "")


def test_scripts_run_here_and_a_hanging_one_is_killed(spec: HostSpec, before: set[int]) -> None:
    transport = LocalTransport(spec)
    result = run_script(transport, "echo out; echo err >&2; cat; exit 3", timeout_s=10)
    assert (result.rc, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    started_s = time.monotonic()
    with pytest.raises(Exception, match="did not finish within 1 s"):
        run_script(transport, "sleep 600", timeout_s=1)
    assert time.monotonic() - started_s < 40  # 1 s on an idle machine, and the sleep is longer
    assert descendants(os.getpid()).keys() <= before


def test_a_launch_on_this_machine_alone_needs_no_address(
    spec: HostSpec, before: set[int], tmp_path: Path
) -> None:
    recorder = Recorder()
    plan = make_plan([(spec, 2)], env=fake_env(tmp_path / "meet"))
    outcome = launch(
        plan, run_root=tmp_path / "runs", observer=recorder, environ=os.environ, code=FAKE
    )
    assert (outcome.status, outcome.exit_code) == ("done", 0)
    assert [event.event for event in recorder.events].count("step") == 10
    assert any("127.0.0.1 on lo" in text for _, text in recorder.status)
    assert descendants(os.getpid()).keys() <= before


def test_a_text_that_a_host_lacks_stops_the_launch_before_any_rank(
    spec: HostSpec, tmp_path: Path
) -> None:
    plan = make_plan([(spec, 2)], env=fake_env(tmp_path / "meet"))
    data = DataSpec(seq_len=16, kind=DataKind.TEXT, path=str(tmp_path / "absent.txt"))
    plan = replace(plan, recipe=replace(plan.recipe, data=data))
    recorder = Recorder()
    with pytest.raises(PreflightError, match=r"me: cannot read .*absent\.txt: No such file"):
        launch(plan, run_root=tmp_path / "runs", observer=recorder, environ=os.environ, code=FAKE)
    assert recorder.events == []


def test_a_bug_of_ours_still_leaves_an_outcome(
    spec: HostSpec, before: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(Monitor, "on_clock", broken)
    plan = make_plan([(spec, 1)], env=fake_env(tmp_path / "meet"))
    with pytest.raises(RuntimeError, match="no such thing"):
        launch(plan, run_root=tmp_path / "runs", observer=Recorder(), environ=os.environ, code=FAKE)
    (run_dir,) = (tmp_path / "runs").iterdir()
    outcome = load(RunOutcome, run_dir / "launch.json")
    assert (outcome.status, outcome.exit_code) == ("failed", 9)
    assert outcome.warnings == ("a bug in hetrun ended this run: RuntimeError: no such thing",)
    assert descendants(os.getpid()).keys() <= before
