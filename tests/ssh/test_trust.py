"""`hetrun hosts trust`: keys are pinned by a person's word only, hop by hop; one that changed never is."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from hetrun.inventory import load_inventory
from hetrun.transport.connect import open_transport
from hetrun.transport.script import run_script
from tests.chain import argv, hetrun
from tests.ssh.lab import Lab
from tests.ssh.launches import Hosts

pytestmark = pytest.mark.ssh
FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


def inventory(folder: Path, lab: Lab, hosts: Hosts) -> Path:
    """The third host, behind the first one; no known_hosts but hetrun's own."""
    path = folder / "lab.yaml"
    path.write_text(
        f"defaults: {{ user: root, identity: {lab.folder}/id }}\n"
        f"hosts: {{ far: {{ addr: {hosts[2].addr}, port: {hosts[2].port}, jump: root@{hosts[0].addr} }} }}\n"
    )
    return path


def shown(lab: Lab, host_key: Path) -> str:
    said = subprocess.run(
        ["ssh-keygen", "-lf", str(host_key)], capture_output=True, text=True, check=True, timeout=20
    )
    found = FINGERPRINT.search(said.stdout)
    assert found
    return found[0]


def test_without_a_person_nothing_is_pinned_and_fingerprints_are_told(
    lab: Lab, hosts: Hosts, tmp_path: Path
) -> None:
    path = inventory(tmp_path, lab, hosts)
    result = hetrun("hosts", "trust", path, cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path))
    assert result.returncode == 4
    jump = shown(lab, hosts[0].folder / "host_key.pub")
    assert f"jump host {hosts[0].addr} ({hosts[0].addr}) shows ssh-ed25519 {jump}" in result.stderr
    assert "--fingerprint" in result.stderr
    assert not (tmp_path / "hetrun").exists()


def test_fingerprints_that_are_given_pin_every_hop_and_nothing_else(
    lab: Lab, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, env = inventory(tmp_path, lab, hosts), {"XDG_CONFIG_HOME": str(tmp_path)}
    jump, far = (shown(lab, hosts[n].folder / "host_key.pub") for n in (0, 2))
    half = hetrun("hosts", "trust", path, "--fingerprint", jump, cwd=tmp_path, **env)
    assert half.returncode == 4
    assert f"far ([{hosts[2].addr}]:2203) shows ssh-ed25519 {far}" in half.stderr
    whole = hetrun("hosts", "trust", path, "--fingerprint", far, cwd=tmp_path, **env)
    assert (whole.returncode, "far: pinned" in whole.stderr) == (0, True)
    pins = tmp_path / "hetrun/known_hosts"
    assert pins.stat().st_mode & 0o777 == 0o600
    assert [line.split()[0] for line in pins.read_text().splitlines()] == [
        hosts[0].addr,
        f"[{hosts[2].addr}]:2203",
    ]
    again = hetrun("hosts", "trust", path, cwd=tmp_path, **env)
    assert (again.returncode, "far: known already" in again.stderr) == (0, True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    transport = open_transport(load_inventory(path).hosts[0])
    try:
        assert run_script(transport, "hostname", timeout_s=20).stdout == b"h3\n"
    finally:
        transport.close()


@pytest.mark.parametrize("kind", ["ssh-ed25519", "ssh-rsa"])
def test_a_changed_key_is_a_hard_stop_even_with_its_fingerprint(
    lab: Lab, hosts: Hosts, tmp_path: Path, kind: str
) -> None:
    """Also where the known key is of another kind, which an impostor does not have."""
    path, env = inventory(tmp_path, lab, hosts), {"XDG_CONFIG_HOME": str(tmp_path)}
    old = tmp_path / "old"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind.removeprefix("ssh-"), "-N", "", "-f", str(old)],
        check=True,
        timeout=20,
    )
    pins = tmp_path / "hetrun/known_hosts"
    pins.parent.mkdir()
    key = " ".join((tmp_path / "old.pub").read_text().split()[:2])
    pins.write_text(f"{hosts[0].addr} {key}\n")
    before = pins.read_text()
    new = shown(lab, hosts[0].folder / "host_key.pub")
    result = hetrun("hosts", "trust", path, "--fingerprint", new, cwd=tmp_path, **env)
    assert result.returncode == 4
    assert f"has CHANGED: known is {kind} SHA256:" in result.stderr
    assert pins.read_text() == before


@pytest.mark.parametrize(("typed", "rc"), [("yes", 4), ("10.77.0.1", 0)])
def test_a_person_types_the_name_of_the_host(
    lab: Lab, hosts: Hosts, tmp_path: Path, typed: str, rc: int
) -> None:
    (tmp_path / "one.yaml").write_text(
        f"hosts: {{ '10.77.0.1': {{ user: root, identity: {lab.folder}/id }} }}\n"
    )
    master, slave = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key != "CI"}
    process = subprocess.Popen(
        argv("hosts", "trust", tmp_path / "one.yaml"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=tmp_path,
        env={**env, "XDG_CONFIG_HOME": str(tmp_path), "COLUMNS": "200"},
    )
    os.close(slave)
    said = b""
    try:
        while b"to trust this key" not in said:
            said += os.read(master, 4096)
        os.write(master, typed.encode() + b"\n")
        assert process.wait(timeout=30) == rc
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert shown(lab, hosts[0].folder / "host_key.pub").encode() in said
    assert (tmp_path / "hetrun/known_hosts").exists() == (rc == 0)
