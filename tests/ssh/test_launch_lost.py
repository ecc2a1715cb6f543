"""Hosts that are lost while a run goes on: said so, ended on both sides, and left out where the recipe wants it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hetrun import store
from hetrun.launch.attempts import Attempts
from hetrun.model import CheckpointSpec, Event, LostHost, Plan, RunOutcome, StepEvent
from tests.ssh.lab import LabHost
from tests.ssh.launches import GONE_S, LONG, Hosts, job_pids, lab_plan, launch_fake, run_dir
from tests.ssh.plans import Recorder, fake_env, make_plan

pytestmark = pytest.mark.ssh


def test_a_cut_link_is_lost_contact_both_sides_end_and_the_rest_goes_on_without_that_host(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attempts, "_wait", lambda self, seconds: True)  # for leases to end
    recorder = Recorder()

    def cut(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == 4:
            hosts[1].link(up=False)

    recorder.on_event = cut  # type: ignore[method-assign]
    checkpoint = CheckpointSpec(dir="/tmp/hetrun-not-used", every_steps=2, shared=True)
    more: dict[str, Any] = {"lease_s": 5.0, "checkpoint": checkpoint}
    more["on_lost_host"] = LostHost.REPLAN
    # Ranks meet in files, which no cable carries: without DEAF those that are ended there would end all.
    saves = {"HETRUN_FAKE_SAVE_EVERY": "2", "HETRUN_FAKE_DEAF": "1"}
    plan = lab_plan(hosts, tmp_path / "meet", env={**LONG, **saves}, **more)
    env = fake_env(tmp_path / "meet", **saves)  # few steps: the rest has nothing left to do
    smaller = make_plan([(hosts[0].spec(), 3)], env=env, **more)
    gone: list[tuple[str, ...]] = []

    def replan(hosts: tuple[str, ...]) -> Plan:
        gone.append(hosts)
        return smaller

    try:
        outcome = launch_fake(plan, tmp_path, recorder, replan=replan)
        hosts[0].wait_empty(0.5)
        _wait_only_sessions(hosts[1], GONE_S)
    finally:
        hosts[1].link(up=True)
        hosts[1].drop_sessions()
    run = run_dir(tmp_path)
    first = store.load(RunOutcome, run / "attempts/1/launch.json")
    assert (first.exit_code, first.status, first.not_clean) == (5, "lost contact", ("h2",))
    assert first.failures[0].host == "h2"
    assert first.failures[0].what.startswith("lost contact: ")
    assert (outcome.exit_code, gone) == (0, [("h2",)])
    (restart,) = outcome.restarts
    assert (restart.exit_code, restart.left_out) == (5, ("h2",))
    step = restart.checkpoint_step
    assert step is not None
    assert (store.load(Plan, run / "plan.json"), step >= 4) == (smaller, True)
    assert ("h1", 2, f"goes on at step {(tmp_path / 'meet/saved').read_text()}") in recorder.lines


def test_a_guard_that_falls_silent_is_lost_contact_and_ends_all_once_it_wakes(
    hosts: Hosts, tmp_path: Path
) -> None:
    stopped: list[int] = []
    recorder = Recorder()

    def stop_guard(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == 2 and not stopped:
            stopped.append(job_pids(hosts[1])["guard"])
            os.kill(stopped[0], signal.SIGSTOP)

    recorder.on_event = stop_guard  # type: ignore[method-assign]
    plan = lab_plan(hosts, tmp_path / "meet", lease_s=5.0, env=LONG)
    try:
        outcome = launch_fake(plan, tmp_path, recorder)
        hosts[0].wait_empty(0.5)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    hosts[1].wait_empty(GONE_S)
    assert (outcome.exit_code, outcome.status, outcome.not_clean) == (5, "lost contact", ("h2",))
    assert outcome.failures[0].what.startswith("lost contact: silent for ")


def _wait_only_sessions(host: LabHost, timeout_s: float) -> None:
    """Wait until a host that cannot be reached runs nothing but sshd's own session."""
    deadline_s = time.monotonic() + timeout_s
    while left := [line for line in host.processes().values() if "sshd" not in line]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)
