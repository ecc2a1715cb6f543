"""What launch adds to torchrun, and how soon a failed run trains again; the figures are printed for docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from hetrun.launch.files import Meeting, host_files
from hetrun.model import CheckpointSpec, Plan
from hetrun.transport.jobs import JOB_FOLDER
from tests.ssh.lab import die_with_parent
from tests.ssh.launches import Hosts, lab_plan, launch_fake, run_dir
from tests.ssh.plans import FAKE, Recorder

pytestmark = [pytest.mark.ssh, pytest.mark.bench, pytest.mark.timeout(200)]
PAIRS = 6
SAVES = {"HETRUN_FAKE_SAVE_EVERY": "1"}


def bare_s(hosts: Hosts, plan: Plan, folder: Path, port: int) -> float:
    """Seconds of the same ranks under torchrun alone, started on both hosts at once by hand."""
    started_s = time.monotonic()
    running = []
    for node_rank, host in enumerate(hosts[:2]):
        meeting = Meeting(addr=hosts[0].addr, port=port, rdzv_id="bare")
        wanted = host_files(
            plan, node_rank, meeting=meeting, nic="eth0", secrets={}, module=FAKE.module
        )
        job = folder / host.name
        for path, data in {**wanted.files, **FAKE.extra}.items():
            (job / path).parent.mkdir(parents=True, exist_ok=True)
            (job / path).write_bytes(data)
        (job / "events").mkdir()
        args = [arg.replace(JOB_FOLDER, str(job)) for arg in wanted.args]
        running.append(
            subprocess.Popen(
                ["nsenter", "-t", str(host.init_pid), "-n", "-u", "-m", sys.executable, *args],
                env={**os.environ, **wanted.env, "PYTHONPATH": str(job)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )
        )
    assert [process.wait(timeout=60) for process in running] == [0, 0]
    return time.monotonic() - started_s


class Phases(Recorder):
    """When torchrun was started on the last host, and when the first host had nothing left of it."""

    def __init__(self) -> None:
        super().__init__()
        self.began_s = time.monotonic()
        self.up_s = self.over_s = 0.0

    def on_status(self, host: str, text: str) -> None:
        if text.startswith("torchrun started"):
            self.up_s = time.monotonic()
        elif text == "nothing left running" and not self.over_s:
            self.over_s = time.monotonic()


def test_launch_adds_little_to_torchrun(hosts: Hosts, tmp_path: Path) -> None:
    """Pairs, the other one first each time; what launch does before and after torchrun runs is timed by itself, too."""
    ratios, added, before, after, cpu = [], [], [], [], []
    for number in range(PAIRS):
        folder = tmp_path / str(number)
        folder.mkdir()

        def bare(folder: Path = folder, number: int = number) -> float:
            return bare_s(hosts, lab_plan(hosts, folder / "meet1"), folder, 21000 + number)

        bare_first_s = bare() if number % 2 else None
        phases = Phases()
        cpu_s = time.process_time()
        outcome = launch_fake(lab_plan(hosts, folder / "meet2"), folder, phases)
        ended_s = time.monotonic()
        cpu.append(time.process_time() - cpu_s)
        assert outcome.exit_code == 0
        before.append(phases.up_s - phases.began_s)
        after.append(ended_s - phases.over_s)
        alone_s = bare_first_s or bare()
        ratios.append((ended_s - phases.began_s) / alone_s)
        added.append(ended_s - phases.began_s - alone_s)
    for what, found in (
        ("launch / torchrun", ratios),
        ("s that launch adds", added),
        ("s before torchrun runs", before),
        ("s after it", after),
        ("s of CPU of the controller", cpu),
    ):
        words = ", ".join(f"{number:.2f}" for number in sorted(found))
        sys.stderr.write(f"\ngoal: {what}: {words} (median {median(found):.2f})")
    assert median(ratios) < 3.0  # a loaded machine; the goal of 1 s is for an idle one


def test_a_failed_run_soon_trains_again(hosts: Hosts, tmp_path: Path) -> None:
    found = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        checkpoint = CheckpointSpec(dir="/tmp/hetrun-not-used", every_steps=1)
        plan = lab_plan(hosts, folder / "meet", "kill:3:2", env=SAVES, checkpoint=checkpoint)
        outcome = launch_fake(plan, folder)
        (restart,) = outcome.restarts
        assert restart.failure is not None
        events = (run_dir(folder) / "events/rank-0000.jsonl").read_text().splitlines()
        first_s = next(
            event["wall_s"] for event in map(json.loads, events) if event["event"] == "step"
        )
        found.append(first_s - restart.failure.when_s)
    words = ", ".join(f"{seconds:.1f}" for seconds in sorted(found))
    sys.stderr.write(f"\ngoal: fault to first step again {words} s\n")
    assert max(found) < 60.0
