"""What probe says of this machine, beside lscpu, /proc and ip; plug-ins and sudo under real interpreters and shells."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.model import Connection, HostFacts, HostSpec, Inventory
from hetrun.probe import parse_host, probe, script
from hetrun.vendors import ProbeCommand, Vendor, all_vendors

pytestmark = pytest.mark.dist
NONCE = secrets.token_hex(8)
SPEC = HostSpec(name="here", connection=Connection.LOCAL, python=sys.executable)


def say(*argv: str) -> str:
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
        env={**os.environ, "LC_ALL": "C"},
    )
    return done.stdout


def run(
    vendors: Mapping[str, Vendor], *, spec: HostSpec = SPEC, env: Mapping[str, str] | None = None
) -> HostFacts:
    done = subprocess.run(
        ["sh"],
        input=b"{\n" + script.probe_script(spec, vendors, nonce=NONCE).encode() + b"\n}\n",
        capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": "/root", **(env or {})},
        timeout=50,
        check=True,
    )
    return parse_host(spec, done.stdout, nonce=NONCE, received_s=time.time(), vendors=vendors)


@pytest.fixture(scope="module")
def here() -> HostFacts:
    (facts,) = probe(Inventory(name="here", hosts=(SPEC,))).hosts
    assert facts.error is None
    return facts


def test_processor_is_the_one_that_lscpu_shows(here: HostFacts) -> None:
    fields = {
        item["field"].rstrip(":"): item["data"] for item in json.loads(say("lscpu", "-J"))["lscpu"]
    }
    assert here.cpu_model == fields["Model name"]


def test_cores_are_those_this_user_may_use(here: HostFacts) -> None:
    assert here.num_cores == int(say("nproc"))


def test_memory_is_that_of_the_kernel_or_the_container(here: HostFacts) -> None:
    total = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    limits = [
        int(text)
        for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
        if Path(path).exists() and (text := Path(path).read_text().strip()).isdigit()
    ]
    assert here.memory_bytes == min([total, *limits])


def test_interfaces_and_addresses_are_those_that_ip_shows(here: HostFacts) -> None:
    shown = {item["ifname"]: item for item in json.loads(say("ip", "-j", "addr"))}
    assert {nic.name for nic in here.nics} == set(shown)
    for nic in here.nics:
        entry = shown[nic.name]
        reachable = [
            item["local"] for item in entry["addr_info"] if not item["local"].startswith("fe80:")
        ]
        assert list(nic.addresses) == reachable
        assert nic.mtu == entry["mtu"]
        speed = Path(f"/sys/class/net/{nic.name}/speed")
        try:
            told = int(speed.read_text())
        except OSError:  # loopback and interfaces that are down do not say
            told = -1
        assert nic.speed_mbps == (told if told > 0 else None)


def test_kernel_name_limits_and_room_are_the_machines_own(here: HostFacts) -> None:
    assert here.kernel == say("uname", "-srm").strip()
    assert here.hostname == say("hostname").strip()
    limits = Path("/proc/self/limits").read_text()
    files = next(line for line in limits.splitlines() if line.startswith("Max open files"))
    assert str(here.max_open_files) == files.split()[3]
    assert here.shm_bytes == shutil.disk_usage("/dev/shm").total
    assert abs(here.clock_offset_s or 0) < 0.5


def test_interpreter_is_asked_for_its_own_version(here: HostFacts) -> None:
    assert here.python_path == sys.executable
    assert here.python_version == ".".join(str(part) for part in sys.version_info[:3])


# --- plug-ins of torch ------------------------------------------------------------------------------------


def plugged(*names: str) -> dict[str, Vendor]:
    base = replace(all_vendors()["cpu"], probe_commands=())
    return {name: replace(base, name=name, torch_plugin=name) for name in names}


def test_each_plugin_is_imported_by_itself_and_says_why_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PLUGIN_TIMEOUT_S", 2)
    (tmp_path / "torch.py").write_text("__version__ = '2.6.0+stub'\n")
    (tmp_path / "plug_good.py").write_text("import torch\nprint('noise')\n")
    (tmp_path / "plug_lib.py").write_text("raise ImportError('libx.so.4: cannot open it')\n")
    (tmp_path / "plug_dies.py").write_text("import os\nos.abort()\n")
    (tmp_path / "plug_hangs.py").write_text("import time\ntime.sleep(60)\n")
    names = ("plug_absent", "plug_dies", "plug_good", "plug_hangs", "plug_lib")
    facts = run(plugged(*names), env={"PYTHONPATH": str(tmp_path)})
    assert facts.torch_version == "2.6.0+stub"
    assert facts.plugins == ("plug_good",)
    assert facts.plugin_errors["plug_lib"] == "ImportError: libx.so.4: cannot open it (exit code 1)"
    assert "exit code -6" in facts.plugin_errors["plug_dies"]
    assert facts.plugin_errors["plug_hangs"] == "its import takes more than 2 s"
    assert "plug_absent" not in facts.plugin_errors


# --- sudo -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("allowed", "by"), [(True, "root"), (False, "user")])
def test_only_a_tool_that_needs_root_runs_under_sudo(
    tmp_path: Path, allowed: bool, by: str
) -> None:
    """Stands in for a user who may (or may not) use sudo: stubs of `id` and `sudo` lie first on PATH."""
    stubs = {
        "id": "echo 1000",
        "sudo": f'echo "$*" >>{tmp_path}/log\n[ "$1" = -n ] || exit 9\nshift\nAS=root exec "$@"'
        if allowed
        else "echo 'sudo: a password is required' >&2; exit 1",
        "tool": f'echo "$1 ${{AS:-user}}" >>{tmp_path}/ran',
    }
    for name, text in stubs.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    commands = (ProbeCommand("tool plain"), ProbeCommand("tool rooted", needs_root=True))
    vendors = {"x": replace(all_vendors()["cpu"], name="x", probe_commands=commands)}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    facts = run(vendors, spec=replace(SPEC, become=True, python="/bin/false"), env=env)
    assert (tmp_path / "ran").read_text() == f"plain user\nrooted {by}\n"
    refused = [warning for warning in facts.warnings if "sudo -n is refused" in warning]
    assert bool(refused) is not allowed
    (tmp_path / "ran").unlink()
    run(vendors, spec=replace(SPEC, python="/bin/false"), env=env)
    assert (tmp_path / "ran").read_text() == "plain user\nrooted user\n"


# --- the command ------------------------------------------------------------------------------------------


def hetrun(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hetrun", "probe", *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_changes_are_told_beside_the_facts_and_leave_the_exit_code_alone(tmp_path: Path) -> None:
    inventory, facts = tmp_path / "lab.yaml", tmp_path / "facts.json"
    text = "hosts:\n  one:\n    connection: local\n    python: /bin/false\n    cpu_devices: {}\n"
    inventory.write_text(text.format(1))
    assert hetrun(inventory, "-o", facts).returncode == 0
    inventory.write_text(text.format(2))
    changed = hetrun(inventory, "-o", facts, "--diff", facts, "--json")  # the old one is read first
    assert changed.returncode == 0
    assert json.loads(changed.stdout) == json.loads(facts.read_text())
    assert "+ one: new device: cpu" in changed.stderr
    same = hetrun(inventory, "-o", facts, "--diff", facts)
    assert (same.returncode, same.stdout) == (0, "")
    assert "nothing changed since" in same.stderr
    missing = hetrun(inventory, "-o", facts, "--diff", tmp_path / "no.json")
    assert missing.returncode == 2
    assert "no such file" in missing.stderr
