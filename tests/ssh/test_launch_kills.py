"""Whatever is killed, stopped or interrupted: all of a launch goes, on every host, and its outcome is written."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ssh.controller_process import Start
from tests.ssh.lab import GATEWAY, Lab, LabHost, descendants
from tests.ssh.launches import (
    GONE_S,
    LONG,
    Hosts,
    job_folders,
    job_pids,
    lab_plan,
    launch_fake,
)
from tests.ssh.plans import fake_env, make_plan

pytestmark = pytest.mark.ssh


def test_a_killed_controller_leaves_nothing(hosts: Hosts, tmp_path: Path, start: Start) -> None:
    fault = "daemon:0:1,stubborn:1:1,daemon:3:1"
    controller = start(lab_plan(hosts, tmp_path / "meet", fault, env=LONG))
    controller.wait_for("event step 3")
    controller.wait_for("event step 3")
    controller.process.kill()
    for host in hosts:
        host.wait_empty(GONE_S)
    for host in hosts[:2]:
        assert not (job_folders(host)[-1] / "env").exists()


def test_ctrl_c_ends_the_run_in_order(hosts: Hosts, tmp_path: Path, start: Start) -> None:
    controller = start(lab_plan(hosts, tmp_path / "meet", env=LONG))
    controller.wait_for("event step")
    controller.process.send_signal(signal.SIGINT)
    assert controller.process.wait(timeout=GONE_S) == 130
    for host in hosts:
        host.wait_empty(0.5)
    outcome = controller.outcome()
    assert (outcome.status, outcome.exit_code, outcome.failures) == ("interrupted", 130, ())


def test_sigterm_ends_the_run_in_order(hosts: Hosts, tmp_path: Path, start: Start) -> None:
    controller = start(lab_plan(hosts, tmp_path / "meet", env=LONG))
    controller.wait_for("event step")
    controller.process.send_signal(signal.SIGTERM)
    assert controller.process.wait(timeout=GONE_S) == 143
    for host in hosts:
        host.wait_empty(0.5)
    assert controller.outcome().exit_code == 143


def test_a_second_ctrl_c_does_not_wait_for_the_grace(
    hosts: Hosts, tmp_path: Path, start: Start
) -> None:
    plan = lab_plan(hosts, tmp_path / "meet", "stubborn:3:0", env=LONG, stop_grace_s=300.0)
    controller = start(plan)
    controller.wait_for("event step 3")
    controller.process.send_signal(signal.SIGINT)
    controller.wait_for("stopping")
    time.sleep(0.5)
    assert controller.process.poll() is None
    controller.process.send_signal(signal.SIGINT)
    assert controller.process.wait(timeout=GONE_S) == 130
    for host in hosts:
        host.wait_empty(0.5)


def test_ctrl_c_while_connecting_ends_at_once_and_leaves_no_child(
    lab: Lab, hosts: Hosts, tmp_path: Path, start: Start
) -> None:
    dead = hosts[1].spec(name="dead", addr="10.77.0.99")
    with socket.create_server((GATEWAY, 0)) as server:  # accepts, and never says a word
        silent = hosts[1].spec(name="silent", addr=GATEWAY, port=server.getsockname()[1])
        specs = [(hosts[0].spec(), 1), (dead, 1), (silent, 1)]
        controller = start(make_plan(specs, env=fake_env(tmp_path / "meet")))
        controller.wait_for(f"status {hosts[0].name} preflight")  # the others are being called
        children = descendants(controller.process.pid)
        controller.process.send_signal(signal.SIGINT)
        assert controller.process.wait(timeout=GONE_S) == 130
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    hosts[0].wait_empty(GONE_S)
    assert controller.outcome().status == "interrupted"


@pytest.mark.parametrize("victim", ["guard", "init", "torchrun"])
def test_whatever_is_killed_on_a_host_all_of_the_job_goes(
    hosts: Hosts, tmp_path: Path, start: Start, victim: str
) -> None:
    controller = start(lab_plan(hosts, tmp_path / "meet", "daemon:3:0", env=LONG))
    controller.wait_for("event step 3")
    _kill(hosts[1], victim)
    for host in hosts:
        host.wait_empty(GONE_S)
    assert controller.process.wait(timeout=GONE_S) in (1, 5)
    assert controller.outcome().failures[0].host == "h2"


def _kill(host: LabHost, victim: str) -> None:
    os.kill(job_pids(host)[victim], signal.SIGKILL)


@pytest.fixture(scope="module")
def plain_host(lab: Lab) -> Iterator[LabHost]:
    """Like a container: root, but not allowed to make namespaces of its own."""
    host = lab.host(7, drop="sys_admin")
    yield host
    lab.drop(host)


@pytest.mark.parametrize(
    ("device", "mode", "victim"),
    [
        ("cpu", "user and pid", "guard"),
        ("cpu", "user and pid", "controller"),
        # ends as in a PID namespace that root made, above: `make chaos`
        pytest.param("cpu", "user and pid", "init", marks=pytest.mark.bench),
        pytest.param("cpu", "user and pid", "torchrun", marks=pytest.mark.bench),
        *(("cuda", "subreaper", victim) for victim in ("guard", "init", "torchrun", "controller")),
    ],
)
def test_without_the_right_to_make_namespaces_all_goes_too(
    plain_host: LabHost, tmp_path: Path, start: Start, device: str, mode: str, victim: str
) -> None:
    env = fake_env(tmp_path / "meet", "daemon:1:0", **LONG)
    controller = start(make_plan([(plain_host.spec(), 2)], device=device, env=env))
    controller.wait_for(f"torchrun started ({mode}")
    controller.wait_for("event step 1")
    if victim == "controller":
        controller.process.kill()
    else:
        _kill(plain_host, victim)
    plain_host.wait_empty(GONE_S)
    if victim != "controller":
        assert controller.process.wait(timeout=GONE_S) in (1, 5)


def test_stopping_one_run_leaves_another_on_the_same_hosts_alone(
    hosts: Hosts, tmp_path: Path, start: Start
) -> None:
    (tmp_path / "other").mkdir()
    controller = start(lab_plan(hosts, tmp_path / "meet", env=LONG))
    controller.wait_for("event step")
    outcome = launch_fake(lab_plan(hosts, tmp_path / "meet2", "raise:0:0"), tmp_path / "other")
    assert outcome.exit_code == 1
    controller.wait_for("event step")
    controller.wait_for("event step")
    controller.process.send_signal(signal.SIGINT)
    assert controller.process.wait(timeout=GONE_S) == 130
