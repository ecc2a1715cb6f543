"""Small questions to a host that `onhost.py` puts together. Standard library only; sent as source."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Run by the job's interpreter in a process of its own: some plug-ins take their process along.
IMPORT = """
import importlib.util, sys
device, plugins = sys.argv[1], sys.argv[2:]
import torch
for name in plugins:
    if importlib.util.find_spec(name.split(".")[0]) is None:
        if device:
            sys.exit("no module named " + name)
    else:
        __import__(name)
count = -1
if device:
    count = getattr(torch, device).device_count()
sys.stdout.write("\\nhetrun-import %s %d\\n" % (torch.__version__, count))
"""


def look_for_marks(config: dict[str, Any]) -> dict[str, Any]:
    """Say which hosts' marks stand in the folder of checkpoints that is called shared."""
    shared = config["shared"]
    found = [] if shared is None else [m for m in shared["marks"] if _is_there(shared["dir"], m)]
    return {"marks": found}


def take_marks_away(config: dict[str, Any]) -> None:
    """Remove our own mark."""
    shared = config["shared"]
    if shared is not None:
        with contextlib.suppress(OSError):
            (Path(shared["dir"]) / shared["own"]).unlink()


def _is_there(folder: str, name: str) -> bool:
    try:  # network file systems remember what was not there: ask the folder itself
        return name in {path.name for path in Path(folder).iterdir()}
    except OSError:
        return False


def in_time(call: Callable[[], Any], timeout_s: float) -> Any:
    """Return what a call returns, None when it takes longer; the resolver knows no deadline."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return found[0] if found else None


def addresses_of(name: str) -> list[str]:
    """Numeric addresses of a name as this host knows it; none where it does not."""
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError:
        return []  # only numbers reach torchrun, so a peer need not know the name


def name_of(addr: str) -> str:
    """The name behind an address, empty where there is none."""
    try:
        return socket.gethostbyaddr(addr)[0]
    except OSError:
        return ""


def open_paths(pid: str) -> set[str]:
    """Files that a process holds open, as far as we may see."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(entry.readlink()))
    return found


def command_of(pid: str) -> str:
    """Short name of a process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "?"
