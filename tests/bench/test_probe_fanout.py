"""How long one command takes on 64 hosts: hetrun's fan-out beside OpenSSH, in the same run.

64 sshds with an address each live in one host of the lab. Every way runs `hostname` on all of them; the ways take
turns, and the least of the rounds counts. Cold: connections are made and closed. Warm: they are open already.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from hetrun.model import HostSpec
from hetrun.transport import CommandResult
from hetrun.transport.connect import open_transport
from hetrun.transport.fanout import MAX_AT_ONCE, on_all
from hetrun.transport.script import run_script
from hetrun.transport.threads import call_all
from tests.ssh.lab import Lab, LabHost, can_build

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]
NUM_HOSTS = 64
ROUNDS = 5
LIMIT_S = 60.0


@dataclass(frozen=True)
class Farm:
    """Many sshds in one host."""

    host: LabHost
    specs: tuple[HostSpec, ...]

    def ssh(self, spec: HostSpec, *options: str) -> list[str]:
        """Command line of the OpenSSH client for one of them."""
        fixed = ("-F", "none", "-i", str(spec.identity), "-o", "BatchMode=yes")
        known = ("-o", f"UserKnownHostsFile={spec.known_hosts}", "-o", "StrictHostKeyChecking=yes")
        return ["ssh", *fixed, *known, *options, f"root@{spec.addr}"]


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    if not can_build():
        pytest.skip("needs root, iproute2, util-linux and sshd")
    lab = Lab(tmp_path_factory.mktemp("farm"))
    host = lab.host(1, port=2222, shell="/bin/sh")  # noqa: S604 - a login shell
    config = (host.folder / "sshd_config").read_text().replace("Port 2222\n", "Port 22\n")
    key = " ".join(Path(f"{host.folder}/host_key.pub").read_text().split()[:2])
    specs, starts, known = [], [], [(lab.folder / "known_hosts").read_text().rstrip("\n")]
    for number in range(NUM_HOSTS):
        addr = f"10.77.1.{number + 1}"
        path = host.folder / f"sshd_config.{number}"
        path.write_text(f"{config}\nListenAddress {addr}\n")
        starts.append(f"ip addr add {addr}/16 dev eth0; /usr/sbin/sshd -f {path}")
        known.append(f"{addr} {key}")
        specs.append(host.spec(name=f"n{number}", addr=addr, port=22))
    (lab.folder / "known_hosts").write_text("\n".join(known) + "\n")
    subprocess.run(["ip", "addr", "add", "10.77.1.254/24", "dev", "br0"], check=True, timeout=20)
    host.inside("sh", "-ec", "\n".join(starts))
    listeners = host.inside("ss", "-Hltn", "sport", "=", ":22").splitlines()
    assert len(listeners) == NUM_HOSTS  # else all are served by one sshd, which is another bench
    yield Farm(host=host, specs=tuple(specs))
    lab.close()


@pytest.fixture
def masters() -> Iterator[Path]:
    """A folder whose name is short: a socket's path has 108 characters, and ssh adds 17 for a moment."""
    with tempfile.TemporaryDirectory(prefix="cm") as folder:
        yield Path(folder)


def _hetrun_cold(farm: Farm) -> None:
    answers = on_all(farm.specs, lambda t: run_script(t, "hostname", timeout_s=LIMIT_S))
    failed = [answer for answer in answers.values() if not isinstance(answer, CommandResult)]
    assert failed == []
    assert {a.stdout for a in answers.values() if isinstance(a, CommandResult)} == {b"h1\n"}


