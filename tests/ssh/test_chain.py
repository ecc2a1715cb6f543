"""The five commands over real sshds: uneven hosts, a non-default port, a jump host, strict host keys; real training."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.chain import argv, done, hetrun, plan_chain
from tests.ssh.lab import Lab, LabHost

pytestmark = pytest.mark.ssh
Hosts = tuple[LabHost, LabHost, LabHost]

LINKS = """
links:
  - { kind: inside_host, latency_us: 10, gbit_per_s: 200 }
  - { kind: inside_island, latency_us: 20, gbit_per_s: 50 }
  - { kind: across, latency_us: 50, gbit_per_s: 10 }
"""


def _inventory(folder: Path, lab: Lab, hosts: list[tuple[LabHost, str]]) -> Path:
    """Write an inventory; `hosts` are with what each emulates and what else is said of it."""
    lines = [
        "defaults:",
        "  user: root",
        f"  identity: {lab.folder / 'id'}",
        f"  known_hosts: {lab.folder / 'known_hosts'}",
        f"  python: {hosts[0][0].spec().python}",
        "hosts:",
    ]
    for host, more in hosts:
        lines.append(f"  {host.name}: {{ addr: {host.addr}, port: {host.port}, {more} }}")
    path = folder / "lab.yaml"
    path.write_text("\n".join(lines) + LINKS)
    return path


def _chip(vendor: str, num_devices: int, gflops: float) -> str:
    return (
        f"emulate: {{ vendor: {vendor}, model: chip, num_devices: {num_devices}, "
        f"gflops: {gflops}, memory: 16GiB }}"
    )


def _run(folder: Path) -> dict[str, Any]:
    run_dir = folder / done("launch", cwd=folder).stdout.strip()
    report: dict[str, Any] = json.loads(done("report", run_dir, "--json", cwd=folder).stdout)
    return report


@pytest.mark.timeout(150)  # half a minute on an idle machine
def test_chain_over_two_uneven_hosts_trains_as_planned(
    lab: Lab, hosts: Hosts, tmp_path: Path
) -> None:
    three, one = hosts[0], hosts[2]
    assert one.port != 22
    inventory = _inventory(
        tmp_path, lab, [(three, _chip("emu-a", 3, 2.0)), (one, _chip("emu-b", 1, 1.2))]
    )
    plan_chain(tmp_path, inventory, steps=6)
    report = _run(tmp_path)
    assert [(rank["host"], rank["vendor"]) for rank in report["ranks"]] == [
        *[(three.name, "emu-a")] * 3,
        (one.name, "emu-b"),
    ]
    assert report["status"] == "done"
    assert report["loss"]["last"] < report["loss"]["first"]
    assert abs(report["prediction_error"]) < 1e-6
    for host in (three, one):
        host.wait_empty(2.0)


@pytest.mark.timeout(150)  # half a minute on an idle machine
def test_chain_over_three_hosts_one_behind_a_jump_host(
    lab: Lab, hosts: Hosts, tmp_path: Path
) -> None:
    first, second, third = hosts
    jump = f"jump: root@{first.addr}"
    inventory = _inventory(
        tmp_path,
        lab,
        [
            (first, _chip("emu-a", 1, 2.0)),
            (second, f"{_chip('emu-b', 1, 1.2)}, {jump}"),
            (third, _chip("emu-c", 2, 0.8)),
        ],
    )
    plan_chain(tmp_path, inventory, steps=4)
    report = _run(tmp_path)
    assert {rank["host"] for rank in report["ranks"]} == {first.name, second.name, third.name}
    assert report["status"] == "done"
    assert report["steps"] == 4


@pytest.mark.bench  # a lease, and the start of real ranks twice: `make chaos`
@pytest.mark.timeout(300)
def test_training_goes_on_without_a_lost_host_under_a_new_plan(
    lab: Lab, hosts: Hosts, tmp_path: Path
) -> None:
    chips = [_chip("emu-a", 2, 2.0), _chip("emu-b", 1, 1.2), _chip("emu-c", 1, 0.8)]
    inventory = _inventory(tmp_path, lab, list(zip(hosts, chips, strict=True)))
    more = f"  lease_s: 5\n  on_lost_host: replan\n{_saving(tmp_path, every_steps=2)}"
    plan_chain(tmp_path, inventory, steps=20, more=more)
    with _launched(tmp_path) as process:
        _wait_for(tmp_path, '"checkpoint"')
        hosts[1].link(up=False)
        try:
            _, talk = process.communicate(timeout=200)
        finally:
            hosts[1].link(up=True)
            hosts[1].drop_sessions()
    assert process.returncode == 0, talk
    (run_dir,) = tmp_path.glob("runs/*")
    (restart,) = json.loads((run_dir / "launch.json").read_text())["restarts"]
    assert restart["left_out"] == [hosts[1].name]
    report = json.loads(done("report", "--json", cwd=tmp_path).stdout)
    assert {rank["host"] for rank in report["ranks"]} == {hosts[0].name, hosts[2].name}
    assert report["first_step"] >= 2
    assert (report["status"], report["first_step"] + report["steps"]) == ("done", 20)


def _saving(folder: Path, *, every_steps: int) -> str:
    return f"checkpoint: {{ dir: {folder}/saved, every_steps: {every_steps}, shared: true }}\n"


@contextmanager
def _launched(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A launch that goes on beside the test, and ends with it."""
    process = subprocess.Popen(
        argv("launch"),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _wait_for(folder: Path, word: str) -> None:
    """Wait until rank 0 of the only run has written an event with this word."""
    deadline_s = time.monotonic() + 60.0
    while not any(
        word in path.read_text() for path in folder.glob("runs/*/events/rank-0000.jsonl")
    ):
        assert time.monotonic() < deadline_s, f"no event {word} within a minute"
        time.sleep(0.1)


def test_probe_of_a_dead_and_a_changed_host_names_both_and_keeps_the_good_one(
    lab: Lab, hosts: Hosts, tmp_path: Path
) -> None:
    first, second, third = hosts
    chip = _chip("emu-a", 1, 1.0)
    inventory = _inventory(tmp_path, lab, [(first, chip), (second, chip), (third, chip)])
    text = inventory.read_text().replace(f"addr: {second.addr}", "addr: 10.77.0.99")
    inventory.write_text(text)
    lab.trust(third, key=lab.folder / "other_id")
    try:
        result = hetrun("probe", inventory, "--json", cwd=tmp_path)
    finally:
        lab.trust(third)
    assert result.returncode == 10, result.stderr
    errors = [host["error"] for host in json.loads(result.stdout)["hosts"]]
    assert errors[0] is None
    assert "10.77.0.99" in errors[1]
    assert "CHANGED" in errors[2]
    assert "Traceback" not in result.stderr


def test_probe_with_no_host_left_exits_4(lab: Lab, hosts: Hosts, tmp_path: Path) -> None:
    inventory = _inventory(tmp_path, lab, [(hosts[0], "cpu_devices: 1")])
    inventory.write_text(inventory.read_text().replace(hosts[0].addr, "10.77.0.98"))
    result = hetrun("probe", inventory, cwd=tmp_path)
    assert result.returncode == 4
    assert "10.77.0.98" in result.stderr
