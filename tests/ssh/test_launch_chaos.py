"""Faults at random moments of a run on two hosts: the cause is named, and nothing is left anywhere.

A few seeds run each time, all of them with `make chaos`, which prints the seconds.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetrun.model import Failure
from tests.ssh.controller_process import Controller, Start
from tests.ssh.lab import Lab, LabHost, call, parent
from tests.ssh.launches import GONE_S, Hosts, job_pids, lab_plan

pytestmark = pytest.mark.ssh
LEASE_S = 5.0
HANG_S = 3.0
SLACK_S = GONE_S  # of a loaded machine; what an idle one needs is in docs/benchmarks.md
STEPS = {"HETRUN_FAKE_STEPS": "500", "HETRUN_FAKE_BEATS": "1"}
RANKS_OF = {"h1": (0, 1, 2), "h2": (3,)}


@dataclass(frozen=True)
class Fault:
    """What is done to a run; `empty_s` is the goal for all hosts to be empty, None where it goes on."""

    name: str
    codes: tuple[int, ...]
    empty_s: float | None
    says: str = ""  # of the root cause


FAULTS = (
    Fault("rank killed", (1,), 2.0, "killed by signal 9"),
    Fault("rank stopped", (6,), HANG_S + 5.0, "is stopped (SIGSTOP)"),
    Fault("torchrun killed", (1,), 2.0),
    Fault("torchrun stopped", (130,), None),
    Fault("guard killed", (1, 5), 2.0),
    Fault("guard stopped", (5,), 2 * LEASE_S + 12.0, "lost contact"),
    Fault("sshd killed", (1, 5), 2.0),
    Fault("controller killed", (-9,), 3.0),
    Fault("controller stopped", (5,), LEASE_S + 3.0, "lost contact"),
    Fault("link cut", (5,), LEASE_S + 1.0, "lost contact"),
    Fault("disk full", (1,), 3.0),
)
QUICK = ("rank killed",)  # in every run of CI
ROUNDS = 3


@pytest.fixture(autouse=True)
def small_disk(tmp_path: Path) -> Iterator[None]:
    """Runs go to a disk that a fault can fill."""
    (tmp_path / "runs").mkdir()
    call("mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path / "runs"))
    yield
    call("umount", str(tmp_path / "runs"))


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_at_a_random_moment(
    lab: Lab, hosts: Hosts, tmp_path: Path, start: Start, name: str
) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    chaos(random.Random(name), fault, hosts, tmp_path, start)


@pytest.mark.bench  # minutes: `make chaos`
@pytest.mark.parametrize("seed", range(ROUNDS * len(FAULTS)))
def test_more_faults_at_random_moments(
    lab: Lab, hosts: Hosts, tmp_path: Path, start: Start, seed: int
) -> None:
    chaos(random.Random(seed), FAULTS[seed % len(FAULTS)], hosts, tmp_path, start)


def chaos(dice: random.Random, fault: Fault, hosts: Hosts, tmp_path: Path, start: Start) -> None:
    plan = lab_plan(hosts, tmp_path / "meet", env=STEPS, lease_s=LEASE_S, step_timeout_s=HANG_S)
    controller = start(plan)
    for _ in range(dice.randint(1, 8)):
        controller.wait_for(f"event step {dice.randrange(4)}")
    time.sleep(dice.random() * 0.3)
    victim, rank = dice.choice(hosts[:2]), None
    if fault.name.startswith("rank"):
        rank = dice.choice(RANKS_OF[victim.name])
    began_s = time.monotonic()
    spared = inflict(fault, victim, rank, controller, hosts)
    if fault.empty_s is None:
        controller.wait_for("event step 0")  # it goes on
        began_s = time.monotonic()
        controller.process.send_signal(signal.SIGINT)
    try:
        for host in hosts:
            wait_empty(host, (fault.empty_s or 5.0) + SLACK_S, spared)
        took_s = time.monotonic() - began_s
    finally:
        mend(fault, victim, controller, spared)
    code = controller.process.wait(timeout=GONE_S)
    sys.stderr.write(
        f"\nchaos {fault.name} on {victim.name}: empty after {took_s:.1f} s, code {code}"
    )
    assert code in fault.codes
    if fault.name.startswith("controller killed"):
        return
    failures = controller.outcome().failures
    if fault.empty_s is not None and not fault.name.startswith(("controller", "disk")):
        check_cause(fault, failures[0], victim, rank)


def check_cause(fault: Fault, root: Failure, victim: LabHost, rank: int | None) -> None:
    assert (root.host, fault.says in root.what) == (victim.name, True), root
    if rank is not None:
        assert root.rank == rank


def inflict(
    fault: Fault, victim: LabHost, rank: int | None, controller: Controller, hosts: Hosts
) -> frozenset[int]:
    """Do it; return processes that cannot end by themselves."""
    what, _, how = fault.name.rpartition(" ")
    number = signal.SIGSTOP if how == "stopped" else signal.SIGKILL
    pids = job_pids(victim)
    match what:
        case "controller":
            os.kill(controller.process.pid, number)
        case "link":
            victim.link(up=False)
        case "disk":
            fill(controller.folder / "runs/filler")
        case "sshd":
            os.kill(above(victim, pids["guard"], "sshd"), number)
        case "rank":
            os.kill(pid_of_rank(victim, pids["torchrun"], rank), number)
        case _:
            os.kill(pids[what], number)
    if fault.name == "guard stopped":
        return frozenset({pids["guard"], *ancestors(victim, pids["guard"])})
    if fault.name == "link cut":
        return frozenset(ancestors(victim, pids["guard"]))
    if (
        fault.name == "controller stopped"
    ):  # sshd waits for the client of the connection to close it
        return frozenset(pid for host in hosts for pid in sshd_sessions(host))
    return frozenset()


def sshd_sessions(host: LabHost) -> list[int]:
    return [pid for pid, line in host.processes().items() if line.startswith("sshd: ")]


def mend(fault: Fault, victim: LabHost, controller: Controller, spared: frozenset[int]) -> None:
    """Undo what a person would undo, so that the next test finds hosts as they were."""
    if fault.name == "controller stopped":
        os.kill(controller.process.pid, signal.SIGCONT)
    (controller.folder / "runs/filler").unlink(missing_ok=True)
    if fault.name == "link cut":
        controller.process.wait(timeout=GONE_S)
        victim.link(up=True)
        victim.drop_sessions()
    if fault.name == "guard stopped":
        for pid in spared:
            if pid in victim.processes():
                os.kill(pid, signal.SIGCONT)
    victim.wait_empty(GONE_S)


def wait_empty(host: LabHost, timeout_s: float, spared: frozenset[int]) -> None:
    deadline_s = time.monotonic() + timeout_s
    while left := {pid: line for pid, line in host.processes().items() if not excused(pid, spared)}:
        assert time.monotonic() < deadline_s, f"{host.name} still runs {left}"
        time.sleep(0.02)


def excused(pid: int, spared: frozenset[int]) -> bool:
    """Say whether a process is stopped by the test, or is dead already and its stopped parent cannot know."""
    try:
        state, above = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return True
    return pid in spared or (state == "Z" and int(above) in spared)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return


def pid_of_rank(host: LabHost, torchrun: int, rank: int | None) -> int:
    for pid in host.processes():
        if parent(pid) == torchrun:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environ:
                return pid
    raise AssertionError(f"no rank {rank} on {host.name}")


def ancestors(host: LabHost, pid: int) -> list[int]:
    """Processes above one on its host, sshd's session among them, nearest first."""
    found = []
    mine = host.processes()
    while (pid := parent(pid)) in mine:
        found.append(pid)
    return found


def above(host: LabHost, pid: int, text: str) -> int:
    mine = host.processes()
    return next(pid for pid in ancestors(host, pid) if text in mine[pid])
