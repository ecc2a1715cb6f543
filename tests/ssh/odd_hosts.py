"""Dresses hosts of the lab up as machines with chips: stub tools, a PCI bus, device nodes, RDMA ports.

Everything lies in the host's own folder and is bound over the real places inside its mount namespace only.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.ssh.lab import LabHost

PATH_OF_STUBS = "SetEnv PATH=/opt/stubs:/usr/local/bin:/usr/bin:/bin"
PYTHON = "/opt/stubs/python-stub"
_SAYS_PYTHON = """#!/bin/sh
echo '{"path": "/opt/stubs/python-stub", "version": "3.11.2", "torch": "2.6.0+stub", "plugins": []}'
"""


def add_tools(host: LabHost, tools: Mapping[str, str]) -> None:
    """Put scripts below /opt of the host, by their path there, and an interpreter with a torch."""
    root = host.folder / "opt"
    for name, text in {"stubs/python-stub": _SAYS_PYTHON, **tools}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    _bind(host, root, "/opt")


def says(text: str, *, only_for: str = "") -> str:
    """Return a script that prints a text; where `only_for` is not among its arguments, it fails."""
    guard = f"case \"$*\" in *{only_for}*) ;; *) echo 'unknown option' >&2; exit 2 ;; esac\n"
    return f"#!/bin/sh\n{guard if only_for else ''}cat <<'HERE'\n{text.rstrip()}\nHERE\n"


def add_bus(host: LabHost, functions: Sequence[str]) -> None:
    """Give the host these PCI functions: lines "address vendor device class [NUMA node]", ids in hex."""
    root = host.folder / "pci"
    for line in functions:
        address, vendor, device, kind, node = (*line.split(), "-1")[:5]
        (root / address).mkdir(parents=True)
        for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
            (root / address / name).write_text(f"0x{value}\n")
        (root / address / "numa_node").write_text(f"{node}\n")
    _bind(host, root, "/sys/bus/pci/devices")


def add_rdma(host: LabHost, *, peer: str) -> None:
    """Give the host a RoCE port mlx5_0 whose version 2 address is number 5, and a GPUDirect module."""
    root = host.folder / "class"
    function = root / "functions" / "0000:61:00.0"
    port = root / "infiniband" / "mlx5_0" / "ports" / "1"
    for folder in (function / "net" / "eth0", port / "gid_attrs" / "types", port / "gids"):
        folder.mkdir(parents=True)
    (function / "numa_node").write_text("1\n")
    (port.parents[1] / "device").symlink_to("../../functions/0000:61:00.0")
    for name, value in (
        ("link_layer", "Ethernet"),
        ("state", "4: ACTIVE"),
        ("rate", "200 Gb/sec (4X HDR)"),
    ):
        (port / name).write_text(f"{value}\n")
    local = "fe80:0000:0000:0000:0ac0:ebff:fe11:2233"
    mapped = "0000:0000:0000:0000:0000:ffff:0a4d:001f"  # 10.77.0.31
    gids = {0: ("IB/RoCE v1", local), 1: ("RoCE v2", local), 4: ("IB/RoCE v1", mapped)}
    for number, (kind, gid) in {
        **gids,
        5: ("RoCE v2", mapped),
        6: ("", "0000" + ":0000" * 7),
    }.items():
        (port / "gid_attrs" / "types" / str(number)).write_text(f"{kind}\n")
        (port / "gids" / str(number)).write_text(f"{gid}\n")
    (root / "net").symlink_to("/sys/devices/virtual/net")
    _bind(host, root, "/sys/class")
    (host.folder / "mm" / "memory_peers" / peer).mkdir(parents=True)
    _bind(host, host.folder / "mm", "/sys/kernel/mm")


def add_nodes(host: LabHost, *names: str) -> None:
    """Give the host a /dev of its own that holds these nodes too."""
    nodes = " ".join(f"/run/dev/{name}" for name in names)
    host.inside(
        "sh",
        "-ec",
        "mkdir /run/dev; mount -t tmpfs none /run/dev; cd /dev; "
        "cp -a null zero full random urandom tty ptmx /run/dev; ln -s /proc/self/fd /run/dev/fd; "
        "mkdir /run/dev/pts /run/dev/shm; mount --bind /dev/pts /run/dev/pts; "
        f"mount -t tmpfs none /run/dev/shm; touch {nodes}; mount --move /run/dev /dev",
    )


def only_busybox(host: LabHost) -> None:
    """Leave the host busybox alone, as /bin/sh too, no Python, and a home that cannot be written to."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise RuntimeError("no busybox")
    folder = host.folder / "opt" / "stubs"
    folder.mkdir(parents=True)
    subprocess.run([busybox, "--install", "-s", str(folder)], check=True, timeout=20)
    _bind(host, host.folder / "opt", "/opt")
    _bind(host, Path(busybox), str(Path("/bin/sh").resolve()))
    home = str(host.folder / "home")
    host.inside("mount", "--bind", home, home)
    host.inside("mount", "-o", "remount,bind,ro", home)


def _bind(host: LabHost, source: Path, target: str) -> None:
    host.inside("mount", "--bind", str(source), target)
