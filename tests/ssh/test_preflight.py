"""Preflight over real sshds: what is wrong with a host or between two is found, named and mended before anything starts."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun import store
from hetrun.errors import HetrunError, HostError, PreflightError
from hetrun.model import (
    DataKind,
    DataSpec,
    Finding,
    HostSpec,
    PreflightReport,
    RunOutcome,
    Severity,
)
from hetrun.preflight import SavedState, Wants, preflight, refuse
from hetrun.transport.bundle import build_bundle
from hetrun.transport.connect import open_transport
from hetrun.transport.jobs import HostJob, JobSetup
from tests.chain import argv, hetrun
from tests.ssh.lab import GATEWAY, Lab, call
from tests.ssh.launches import Hosts, lab_plan, launch_fake, run_dir
from tests.ssh.odd_hosts import PATH_OF_STUBS, add_nodes

pytestmark = pytest.mark.ssh
PUBLIC = "8.8.9.9"  # inside the lab's own network only
PASSED = ("public", "torch-versions", "readable")
# On PYTHONPATH it lets an interpreter say that its torch is an old one.
OLD_TORCH = """
import pathlib
read = pathlib.Path.read_text
def read_text(self, *args, **more):
    is_version = self.parts[-2:] == ("torch", "version.py")
    return "__version__ = '2.5.1'" if is_version else read(self, *args, **more)
