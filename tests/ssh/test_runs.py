"""Runs after they were launched: listed, read, stopped, and cleaned up after a controller that died."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetrun import store
from hetrun.cli.app import app
from hetrun.errors import ConfigError, PreflightError
from hetrun.launch import runs
from hetrun.model import CheckpointSpec, Plan, RunOutcome
from tests.ssh.controller_process import Start
from tests.ssh.lab import Lab
from tests.ssh.launches import GONE_S, Hosts, job_folders, lab_plan, run_dir
from tests.ssh.plans import make_plan

pytestmark = pytest.mark.ssh
LONG = {"HETRUN_FAKE_STEPS": "500", "HETRUN_FAKE_SAVE_EVERY": "400"}


def test_a_run_is_listed_read_and_stopped_in_order(
    hosts: Hosts, tmp_path: Path, start: Start
) -> None:
    checkpoint = CheckpointSpec(dir="/tmp/hetrun-not-used", every_steps=400)
    plan = lab_plan(hosts, tmp_path / "meet", env=LONG, checkpoint=checkpoint)
    controller = start(plan, tmp_path)
    controller.wait_for("event step 0")
    folder, root = run_dir(tmp_path), ["--run-root", str(tmp_path / "runs")]
    state = runs.state(folder)
    assert (state.status, state.pid) == ("running", controller.process.pid)
    assert state.step is not None
    listed = CliRunner().invoke(app, ["ps", *root]).stdout
    assert f"{folder.name}  running, process {controller.process.pid}, step " in listed
    read = CliRunner().invoke(app, ["logs", folder.name, "--rank", "3", *root]).stdout
    assert read == "rank 3 on h2 is up\ngoes on at step 0\n"
    with pytest.raises(ConfigError, match="goes on"):
        runs.clean(folder, done=lambda host, words: None)
    stopped = CliRunner().invoke(app, ["stop", folder.name, *root])
    assert (stopped.exit_code, controller.process.wait(timeout=GONE_S)) == (0, 143)
    for host in hosts:
        host.wait_empty(0.5)
    assert (tmp_path / "meet/saved").exists()
    assert runs.state(folder).status == "interrupted"
    again = CliRunner().invoke(app, ["stop", folder.name, *root])
    assert "has ended: interrupted" in str(again.exception)


def test_what_a_dead_controller_left_is_ended_and_nothing_else(
    hosts: Hosts, tmp_path: Path, start: Start
) -> None:
    other = start(lab_plan(hosts, tmp_path / "meet2", env=LONG), tmp_path / "other")
    other.wait_for("event step 3")
    others = set(hosts[1].processes())
    controller = start(lab_plan(hosts, tmp_path / "meet", env=LONG), tmp_path / "dead")
    controller.wait_for("event step 3")
    folder = run_dir(tmp_path / "dead")
    # All that could see the controller's death is asleep, as on a host that hangs.
    mine = set(hosts[1].processes()) - others
    guard = next(pid for pid, line in hosts[1].processes().items() if pid in mine and "-I" in line)
    os.kill(guard, signal.SIGSTOP)
    controller.process.kill()
    controller.process.wait(timeout=GONE_S)
    assert runs.state(folder).status == "controller gone"
    found = {left.host: left for left in runs.clean(folder, done=lambda host, words: None)}
    assert runs.clean_code(tuple(found.values())) == 0
    assert [name.startswith(folder.name) for name in found["h2"].ended] == [True]
    assert not mine & set(hosts[1].processes())
    assert others <= set(hosts[1].processes())
    (jobs,) = (path for path in job_folders(hosts[1]) if path.name.startswith(folder.name + "-"))
    assert not (jobs / "env").exists()
    other.wait_for("event step 3")
    other.process.send_signal(signal.SIGINT)
    assert other.process.wait(timeout=GONE_S) == 130


def test_a_run_on_a_host_of_its_own_needs_this_machine_no_more(
    lab: Lab, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host has hetrun, and keys of its own for the second one; ranks are real."""
    home = hosts[0].folder / "home"
    (home / ".ssh").mkdir(exist_ok=True)
    (home / ".ssh/config").write_text(
        f"IdentityFile {lab.folder}/id\nUserKnownHostsFile {lab.folder}/known_hosts\n"
    )
    monkeypatch.setenv("FAKE_SECRET", "tok en-$(51)")
    counts = [(host.spec(), 1) for host in hosts[:2]]
    plan = make_plan(counts, start_timeout_s=120.0, secrets=("FAKE_SECRET",))
    store.save(plan, tmp_path / "plan.json")
    before = set((home / "runs").glob("*"))
    root = ["--run-root", str(tmp_path / "runs")]
    found = CliRunner().invoke(app, ["launch", str(tmp_path / "plan.json"), "--on", "h1", *root])
    assert found.exit_code == 0, found.output
    (run,) = set((home / "runs").glob("*")) - before
    assert found.stdout == f"{tmp_path}/runs/{run.name}\n"
    assert f"h1: runs on its own: hetrun attach {run.name}" in found.stderr
    assert f"{run.name}  on h1, " in CliRunner().invoke(app, ["ps", *root]).stdout
    deadline_s = time.monotonic() + GONE_S
    while any(line.startswith("sshd: ") for line in hosts[0].processes().values()):
        assert time.monotonic() < deadline_s, "a connection to the host stays open"
        time.sleep(0.05)
    assert not (run / "launch.json").exists()  # it goes on with nobody connected
    found = CliRunner().invoke(app, ["attach", run.name, *root])
    assert (found.exit_code, found.stdout) == (0, f"runs/{run.name}\n"), found.output
    assert "done after " in found.stderr
    read = CliRunner().invoke(app, ["logs", run.name, "--rank", "7", *root])
    assert (read.exit_code, "this run has ranks 0 to 1" in read.stderr) == (2, True)
    specs = store.load(Plan, run / "plan.json").hosts
    assert [spec.connection.value for spec in specs] == ["local", "ssh"]
    for host in hosts:
        host.wait_empty(GONE_S)
    assert store.load(RunOutcome, run / "launch.json").status == "done"
    texts = [path.read_text() for path in run.rglob("*") if path.is_file()]
    assert not [text for text in texts if "tok en" in text]


@pytest.mark.parametrize(
    ("python", "what"),
    [("/bin/false", "hetrun is not there"), ("/bin/echo", "it has -m hetrun --version, this is")],
)
def test_a_host_without_this_hetrun_controls_no_run(
    hosts: Hosts, tmp_path: Path, python: str, what: str
) -> None:
    store.save(make_plan([(hosts[0].spec(python=python), 1)]), tmp_path / "plan.json")
    found = CliRunner().invoke(app, ["launch", str(tmp_path / "plan.json"), "--on", "h1"])
    assert isinstance(found.exception, PreflightError)
    assert (found.exception.host, what in found.exception.message) == ("h1", True)
    hosts[0].wait_empty(2.0)
