"""Each command is one connection per host, however many things it asks of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetrun.model import CurveKind, Inventory
from hetrun.probe import probe
from hetrun.profile import profile
from hetrun.recipe import load_recipe
from tests.chain import ROOT
from tests.ssh.lab import LabHost, emulating
from tests.ssh.launches import lab_plan, launch_fake

pytestmark = pytest.mark.ssh
Hosts = tuple[LabHost, LabHost, LabHost]


@contextmanager
def accepted(hosts: tuple[LabHost, ...], *, times: int) -> Iterator[None]:
    """Count how often each sshd lets somebody in."""
    logs = [host.folder / "sshd.log" for host in hosts]
    before = [path.read_text().count("Accepted publickey") for path in logs]
    yield
    after = [path.read_text().count("Accepted publickey") for path in logs]
    assert [late - early for early, late in zip(before, after, strict=True)] == [times] * len(logs)


def test_a_whole_launch_is_one_connection_per_host(hosts: Hosts, tmp_path: Path) -> None:
    plan = lab_plan(hosts, tmp_path / "meet")
    with accepted(hosts[:2], times=1):
        outcome = launch_fake(plan, tmp_path)
    assert outcome.status == "done"


def test_a_whole_profile_is_one_connection_per_host(hosts: Hosts) -> None:
    specs = emulating(hosts[:2])
    with accepted(hosts[:2], times=1):
        facts = probe(Inventory(name="lab", hosts=specs))
    with accepted(hosts[:2], times=1):
        found = profile(facts, load_recipe(ROOT / "recipes" / "tiny-llama.yaml"), quick=True)
    assert {curve.kind for curve in found.curves} == {CurveKind.P2P, CurveKind.ALL_REDUCE}