pathlib.Path.read_text = read_text
"""


def look(*wants: Wants, skip: tuple[str, ...] = ()) -> PreflightReport:
    return preflight(wants, bundle=build_bundle(), skip=skip)


def quick(spec: HostSpec, **more: object) -> Wants:
    """Without the seconds that importing torch takes."""
    return Wants(spec=spec, import_torch=False, **more)  # type: ignore[arg-type]


def of(report: PreflightReport, check: str, host: str | None = None) -> list[Finding]:
    return [f for f in report.findings if f.check == check and host in (None, f.host)]


def bad(report: PreflightReport) -> list[tuple[str, str]]:
    return [(finding.host, finding.check) for finding in report.errors]


def test_hosts_that_are_fit_are_timed_pair_by_pair_and_left_as_they_were(hosts: Hosts) -> None:
    report = look(*(quick(host.spec()) for host in hosts))
    assert report.errors == ()
    assert refuse(report) is None
    names = [host.name for host in hosts]
    assert {(pair.a, pair.b) for pair in report.pairs} == {
        (a, b) for a in names for b in names if a != b
    }
    assert report.echo_bytes == 1 << 20
    assert all(0 < p.latency_s < 1 and p.bytes_per_s > 1e5 for p in report.pairs)
    assert [(host.addr, host.nic) for host in report.hosts] == [(h.addr, "eth0") for h in hosts]
    offsets = [host.clock_offset_s for host in report.hosts]
    assert all(offset_s is not None and abs(offset_s) < 2 for offset_s in offsets)
    assert all(host.torch for host in report.hosts)
    for host in hosts:
        host.wait_empty(2.0)


def test_eight_hosts_with_a_dead_and_a_silent_one_take_ten_seconds_and_the_rest_answer(
    hosts: Hosts,
) -> None:
    specs = [hosts[k % 3].spec(name=f"n{k}") for k in range(6)]
    dead = hosts[0].spec(name="dead", addr="10.77.0.99")
    with socket.create_server((GATEWAY, 0)) as server:  # accepts, and never says a word
        silent = hosts[0].spec(name="silent", addr=GATEWAY, port=server.getsockname()[1])
        report = look(*map(quick, [*specs, dead, silent]))
    assert bad(report) == [("dead", "reach"), ("silent", "reach")]
    assert report.seconds <= 10.0 or _is_loaded()
    assert len(report.pairs) == 6 * 5
    error = refuse(report)
    assert isinstance(error, HostError)
    assert (error.host, error.exit_code) == ("dead", 4)
    assert "10.77.0.99" in error.message
    assert "also silent: " in error.message


def _is_loaded() -> bool:
    """More work than cores: seconds say nothing then."""
    return float(Path("/proc/loadavg").read_text().split()[0]) > 2.0


def test_a_data_network_that_lets_one_way_through_names_both_ends(hosts: Hosts) -> None:
    """The second host cannot call the first one: a route of its own swallows what goes there."""
    for number, host in enumerate(hosts[:2], 1):
        host.inside("ip", "addr", "add", f"10.88.0.{number}/24", "dev", "eth0")
    hosts[1].inside("ip", "route", "add", "blackhole", "10.88.0.1/32")
    specs = [host.spec(data_addr=f"10.88.0.{n}") for n, host in enumerate(hosts[:2], 1)]
    try:
        report = look(*map(quick, specs))
    finally:
        for number, host in enumerate(hosts[:2], 1):
            host.inside("ip", "addr", "del", f"10.88.0.{number}/24", "dev", "eth0")
        hosts[1].inside("ip", "route", "del", "blackhole", "10.88.0.1/32")
    assert ("h2", "pairs") in bad(report)
    (finding,) = of(report, "pairs", "h2")
    assert finding.what.startswith("does not reach h1 (")
    assert finding.fix
    error = refuse(report)
    assert isinstance(error, PreflightError)
    assert error.exit_code == 3


@contextmanager
def skewed(folder: Path, seconds: int) -> Iterator[str]:
    """An interpreter whose clock is off."""
    path = folder / f"python-{seconds}"
    path.write_text(
        "#!/bin/sh\n"
        f'exec {sys.executable} -I -c "import time; real = time.time\n'
        f'time.time = lambda: real() + {seconds}\n$3"\n'
    )
    path.chmod(0o755)
    yield str(path)


@pytest.mark.parametrize(
    ("seconds", "severity"),
    [(-60, Severity.ERROR), (60, Severity.ERROR), (-5, Severity.WARNING)],
)
def test_clocks_that_differ_are_measured_and_refused_above_ten_seconds(
    hosts: Hosts, tmp_path: Path, seconds: int, severity: Severity
) -> None:
    with skewed(tmp_path, seconds) as python:
        report = look(quick(hosts[0].spec()), quick(hosts[1].spec(python=python)))
    (finding,) = of(report, "clock")
    assert (finding.host, finding.severity) == ("h2", severity)
    assert report.hosts[1].clock_offset_s == pytest.approx(seconds, abs=2.0)
    assert ("ahead of" if seconds > 0 else "behind") in finding.what


def test_a_name_that_means_something_else_there_is_refused(hosts: Hosts) -> None:
    """Each host calls itself 127.0.1.1, as Debian does, and knows no other."""
    (hosts[0].lab.folder / "names").write_text("")
    specs = [hosts[0].spec(), hosts[1].spec(data_addr="h2")]
    controller = Path("/etc/hosts").read_text()
    with named(f"{controller}\n{hosts[1].addr} h2\n", hosts[0].lab.folder):
        report = look(*map(quick, specs))
    assert ("h2", "address") in bad(report)
    assert "h2 is 10.77.0.2 for the controller, but 127.0.1.1 on this host" in str(report.findings)


@contextmanager
def named(text: str, folder: Path) -> Iterator[None]:
    """Give the controller another /etc/hosts."""
    path = folder / "hosts-of-controller"
    path.write_text(text)
    call("mount", "--bind", str(path), "/etc/hosts")
    try:
        yield
    finally:
        call("umount", "-l", "/etc/hosts")


def test_holders_of_devices_are_listed_and_left_alone(lab: Lab) -> None:
    host = lab.host(41)
    add_nodes(host, "fakechip0", "fakechip1")
    pid = str(host.init_pid)
    holds = subprocess.Popen(
        ["nsenter", "-t", pid, "-m", "-p", "--", "sh", "-c", "exec sleep 60 </dev/fakechip1"]
    )
    try:
        deadline_s = time.monotonic() + 10
        while "sleep" not in host.inside("ps", "-eo", "comm") and time.monotonic() < deadline_s:
            time.sleep(0.05)
        report = look(quick(host.spec(), nodes=("/dev/fakechip[0-9]*",)))
        assert holds.poll() is None
    finally:
        holds.kill()
        holds.wait()
        lab.drop(host)
    (finding,) = of(report, "busy")
    assert finding.severity is Severity.WARNING
    assert finding.what.startswith("sleep (pid ")
    assert finding.what.endswith("holds /dev/fakechip1")


def test_what_is_wrong_on_one_host_is_found_in_one_visit(lab: Lab, tmp_path: Path) -> None:
    """Everybody may write to a folder on PATH, few files, a small disk, another MTU, a missing text."""
    open_bin = tmp_path / "open-bin"
    open_bin.mkdir()
    open_bin.chmod(0o777)
    tmp_path.chmod(0o755)
    first = lab.host(42)
    second = lab.host(
        43, sshd=f"{PATH_OF_STUBS.replace('/opt/stubs', str(open_bin))}\nMaxStartups 50"
    )
    second.inside("ip", "link", "set", "eth0", "mtu", "1400")
    second.inside("sh", "-c", "mkdir /run/small && mount -t tmpfs -o size=8m none /run/small")
    call("prlimit", "--pid", str(second.init_pid), "--nofile=1024:4096")
    saves = SavedState(dir="/run/small/saved", num_bytes=64 << 20, shared=True)
    try:
        report = look(
            quick(first.spec(), saves=SavedState(dir=str(tmp_path), num_bytes=1, shared=True)),
            quick(second.spec(), readable=("/nowhere/text",), saves=saves),
        )
    finally:
        for host in (first, second):
            host.wait_empty(2.0)
            lab.drop(host)
    said = {(f.check, f.severity.value) for f in report.findings if f.host == "h43"}
    assert said >= {
        ("path", "warning"),
        ("open-files", "warning"),
        ("mtu", "warning"),
        ("disk", "error"),
        ("readable", "error"),
        ("shared", "error"),
    }
    assert "cannot read /nowhere/text" in of(report, "readable")[0].what
    assert not list(tmp_path.glob(".hetrun-*"))  # our marks are gone again
    assert all(f.fix for f in report.findings if f.severity is Severity.ERROR)


def test_launch_refuses_with_exit_code_3_and_goes_on_where_it_was_told_to(
    hosts: Hosts, tmp_path: Path
) -> None:
    plan = lab_plan(hosts, tmp_path / "meet")
    with skewed(tmp_path, 30) as python:
        off = replace(plan, hosts=(plan.hosts[0], hosts[1].spec(python=python)))
        with pytest.raises(HetrunError, match="s ahead of ours") as caught:
            launch_fake(off, tmp_path)
    assert caught.value.exit_code == 3
    run = run_dir(tmp_path)
    outcome = store.load(RunOutcome, run / "launch.json")
    assert (outcome.exit_code, outcome.status, outcome.failures[0].host) == (3, "failed", "h2")
    kept = json.loads((run / "preflight.json").read_text())
    assert [f["check"] for f in kept["findings"] if f["severity"] == "error"] == ["clock"]
    for host in hosts:
        host.wait_empty(2.0)


def test_skipped_checks_are_recorded_with_the_run(hosts: Hosts, tmp_path: Path) -> None:
    plan = lab_plan(hosts, tmp_path / "meet")
    data = DataSpec(
        seq_len=16, kind=DataKind.TEXT, path="/nowhere/text"
    )  # which fake ranks read not
    plan = replace(plan, recipe=replace(plan.recipe, data=data))
    (tmp_path / "sitecustomize.py").write_text(OLD_TORCH)
    odd = hosts[1].spec(data_addr=PUBLIC, env={"PYTHONPATH": str(tmp_path)})
    off = replace(plan, hosts=(plan.hosts[0], odd))
    hosts[1].inside("ip", "addr", "add", f"{PUBLIC}/32", "dev", "eth0")
    hosts[0].inside("ip", "route", "add", f"{PUBLIC}/32", "dev", "eth0")
    try:
        with pytest.raises(PreflightError, match="is a public address") as caught:
            launch_fake(off, tmp_path)
        outcome = launch_fake(off, tmp_path / "again", skip=PASSED)
    finally:
        hosts[1].inside("ip", "addr", "del", f"{PUBLIC}/32", "dev", "eth0")
        hosts[0].inside("ip", "route", "del", f"{PUBLIC}/32", "dev", "eth0")
    assert "torch 2.5.1 cannot meet torch" in caught.value.message
    assert (outcome.status, outcome.skipped) == ("done", PASSED)
    for check in outcome.skipped:
        assert any(f"{check} (skipped)" in warning for warning in outcome.warnings)


def _inventory(folder: Path, lab: Lab, lines: str) -> Path:
    path = folder / "lab.yaml"
    keys = f"identity: {lab.folder}/id, known_hosts: {lab.folder}/known_hosts"
    path.write_text(f"defaults: {{ user: root, {keys} }}\nhosts:\n{lines}")
    return path


def test_doctor_reports_all_hosts_and_says_by_its_exit_code_what_is_wrong(
    lab: Lab, hosts: Hosts, tmp_path: Path
) -> None:
    odd = f"  odd: {{ addr: {hosts[0].addr}, python: /nowhere/python }}\n"
    path = _inventory(tmp_path, lab, odd)
    result = hetrun("doctor", path, cwd=tmp_path)
    assert result.returncode == 3
    assert "error: python: odd: no interpreter '/nowhere/python' there" in result.stderr
    assert "hint: set `python` of the host to an absolute path" in result.stderr
    path = _inventory(tmp_path, lab, f"{odd}  dead: {{ addr: 10.77.0.99 }}\n")
    result = hetrun("doctor", path, "--json", cwd=tmp_path)
    assert result.returncode == 4
    found = json.loads(result.stdout)
    assert {f["host"]: f["check"] for f in found["findings"]} == {"odd": "python", "dead": "reach"}
    wrong = hetrun("doctor", path, "--skip", "clocks", cwd=tmp_path)
    assert (wrong.returncode, "did you mean clock" in wrong.stderr) == (2, True)


def test_ctrl_c_while_hosts_are_called_ends_at_once_and_leaves_no_child(
    lab: Lab, hosts: Hosts, tmp_path: Path
) -> None:
    with socket.create_server((GATEWAY, 0)) as server:
        port = server.getsockname()[1]
        path = _inventory(tmp_path, lab, f"  mute: {{ addr: {GATEWAY}, port: {port} }}\n")
        process = subprocess.Popen(
            argv("doctor", path), cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            with server.accept()[0]:  # it has called
                process.send_signal(signal.SIGINT)
                began_s = time.monotonic()
                _, said = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert time.monotonic() - began_s < 5.0
    assert b"Traceback" not in said
    group = subprocess.run(["pgrep", "-s", str(process.pid)], stdout=subprocess.PIPE, check=False)
    assert group.stdout == b""


def test_a_port_that_an_older_run_holds_is_named_with_its_owner(hosts: Hosts) -> None:
    code = "import socket, sys; s = socket.create_server(('', 31234)); print('up', flush=True); sys.stdin.read()"
    inside = ["nsenter", "-t", str(hosts[0].init_pid), "-n", "-m", "-p", "--"]
    held = subprocess.Popen(
        [*inside, sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert held.stdout is not None
        held.stdout.readline()
        setup = JobSetup(run_id="port", bundle=build_bundle())
        transport = open_transport(hosts[0].spec())
        job = HostJob(transport, setup)
        try:
            with pytest.raises(PreflightError, match=r"are all taken: 31234 by python\S* \(pid"):
                job.free_port(hosts[0].addr, [31234])
            assert job.free_port(hosts[0].addr, [31234, 31235]) == 31235
            job.goodbye(keep=False)
        finally:
            job.close()
            transport.close()
    finally:
        held.communicate(timeout=20)  # the end of its input is its own end
