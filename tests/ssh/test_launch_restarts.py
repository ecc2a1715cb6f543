"""A run with checkpoints survives: it is saved when it is stopped, and started again when it fails."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hetrun import store
from hetrun.model import CheckpointSpec, Plan, RunOutcome
from tests.ssh.controller_process import Start
from tests.ssh.launches import GONE_S, Hosts, job_pids, lab_plan, launch_fake, run_dir
from tests.ssh.plans import Recorder

pytestmark = pytest.mark.ssh
SAVES = {"HETRUN_FAKE_SAVE_EVERY": "2", "HETRUN_FAKE_BEATS": "1"}
LONG = {**SAVES, "HETRUN_FAKE_STEPS": "500"}


def saving_plan(hosts: Hosts, meet: Path, fault: str = "", **launch: Any) -> Plan:
    checkpoint = CheckpointSpec(dir="/tmp/hetrun-not-used", every_steps=2)
    return lab_plan(hosts, meet, fault, checkpoint=checkpoint, **{"env": SAVES, **launch})


def test_a_first_signal_saves_a_checkpoint_with_a_countdown(
    hosts: Hosts, tmp_path: Path, start: Start
) -> None:
    long_saves = {**LONG, "HETRUN_FAKE_SAVE_EVERY": "400"}
    controller = start(saving_plan(hosts, tmp_path / "meet", env=long_saves))
    controller.wait_for("event step 3")
    controller.process.send_signal(signal.SIGTERM)
    controller.wait_for(
        "saving a checkpoint, stopping in 60 s at the latest; again to stop at once"
    )
    assert controller.process.wait(timeout=GONE_S) == 143
    for host in hosts:
        host.wait_empty(0.5)
    steps = [
        json.loads(line)["step"]
        for rank in range(4)
        for line in (run_dir(tmp_path) / f"events/rank-{rank:04}.jsonl").read_text().splitlines()
        if json.loads(line)["event"] == "checkpoint"
    ]
    assert len(steps) == 4
    assert set(steps) == {int((tmp_path / "meet/saved").read_text())}
    assert (controller.outcome().status, controller.outcome().failures) == ("interrupted", ())


@pytest.mark.bench  # `make chaos`
def test_who_does_not_save_in_time_is_ended(hosts: Hosts, tmp_path: Path, start: Start) -> None:
    plan = saving_plan(hosts, tmp_path / "meet", "hang:1:2", env=LONG, save_grace_s=2.0)
    controller = start(plan)
    controller.wait_for("event step 3")
    time.sleep(0.5)
    controller.process.send_signal(signal.SIGINT)
    assert controller.process.wait(timeout=GONE_S) == 130
    for host in hosts:
        host.wait_empty(0.5)


def test_a_second_signal_does_not_wait_for_a_save(
    hosts: Hosts, tmp_path: Path, start: Start
) -> None:
    plan = saving_plan(hosts, tmp_path / "meet", "hang:1:2", env=LONG, save_grace_s=300.0)
    controller = start(plan)
    controller.wait_for("event step 3")
    controller.process.send_signal(signal.SIGINT)
    controller.wait_for("saving a checkpoint")
    controller.process.send_signal(signal.SIGINT)
    assert controller.process.wait(timeout=GONE_S) == 130
    for host in hosts:
        host.wait_empty(0.5)


def test_a_third_signal_leaves_hosts_alone_and_names_them(
    hosts: Hosts, tmp_path: Path, start: Start
) -> None:
    controller = start(lab_plan(hosts, tmp_path / "meet", env=LONG))
    controller.wait_for("event step 3")
    pid = job_pids(hosts[1])["guard"]
    os.kill(pid, signal.SIGSTOP)  # this host will confirm nothing
    for text in ("stopping", "stopping"):
        controller.process.send_signal(signal.SIGINT)
        if text:
            time.sleep(0.5)
    controller.process.send_signal(signal.SIGINT)
    controller.wait_for("status h2 left alone")
    assert controller.process.wait(timeout=GONE_S) == 8
    assert controller.outcome().not_clean == ("h2",)
    os.kill(pid, signal.SIGCONT)
    for host in hosts:
        host.wait_empty(GONE_S)


def test_a_killed_rank_costs_a_restart_from_the_newest_checkpoint(
    hosts: Hosts, tmp_path: Path
) -> None:
    recorder = Recorder()
    outcome = launch_fake(saving_plan(hosts, tmp_path / "meet", "kill:3:3"), tmp_path, recorder)
    assert (outcome.status, outcome.exit_code, outcome.failures) == ("done", 0, ())
    (restart,) = outcome.restarts
    assert restart.failure is not None
    assert (restart.failure.host, restart.failure.rank) == ("h2", 3)
    assert (restart.number, restart.exit_code, restart.checkpoint_step) == (1, 1, 2)
    assert ("h1", 0, "goes on at step 2") in recorder.lines
    folder = run_dir(tmp_path)
    assert store.load(RunOutcome, folder / "launch.json") == outcome
    assert store.load(RunOutcome, folder / "attempts/1/launch.json").exit_code == 1
    ports = [text for _, text in recorder.status if "restart 1 of 3 from the checkpoint" in text]
    assert len(ports) == 1


@pytest.mark.bench  # `make chaos`: the decision itself is tested in tests/unit
def test_no_new_checkpoint_since_the_last_restart_ends_the_run(
    hosts: Hosts, tmp_path: Path
) -> None:
    outcome = launch_fake(saving_plan(hosts, tmp_path / "meet", "kill:1:1:*"), tmp_path)
    assert (outcome.exit_code, outcome.status, len(outcome.restarts)) == (7, "no progress", 1)
    assert outcome.failures[0].rank == 1


@pytest.mark.bench  # `make chaos`: the decision itself is tested in tests/unit
def test_the_same_error_in_the_same_step_is_not_tried_a_third_time(
    hosts: Hosts, tmp_path: Path
) -> None:
    outcome = launch_fake(saving_plan(hosts, tmp_path / "meet", "raise:2:3:*"), tmp_path)
    assert (outcome.exit_code, outcome.status, len(outcome.restarts)) == (1, "failed", 1)
    assert any("the same error in the same step" in warning for warning in outcome.warnings)


def test_a_hang_is_named_by_the_step_of_its_heartbeat(hosts: Hosts, tmp_path: Path) -> None:
    plan = lab_plan(hosts, tmp_path / "meet", "hang:2:3", env=SAVES, step_timeout_s=4.0)
    outcome = launch_fake(plan, tmp_path)
    assert outcome.exit_code == 6
    assert (outcome.failures[0].host, outcome.failures[0].rank) == ("h1", 2)
    assert outcome.failures[0].what.startswith("hangs in step 3: nothing for 4 s")
    for rank in range(4):
        log = (run_dir(tmp_path) / f"logs/rank-{rank:04}.log").read_text()
        assert "most recent call first" in log


@pytest.mark.bench  # a lease, and the time for a host to come back: `make chaos`
def test_a_host_that_was_away_takes_part_again(hosts: Hosts, tmp_path: Path, start: Start) -> None:
    plan = saving_plan(
        hosts, tmp_path / "meet", env={**SAVES, "HETRUN_FAKE_STEPS": "30"}, lease_s=5.0
    )
    controller = start(plan)
    for _ in range(4):
        controller.wait_for("event step 3")
    hosts[1].link(up=False)
    try:
        controller.wait_for("restart 1 of 3 from the checkpoint of step")
        controller.wait_for("waiting for it")
    finally:
        hosts[1].link(up=True)
    assert controller.process.wait(timeout=60) == 0
    hosts[1].drop_sessions()
    (restart,) = controller.outcome().restarts
    assert restart.failure is not None
    assert (restart.failure.host, restart.exit_code) == ("h2", 5)
