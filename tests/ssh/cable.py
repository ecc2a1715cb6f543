"""Two networks of their own with an island of the bridge each, and a shaped cable between them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ssh.lab import call, die_with_parent

ISLANDS = "aabb"
GOODPUT = 0.1194e9  # bytes/s of TCP payload that 1 Gbit/s of Ethernet frames carry
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Side:
    """One network: the process that holds it, and the address of its end of the cable."""

    pid: int
    addr: str

    def tool(self, *argv: str) -> None:
        call("nsenter", "-t", str(self.pid), "-n", *argv)


@contextlib.contextmanager
def laid_cable() -> Iterator[tuple[Side, Side]]:
    """Two sides, 1 Gbit/s each way between them."""
    with ExitStack() as stack:
        made = []
        for number in (1, 2):
            holder = subprocess.Popen(
                ["unshare", "--net", sys.executable, "-c", "print(flush=True); input()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                preexec_fn=die_with_parent,
            )
            stack.enter_context(holder)
            stack.callback(holder.kill)
            assert holder.stdout is not None
            holder.stdout.readline()
            made.append(Side(holder.pid, f"10.78.0.{number}"))
        one, two = made
        ends = ("netns", str(one.pid), "type", "veth", "peer", "name", "cable")
        call("ip", "link", "add", "cable", *ends, "netns", str(two.pid))
        for side in made:
            side.tool("ip", "addr", "add", f"{side.addr}/24", "dev", "cable")
            side.tool("ip", "link", "set", "lo", "up")
            side.tool("ip", "link", "set", "cable", "up")
            shape = ("tbf", "rate", "1gbit", "burst", "128kb", "latency", "50ms")
            side.tool("tc", "qdisc", "add", "dev", "cable", "root", *shape)
        yield one, two


def there(
    rank: int, store_path: Path, act: Callable[..., Any], sides: tuple[Side, Side], *args: Any
) -> Any:
    """Call `act` on a rank inside the network of its island."""
    side = sides["ab".index(ISLANDS[rank])]
    network = os.open(f"/proc/{side.pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(network, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)
    return act(rank, store_path, side.addr, *args)
