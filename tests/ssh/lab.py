"""Hosts on one machine: each in network, UTS, mount and PID namespaces of its own, with an sshd as its first process.

All namespaces are anonymous. They end with their processes, and those end with the test process (PR_SET_PDEATHSIG),
so a killed test run leaves nothing and two runs cannot meet. The main thread of the tests, and threads and
processes it starts later, live in a network of their own that holds the bridge.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetrun.model import EmulatedChip, HostSpec

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_UNSHARE = (
    *("unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc"),
    "--kill-child=KILL",
)
GATEWAY = "10.77.0.254"


def die_with_parent() -> None:
    """Run in a child before exec: a killed parent takes it along."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def can_build() -> bool:
    """Say whether this machine lets us make such hosts."""
    tools = ("ip", "unshare", "nsenter", "mount", "ssh-keygen")
    return os.geteuid() == 0 and all(map(shutil.which, tools)) and Path("/usr/sbin/sshd").exists()


def call(*argv: str) -> str:
    """Run a tool of the test itself."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def descendants(pid: int) -> dict[int, str]:
    """Processes below one, whatever their namespace: pid and command line."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = parent(int(entry.name))
    found: dict[int, str] = {}
    todo = [pid]
    while todo:
        above = todo.pop()
        for child in [child for child, its in parents.items() if its == above]:
            todo.append(child)
            with contextlib.suppress(OSError):
                line = (Path("/proc") / str(child) / "cmdline").read_bytes()
                found[child] = line.replace(b"\0", b" ").decode(errors="replace")
    return found


