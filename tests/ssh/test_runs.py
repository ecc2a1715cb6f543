"""Runs after they were launched: listed, read, stopped, and cleaned up after a controller that died."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetrun.cli.app import app
from hetrun.errors import ConfigError
from hetrun.launch import runs
from hetrun.model import CheckpointSpec
from tests.ssh.controller_process import Start
from tests.ssh.launches import GONE_S, Hosts, job_folders, lab_plan, run_dir

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
