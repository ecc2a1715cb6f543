"""Probe and profile over real sshds: one host that is away never hides what the others say."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrun.model import HostSpec, Inventory
from hetrun.probe import Answered, answered, probe
from hetrun.profile import profile
from hetrun.recipe import load_recipe
from tests.ssh.lab import LabHost, emulating

pytestmark = pytest.mark.ssh
Hosts = tuple[LabHost, LabHost, LabHost]
TINY = Path(__file__).parents[2] / "recipes" / "tiny-llama.yaml"


def test_hosts_are_described_and_one_that_is_away_says_why(hosts: Hosts) -> None:
    away = HostSpec(name="away", addr=hosts[0].spec().addr, port=1)
    specs = (hosts[0].spec(), away, hosts[2].spec())
    facts = probe(Inventory(name="lab", hosts=specs))
    first, silent, third = facts.hosts
    assert (first.error, third.error) == (None, None)
    assert silent.error
    assert answered(facts) is Answered.SOME
    for found, host in ((first, hosts[0]), (third, hosts[2])):
        addresses = {address for nic in found.nics for address in nic.addresses}
        assert host.spec().addr in addresses
        assert abs(found.clock_offset_s or 99) < 2
        assert found.devices
    hosts[0].wait_empty(5.0)


def test_emulated_chips_answer_over_ssh_with_their_declared_figures(hosts: Hosts) -> None:
    specs = emulating(hosts[:2])
    facts = probe(Inventory(name="lab", hosts=specs))
    found = profile(facts, load_recipe(TINY))
    slow, fast = (device.timings[0].layer_forward_s for device in found.devices)
    assert slow == pytest.approx(2 * fast)
    assert [device.hosts for device in found.devices] == [(specs[0].name,), (specs[1].name,)]
