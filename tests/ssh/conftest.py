"""The lab: emulated hosts with sshds of their own. What is tested on them stands in the test files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetrun.model import Plan
from tests.ssh.controller_process import Controller, Start
from tests.ssh.lab import Lab, LabHost, can_build


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if not can_build():
        pytest.skip("needs root, iproute2, util-linux and sshd")
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def three(lab: Lab) -> tuple[LabHost, LabHost, LabHost]:
    return lab.host(1), lab.host(2), lab.host(3, port=2203)


@pytest.fixture
def hosts(three: tuple[LabHost, LabHost, LabHost]) -> Iterator[tuple[LabHost, LabHost, LabHost]]:
    """Three hosts that are empty before and after the test; the third listens on port 2203."""
    yield three
    for host in three:
        host.wait_empty(5.0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Launch a plan in a process of its own, in a folder of the test's; it is ended with the test."""
    started: list[Controller] = []

    def start(plan: Plan, folder: Path = tmp_path) -> Controller:
        folder.mkdir(exist_ok=True)
        started.append(Controller(plan, folder))
        return started[-1]

    yield start
    for controller in started:
        controller.end()
