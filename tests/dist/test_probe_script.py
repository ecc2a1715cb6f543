"""The probe's script under real shells: whatever a tool does, the answer comes in time and nothing stays."""

import os
import secrets
import shutil
import subprocess
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.model import Connection, HostFacts, HostSpec, Inventory
from hetrun.probe import parse_host, probe, script
from hetrun.probe.answer import Answer, read_answer
from hetrun.vendors import ProbeCommand, Vendor, all_vendors

pytestmark = pytest.mark.dist
NONCE = secrets.token_hex(8)  # one per process: the script makes a folder of this name
SPEC = HostSpec(name="here", connection=Connection.LOCAL)
SHELLS = [["dash"], ["bash", "--posix"], ["busybox", "sh"]]


@pytest.fixture(params=SHELLS, ids=lambda words: words[0])
def shell(request: pytest.FixtureRequest) -> list[str]:
    words: list[str] = request.param
    if shutil.which(words[0]) is None:
        pytest.skip(f"no {words[0]} here")
    return words


@pytest.fixture
def path_without(tmp_path: Path) -> Callable[..., str]:
    """Make a PATH that lacks some tools."""

    def make(*names: str) -> str:
        folder = tmp_path / "bin"
        folder.mkdir()
        for source in map(Path, ("/bin", "/usr/bin")):
            for tool in source.iterdir():
                target = folder / tool.name
                if tool.name not in names and not target.is_symlink():
                    target.symlink_to(tool)
        return str(folder)

    return make


def fake_vendor(*commands: str) -> Mapping[str, Vendor]:
    asked = tuple(ProbeCommand(command=command) for command in commands)
    return {"fake": replace(all_vendors()["cpu"], name="fake", probe_commands=asked)}


def run(
    shell: list[str],
    vendors: Mapping[str, Vendor],
    *,
    spec: HostSpec = SPEC,
    env: Mapping[str, str] | None = None,
) -> tuple[Answer, HostFacts]:
    text = script.probe_script(spec, vendors, nonce=NONCE)
    done = subprocess.run(
        shell,
        input=b"{\n" + text.encode() + b"\n}\n",
        capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": "/root", **(env or {})},
        timeout=50,
        check=True,
    )
    assert done.stderr == b""
    facts = parse_host(spec, done.stdout, nonce=NONCE, received_s=time.time())
    return read_answer(done.stdout, nonce=NONCE), facts


def processes(mark: str) -> list[str]:
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in listing.stdout.splitlines() if mark in line and "ps -eo" not in line]


def test_this_machine_is_described(shell: list[str]) -> None:
    _, facts = run(shell, all_vendors())
    assert facts.error is None
    assert facts.num_cores == len(os.sched_getaffinity(0))
    assert facts.python_version is not None
    assert facts.memory_bytes is not None
    assert facts.disk_free_bytes is not None
    assert "lo" in {nic.name for nic in facts.nics}
    assert abs(facts.clock_offset_s or 99) < 5
    assert facts.devices


def test_streams_and_exit_code_of_a_tool_stay_apart(shell: list[str]) -> None:
    answer, _ = run(shell, fake_vendor("cat; echo out; echo err >&2; exit 3", "nonesuch -q"))
    section = answer.section("tool-fake-0")
    assert (section.rc, section.stdout, section.stderr) == (3, b"out\n", b"err\n")
    assert answer.section("tool-fake-1").rc == 127


@pytest.mark.parametrize("missing", [(), ("timeout",), ("timeout", "setsid")])
def test_hanging_tool_costs_its_time_limit_and_nothing_else(
    shell: list[str],
    missing: tuple[str, ...],
    tmp_path: Path,
    path_without: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script, "TOOL_TIMEOUT_S", 1)
    env = {"PATH": path_without(*missing)} if missing else {}
    sleep = f"sleep 31.{zlib.crc32(str(tmp_path).encode())}"  # one that no other test knows
    hang = f"trap '' TERM; echo half; {sleep}"
    started_s = time.monotonic()
    answer, facts = run(shell, fake_vendor(hang, "echo after"), env=env)
    assert time.monotonic() - started_s < 28  # 3 s on an idle machine; less than the tool takes
    assert (answer.section("tool-fake-0").rc in (124, 137), facts.error) == (True, None)
    assert answer.section("tool-fake-0").stdout == b"half\n"
    assert answer.section("tool-fake-1").stdout == b"after\n"
    if "setsid" not in missing:
        assert processes(sleep) == []


def test_flooding_tool_is_cut(shell: list[str]) -> None:
    answer, _ = run(shell, fake_vendor("yes"))
    section = answer.section("tool-fake-0")
    assert section.cut
    assert len(section.stdout) == script.MAX_STDOUT


def test_nothing_stays_on_the_host(
    shell: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "BASE_TIMEOUT_S", 4242)
    run(shell, {}, env={"TMPDIR": str(tmp_path)})
    left = [*Path("/dev/shm").glob(f"hetrun-probe.{NONCE}*"), *tmp_path.iterdir()]
    assert left == []
    deadline_s = time.monotonic() + 20
    while processes("sleep 4244") and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert processes("sleep 4244") == []  # who watches a quick command goes with it


def test_values_reach_the_interpreter_unchanged_and_stay_out_of_process_lists(
    shell: list[str], tmp_path: Path
) -> None:
    nasty = 'it\'s $(touch x); `y` "z" \\ \n*'
    python = tmp_path / "my python"
    python.write_text(
        '#!/bin/sh\nenv >"$A_FILE"; ps -eo args >"$A_FILE.ps"\n'
        'echo \'{"path": "/p", "version": "3.11.0"}\'\n'
    )
    python.chmod(0o755)
    activate = tmp_path / "env it's.sh"
    activate.write_text("echo noise; export FROM_SCRIPT=yes\n")
    spec = replace(
        SPEC,
        python=str(python),
        activate=str(activate),
        env={"A_VALUE": nasty, "A_FILE": str(tmp_path / "seen")},
    )
    _, facts = run(shell, {}, spec=spec)
    assert facts.python_version == "3.11.0"
    seen = (tmp_path / "seen").read_text()
    assert f"A_VALUE={nasty}\n" in seen
    assert "FROM_SCRIPT=yes" in seen
    assert "touch x" not in (tmp_path / "seen.ps").read_text()


def test_activation_script_that_is_not_there_is_told(shell: list[str]) -> None:
    _, facts = run(shell, {}, spec=replace(SPEC, activate="/no/env.sh"))
    assert facts.torch_error == "ended with 1: cannot read /no/env.sh"


def test_emulated_inventory_is_probed_over_the_local_transport() -> None:
    facts = probe(Inventory(name="here", hosts=(SPEC, replace(SPEC, name="too", cpu_devices=2))))
    assert [host.error for host in facts.hosts] == [None, None]
    assert [len(host.devices) for host in facts.hosts] == [1, 2]
