"""What /proc says: processes, who descends from whom, whether memory ran out. Needs the standard library only."""

from __future__ import annotations

import errno
import re
from pathlib import Path


def stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on; None when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return None
        raise


def descendants(root: int) -> list[int]:
    """Processes below one that still run."""
    all_of = processes()
    below = {root}
    grown = True
    while grown:
        more = {pid for pid, parent, _ in all_of if parent in below} - below
        below |= more
        grown = bool(more)
    return [pid for pid, _, state in all_of if pid in below - {root} and state not in "ZX"]


def processes() -> list[tuple[int, int, str]]:
    """(pid, parent, state letter) of all processes in /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = stat_fields(int(entry.name))
            if fields:
                found.append((int(entry.name), int(fields[1]), fields[0]))
    return found


def oom_kills() -> int:
    """Count how often the kernel has killed in our memory cgroup for want of memory; 0 where it does not say."""
    total = 0
    for line in _lines(Path("/proc/self/cgroup")):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            file = Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = Path("/sys/fs/cgroup/memory") / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        total += sum(
            int(count) for text in _lines(file) for count in re.findall(r"^oom_kill (\d+)", text)
        )
    return total


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