def parent(pid: int) -> int:
    """Pid of the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@dataclass
class LabHost:
    """One emulated machine."""

    lab: Lab
    name: str
    addr: str
    port: int
    folder: Path
    process: subprocess.Popen[bytes]
    links: list[str] = field(default_factory=list)

    def spec(self, **changes: object) -> HostSpec:
        """Inventory entry with keys that work."""
        values: dict[str, object] = {
            "name": self.name,
            "addr": self.addr,
            "port": self.port,
            "user": "root",
            "identity": str(self.lab.folder / "id"),
            "known_hosts": str(self.lab.folder / "known_hosts"),
            "python": sys.executable,
        }
        return HostSpec(**{**values, **changes})  # type: ignore[arg-type]

    @property
    def init_pid(self) -> int:
        """Pid of its sshd, as seen from here."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def processes(self) -> dict[int, str]:
        """All processes of the host but its own sshd."""
        return descendants(self.init_pid)

    def wait_empty(self, timeout_s: float) -> float:
        """Return the seconds until nothing but sshd is left; AssertionError with the rest if it takes longer."""
        started_s = time.monotonic()
        while left := self.processes():
            if time.monotonic() - started_s > timeout_s:
                raise AssertionError(f"{self.name} still runs {left}")
            time.sleep(0.02)
        return time.monotonic() - started_s

    def start_file(self, name: str, text: str) -> None:
        """Write a file into its home, such as .bashrc."""
        (self.folder / "home" / name).write_text(text)

    def link(self, up: bool) -> None:
        """Plug the cable in or out."""
        for link in self.links:
            call("ip", "link", "set", link, "up" if up else "down")

    def inside(self, *argv: str) -> str:
        """Run a command in its namespaces."""
        return call("nsenter", "-t", str(self.init_pid), "-n", "-u", "-m", "-p", "--", *argv)

    def drop_sessions(self) -> None:
        """End what a cut link left behind: sshd itself would wait for minutes."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """Pull the power plug."""
        self.process.kill()
        self.process.wait(timeout=10)


class Lab:
    """A bridge with hosts on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: list[LabHost] = []
        self._outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        if _LIBC.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        call("ip", "link", "set", "lo", "up")
        call("ip", "link", "add", "br0", "type", "bridge")
        call("ip", "addr", "add", f"{GATEWAY}/24", "dev", "br0")
        call("ip", "link", "set", "br0", "up")
        make_key(folder / "id")
        make_key(folder / "other_id")
        (folder / "known_hosts").write_text("")

    def host(
        self,
        number: int,
        *,
        port: int = 22,
        shell: str = "/bin/bash",
        sshd: str = "",
        nic: str = "eth0",
        drop: str = "",
    ) -> LabHost:
        """Start a host with address 10.77.0.<number>, without the capability in `drop`."""
        name, addr = f"h{number}", f"10.77.0.{number}"
        folder = self.folder / f"{name}-{len(self.hosts)}"
        (folder / "home").mkdir(parents=True)
        make_key(folder / "host_key")
        _write_config(folder, name=name, port=port, shell=shell, sshd=sshd, drop=drop)
        (folder / "authorized_keys").write_text((self.folder / "id.pub").read_text())
        with (folder / "sshd.log").open("wb") as errors:
            process = subprocess.Popen(
                [*_UNSHARE, "/bin/sh", str(folder / "init.sh")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                preexec_fn=die_with_parent,
            )
        host = LabHost(self, name, addr, port, folder, process)
        self.hosts.append(host)
        own = Path("/proc/thread-self/ns/net").readlink()
        _until(lambda: Path(f"/proc/{process.pid}/ns/net").readlink() != own, f"{name} has a net")
        self.plug(host, nic, addr)
        self.trust(host)
        _until(lambda: _answers(addr, port), f"sshd of {name}")
        return host

    def plug(self, host: LabHost, nic: str, addr: str) -> None:
        """Give a host one more interface on the bridge."""
        link = f"v{host.name}{len(host.links)}x{len(self.hosts)}"
        pid = str(host.process.pid)
        call("ip", "link", "add", link, "type", "veth", "peer", "name", nic, "netns", pid)
        call("ip", "link", "set", link, "master", "br0", "up")
        inside = ("nsenter", "-t", pid, "-n", "ip")
        call(*inside, "addr", "add", f"{addr}/24", "dev", nic)
        call(*inside, "link", "set", nic, "up")
        call(*inside, "link", "set", "lo", "up")
        host.links.append(link)

    def trust(self, host: LabHost, *, key: Path | None = None) -> None:
        """Put a host's key, or another one in its place, into the lab's known_hosts."""
        name = host.addr if host.port == 22 else f"[{host.addr}]:{host.port}"
        public = Path(f"{key or host.folder / 'host_key'}.pub").read_text().split()[:2]
        known = self.folder / "known_hosts"
        lines = [line for line in known.read_text().splitlines() if line.split()[0] != name]
        known.write_text("\n".join([*lines, f"{name} {' '.join(public)}"]) + "\n")

    def drop(self, host: LabHost) -> None:
        """Stop a host and forget it."""
        host.stop()
        self.hosts.remove(host)

    def close(self) -> None:
        """Stop all hosts and go back to the network of the machine."""
        for host in list(self.hosts):
            self.drop(host)
        if _LIBC.setns(self._outside, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(self._outside)


def make_key(path: Path, *, passphrase: str = "") -> None:
    """Make an ed25519 key pair."""
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", path.name, "-f", str(path))


def _write_config(folder: Path, *, name: str, port: int, shell: str, sshd: str, drop: str) -> None:
    (folder / "sshd_config").write_text(
        f"Port {port}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "UsePAM no\nStrictModes no\nPermitRootLogin prohibit-password\n"
        f"PasswordAuthentication no\nPidFile none\n{sshd}\n"
    )
    accounts = "".join(f"{user}:x:0:0::{folder}/home:{shell}\n" for user in ("root", "ann", "bob"))
    (folder / "passwd").write_text(
        f"{accounts}sshd:x:101:65534::/run/sshd:/usr/sbin/nologin\n"
        "nobody:x:65534:65534::/:/usr/sbin/nologin\n"
    )
    # As Debian does: the own name is a loopback address, and no peer is known by name.
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    (folder / "resolv.conf").write_text("")
    (folder / "init.sh").write_text(
        f"set -e\nhostname {name}\nmount -t sysfs none /sys\nmount -t tmpfs none /run\nmkdir /run/sshd\n"
        f"for f in passwd hosts resolv.conf; do mount --bind {folder}/$f /etc/$f; done\n"
        f"exec {f'setpriv --bounding-set=-{drop} --inh-caps=-{drop} ' if drop else ''}"
        f"/usr/sbin/sshd -D -e -f {folder}/sshd_config\n"
    )


def _answers(addr: str, port: int) -> bool:
    try:
        with socket.create_connection((addr, port), timeout=0.5) as sock:
            return sock.recv(4) == b"SSH-"
    except OSError:
        return False


def _until(condition: object, what: str, timeout_s: float = 15.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"lab: not within {timeout_s:g} s: {what}")
        time.sleep(0.02)


def emulating(hosts: Sequence[LabHost]) -> tuple[HostSpec, ...]:
    """Hosts of the lab, the n-th of which plays one chip of a vendor of its own, n times as quick as the first."""
    return tuple(
        replace(
            host.spec(),
            emulate=(
                EmulatedChip(
                    vendor=f"emu-{number}",
                    model="m",
                    num_devices=1,
                    flops_per_s=1e9 * number,
                    memory_bytes=1 << 30,
                ),
            ),
        )
        for number, host in enumerate(hosts, 1)
    )
