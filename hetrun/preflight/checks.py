"""Which checks there are, what each looks at, and what to do when it fails. Looking is left to `onhost.py` and `compare.py`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from hetrun.errors import ConfigError

# Nothing can go on without these.
CONNECTING = ("reach", "hostkey", "auth")

# id -> what it looks at
CHECKS: Mapping[str, str] = MappingProxyType(
    {
        "reach": "the host answers SSH",
        "hostkey": "its key, and that of each jump host, is the known one",
        "auth": "it lets our key in",
        "python": "the configured interpreter is there and new enough",
        "clock": "its clock and ours agree (warns above 2 s, refuses above 10 s)",
        "torch": "its interpreter has torch",
        "torch-versions": "torch versions of all hosts can meet",
        "plugin": "torch and the vendor's plug-in can be imported",
        "devices": "there are as many devices as the plan uses",
        "busy": "no other process holds a device",
        "bundle": "worker code that lies there already is unharmed",
        "folder": "bundles and runs have a private folder there",
        "readable": "texts and weights that ranks read are there",
        "disk": "there is room for logs and checkpoints",
        "inodes": "its file system can take more files",
        "open-files": "a process may open 4096 files",
        "path": "nobody else can put programs on its PATH",
        "address": "its data address is its own and the interface is up",
        "public": "its data address is not reachable from the internet",
        "mtu": "the interfaces of all hosts have one MTU",
        "names": "names of data addresses mean the same on every host",
        "reverse-dns": "looking up an address takes less than 1 s",
        "port": "a port is free for the ranks to meet at",
        "pairs": "every host reaches every other one on its data address",
        "namespace": "a job can be held together by a PID namespace",
        "sshd": "its sshd allows the channels that we open",
        "checkpoint": "the folder of checkpoints can be written",
        "shared": "a folder of checkpoints that is called shared is one for all hosts",
        "leftovers": "no other run of this user is there",
    }
)


def check_skips(skip: Iterable[str]) -> tuple[str, ...]:
    """Return the checks to pass over, each once.

    Raises:
        ConfigError: there is no such check, or nothing can go on without it.
    """
    wanted = tuple(dict.fromkeys(skip))
    for name in wanted:
        if name not in CHECKS:
            near = difflib.get_close_matches(name, CHECKS, n=1, cutoff=0.5)
            more = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"no check {name!r}{more}", hint=f"checks: {', '.join(CHECKS)}")
        if name in CONNECTING:
            raise ConfigError(
                f"check {name!r} cannot be skipped: without it nothing can be started there",
                hint="take the host out of the inventory, or mend it",
            )
    return wanted