def _openssh(farm: Farm, options: Callable[[HostSpec], Sequence[str]]) -> None:
    with tempfile.TemporaryFile() as errors:  # a file: a master that stays keeps it open
        clients = [
            subprocess.Popen(
                [*farm.ssh(spec, *options(spec)), "hostname"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            for spec in farm.specs
        ]
        said = {client.communicate(timeout=LIMIT_S)[0] for client in clients}
        errors.seek(0)
        assert said == {b"h1\n"}, errors.read()[-2000:]


def _timed(function: Callable[[], None]) -> float:
    started_s = time.monotonic()
    function()
    return time.monotonic() - started_s


def _shown(title: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    least = {name: min(values) for name, values in seconds.items()}
    print(f"\n{title}, {NUM_HOSTS} hosts, least of {ROUNDS}:")  # noqa: T201 - a bench talks
    for name, value in least.items():
        spread = max(seconds[name]) - value
        print(f"  {name:32} {value:6.2f} s  (+{spread:.2f} s at worst)")  # noqa: T201
    return least


def test_cold_fanout_is_faster_than_openssh_processes(farm: Farm, masters: Path) -> None:
    seconds: dict[str, list[float]] = {
        "hetrun": [],
        "OpenSSH": [],
        "OpenSSH, new ControlMaster": [],
    }
    for number in range(ROUNDS):
        seconds["hetrun"].append(_timed(partial(_hetrun_cold, farm)))
        seconds["OpenSSH"].append(_timed(partial(_openssh, farm, lambda _: ())))
        folder = masters / str(number)
        folder.mkdir()
        new = partial(_master, folder, persist="yes")
        seconds["OpenSSH, new ControlMaster"].append(_timed(partial(_openssh, farm, new)))
        _end_masters(farm, folder)
    least = _shown("connect and run", seconds)
    print(f"  ratio hetrun / OpenSSH {least['hetrun'] / least['OpenSSH']:.2f}")  # noqa: T201
    assert least["hetrun"] <= least["OpenSSH"]


def test_second_command_on_open_connections_is_not_slower_than_a_warm_master(
    farm: Farm, masters: Path
) -> None:
    transports = {spec.name: open_transport(spec) for spec in farm.specs}
    options = partial(_master, masters, persist="yes")
    say = {
        name: partial(run_script, t, "hostname", timeout_s=LIMIT_S)
        for name, t in transports.items()
    }

    def second() -> None:
        futures = call_all(say, at_once=MAX_AT_ONCE)
        assert {future.result(LIMIT_S).stdout for future in futures.values()} == {b"h1\n"}

    try:
        second()
        _openssh(farm, options)
        seconds: dict[str, list[float]] = {"hetrun": [], "OpenSSH, warm ControlMaster": []}
        for _ in range(ROUNDS):
            seconds["hetrun"].append(_timed(second))
            warm = _timed(partial(_openssh, farm, options))
            seconds["OpenSSH, warm ControlMaster"].append(warm)
    finally:
        for transport in transports.values():
            transport.close()
        _end_masters(farm, masters)
    least = _shown("run on open connections", seconds)
    ratio = least["hetrun"] / least["OpenSSH, warm ControlMaster"]
    print(f"  ratio hetrun / warm ControlMaster {ratio:.2f}")  # noqa: T201
    assert ratio <= 1.0


def test_64_names_behind_one_sshd_all_answer(farm: Farm) -> None:
    """sshd drops connections at random once ten of them have not logged in yet (MaxStartups 10:30:100)."""
    specs = [farm.host.spec(name=f"same{number}") for number in range(NUM_HOSTS)]
    for number in range(3):
        started_s = time.monotonic()
        answers = on_all(specs, lambda t: run_script(t, "hostname", timeout_s=LIMIT_S))
        failed = [str(a) for a in answers.values() if not isinstance(a, CommandResult)]
        took_s = time.monotonic() - started_s
        print(f"\n64 names, one sshd, try {number}: {len(failed)} failures, {took_s:.2f} s")  # noqa: T201
        assert failed == []
        assert len(answers) == NUM_HOSTS


def _master(folder: Path, spec: HostSpec, *, persist: str) -> tuple[str, ...]:
    path = folder / spec.name
    return (
        *("-o", "ControlMaster=auto", "-o", f"ControlPath={path}"),
        *("-o", f"ControlPersist={persist}"),
    )


def _end_masters(farm: Farm, folder: Path) -> None:
    exits = [
        subprocess.Popen(
            farm.ssh(spec, "-o", f"ControlPath={folder / spec.name}", "-O", "exit"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for spec in farm.specs
    ]
    for client in exits:
        client.wait(timeout=LIMIT_S)
