"""Limits, names, toolkits, plug-ins and sudo, from what a host's script prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.errors import ConfigError
from hetrun.inventory import load_inventory
from hetrun.model import HostFacts, HostSpec
from hetrun.probe.host import parse_host
from hetrun.probe.script import probe_script
from hetrun.probe.system import loopback_names
from hetrun.vendors import ProbeCommand, all_vendors
from tests.unit.probe_output import NONCE, PLAIN, output
from tests.unit.test_probe_devices import NVIDIA_CSV, NVIDIA_NODES, NVIDIA_PCI

SPEC = HostSpec(name="a1")
LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max open files            {files:<20} 1048576              files     \n"
    "Max locked memory         {locked:<20} unlimited            bytes     \n"
)


def parse(spec: HostSpec = SPEC, *, rc: dict[str, int] | None = None, **sections: str) -> HostFacts:
    stderr = {"become": "sudo: a password is required\n"} if "become" in sections else None
    return parse_host(spec, output({**PLAIN, **sections}, rc=rc, stderr=stderr), nonce=NONCE)


def test_limits_of_a_process_are_facts_and_low_ones_warnings() -> None:
    low = parse(limits=LIMITS.format(files=1024, locked=65536))
    assert (low.max_open_files, low.max_locked_bytes) == (1024, 65536)
    assert any("may open 1024 files, need 4096" in warning for warning in low.warnings)
    assert not any("lock" in warning for warning in low.warnings)  # no RDMA here
    free = parse(limits=LIMITS.format(files="unlimited", locked="unlimited"))
    assert (free.max_open_files, free.max_locked_bytes, free.warnings) == (-1, -1, ())
    assert parse(limits="Max open files junk\n").max_open_files is None


@pytest.mark.parametrize(
    "lookup",
    ["127.0.1.1 STREAM a1\n127.0.1.1 DGRAM\n", "127.0.1.1 A1.example.com a1 # as Debian does\n"],
    ids=["getent", "hosts file"],
)
def test_name_that_means_the_host_itself_is_known_and_said_where_it_matters(lookup: str) -> None:
    said = f"own a1\nname a1\n{lookup}name b2\n"
    facts = parse(names=said)
    assert (facts.hostname, facts.names) == ("a1", {"a1": ("127.0.1.1",), "b2": ()})
    assert loopback_names(facts.names) == ["a1"]
    assert facts.warnings == ()  # ranks meet at numbers: its own name does no harm
    named = parse(replace(SPEC, data_addr="a1"), names=said)
    assert any("a1 is 127.0.1.1 on the host itself" in warning for warning in named.warnings)


def test_name_with_an_address_that_others_reach_is_fine() -> None:
    said = "own a1\nname a1\n127.0.1.1 STREAM a1\n192.0.2.2 STREAM\n"
    facts = parse(replace(SPEC, data_addr="a1"), names=said)
    assert loopback_names(facts.names) == []
    assert facts.warnings == ()


def test_plugin_that_does_not_load_says_why() -> None:
    said = {
        "path": "/p",
        "version": "3.11.2",
        "torch": "2.6.0",
        "plugins": ["torch_x", "torch_y"],
        "plugin_errors": {"torch_x": "ImportError: libx.so.4 (exit code 1)"},
    }
    sections = {
        **PLAIN,
        "python": "\n" + json.dumps(said) + "\n",
        "pci": NVIDIA_PCI,
        "nodes": NVIDIA_NODES,
        "tool-nvidia-0": NVIDIA_CSV,
    }
    vendors = {"nvidia": replace(all_vendors()["nvidia"], torch_plugin="torch_x")}
    facts = parse_host(SPEC, output(sections), nonce=NONCE, vendors=vendors)
    assert facts.plugins == ("torch_y",)
    assert facts.plugin_errors == said["plugin_errors"]
    (warning,) = facts.warnings
    assert "NVIDIA needs torch_x, which python3 cannot import: ImportError: libx.so.4" in warning


def test_toolkit_of_the_tool_and_of_the_disk_stand_beside_the_driver() -> None:
    sections = {
        **PLAIN,
        "pci": NVIDIA_PCI,
        "nodes": NVIDIA_NODES,
        "tool-nvidia-0": NVIDIA_CSV,
        "sdk": 'nvidia\t/usr/local/cuda-12.4\t{ "cuda" : { "version" : "12.4.1" } }\nx\ty\tz\n',
    }
    facts = parse_host(SPEC, output(sections), nonce=NONCE)
    assert {device.sdk for device in facts.devices} == {"/usr/local/cuda-12.4 12.4.1"}
    assert {device.driver for device in facts.devices} == {"550.54.15"}


def test_sudo_is_for_tools_that_need_it_and_only_where_the_inventory_says_so() -> None:
    base = all_vendors()["cpu"]
    commands = (ProbeCommand("plain -q"), ProbeCommand("rooted -q", needs_root=True))
    vendors = {"x": replace(base, name="x", probe_commands=commands)}
    assert "sudo" not in probe_script(SPEC, vendors, nonce="n")
    script = probe_script(replace(SPEC, become=True), vendors, nonce="n")
    (plain,) = [line for line in script.splitlines() if line.startswith("tool tool-x-0")]
    (rooted,) = [line for line in script.splitlines() if line.startswith("tool tool-x-1")]
    assert "sudo" not in plain
    assert "sudo -n env" in rooted


def test_inventory_says_where_sudo_may_be_used(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text("hosts:\n  a1:\n    become: true\n  b1: {}\n")
    first, second = load_inventory(path).hosts
    assert (first.become, second.become) == (True, False)
    path.write_text("hosts:\n  a1:\n    become: sudo\n")
    with pytest.raises(ConfigError, match="become"):
        load_inventory(path)


def test_sudo_that_asks_for_a_password_is_told() -> None:
    spec = replace(SPEC, become=True)
    refused = parse(spec, rc={"become": 1}, become="")
    assert any("sudo -n is refused (sudo: a password is required)" in w for w in refused.warnings)
    assert parse(spec, rc={"become": 0}, become="").warnings == ()
