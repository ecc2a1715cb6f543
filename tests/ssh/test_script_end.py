"""What a script started ends with it, on the host's own account: deadline, killed controller, cut link, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetrun import store
from hetrun.errors import HostError
from hetrun.model import Inventory
from hetrun.transport.connect import open_transport
from hetrun.transport.script import run_script
from tests.ssh.lab import LabHost

pytestmark = pytest.mark.ssh
Hosts = tuple[LabHost, LabHost, LabHost]

# A plain child, one that ignores SIGTERM, and one that has left its parent and its session.
_STUBBORN = (
    "sleep 301 & "
    "sh -c 'trap \"\" TERM HUP INT; while :; do sleep 302; done' & "
    "(setsid sh -c 'trap \"\" TERM; sleep 303; sleep 304' &) & "
)
_HANGS = _STUBBORN + "sleep 305"
_CONTROLLER = """
import sys
from hetrun import store
from hetrun.model import Inventory
from hetrun.transport.connect import open_transport
from hetrun.transport.script import run_script
from pathlib import Path
spec = store.load(Inventory, Path(sys.argv[1])).hosts[0]
run_script(open_transport(spec), sys.argv[2], timeout_s=float(sys.argv[3]))
"""


def _run(host: LabHost, script: str, timeout_s: float = 20.0) -> bytes:
    transport = open_transport(host.spec())
    try:
        return run_script(transport, script, timeout_s=timeout_s).stdout
    finally:
        transport.close()


def _until_it_runs(host: LabHost, what: str) -> None:
    deadline_s = time.monotonic() + 20
    while not any(what in line for line in host.processes().values()):
        assert time.monotonic() < deadline_s, host.processes()
        time.sleep(0.05)


def _controller(host: LabHost, folder: Path, *, timeout_s: float) -> subprocess.Popen[bytes]:
    path = folder / "inventory.json"
    store.save(Inventory(name="lab", hosts=(host.spec(),)), path)
    args = [sys.executable, "-c", _CONTROLLER, str(path), _HANGS, str(timeout_s)]
    process = subprocess.Popen(args, stderr=subprocess.DEVNULL)
    _until_it_runs(host, "sleep 305")
    return process


def test_all_that_a_script_started_ends_at_its_deadline(hosts: Hosts) -> None:
    with pytest.raises(HostError, match="did not finish within 1 s"):
        _run(hosts[0], _HANGS, timeout_s=1.0)
    hosts[0].wait_empty(5.0)


def test_all_that_a_script_started_ends_when_it_is_through(hosts: Hosts) -> None:
    assert _run(hosts[0], f"{{ {_STUBBORN} }} >/dev/null 2>&1; echo done") == b"done\n"
    hosts[0].wait_empty(2.0)


def test_a_killed_controller_leaves_nothing(hosts: Hosts, tmp_path: Path) -> None:
    process = _controller(hosts[0], tmp_path, timeout_s=100)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    hosts[0].wait_empty(5.0)


def test_behind_a_cut_link_the_host_ends_it_by_itself(hosts: Hosts, tmp_path: Path) -> None:
    process = _controller(hosts[0], tmp_path, timeout_s=3)
    hosts[0].link(up=False)
    try:
        deadline_s = time.monotonic() + 15
        while any("sleep 30" in line for line in hosts[0].processes().values()):
            assert time.monotonic() < deadline_s, hosts[0].processes()
            time.sleep(0.05)
    finally:
        hosts[0].link(up=True)
        process.kill()
        process.wait()
        hosts[0].drop_sessions()


@pytest.mark.parametrize("shell", ["/bin/dash", "/bin/bash", "/usr/bin/busybox"])
def test_any_sh_ends_a_script_and_keeps_its_exit_code(hosts: Hosts, shell: str) -> None:
    real = Path("/bin/sh").resolve()
    if not Path(shell).exists():
        pytest.skip(f"no {shell} here")
    hosts[1].inside("mount", "--bind", str(Path(shell).resolve()), str(real))
    try:
        transport = open_transport(hosts[1].spec())
        result = run_script(transport, "echo out; echo err >&2; cat; exit 7", timeout_s=20)
        transport.close()
        assert (result.rc, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
        with pytest.raises(HostError):
            _run(hosts[1], _HANGS, timeout_s=1.0)
        hosts[1].wait_empty(8.0)
    finally:
        hosts[1].inside("umount", str(real))
