"""What the host's own settings mean for a run: limits of a process, names that lead nowhere, toolkits, sudo."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

from hetrun.model import HostSpec
from hetrun.probe.answer import Answer, last_line, plain

MIN_OPEN_FILES = 4096  # each rank holds sockets to all others, and its libraries' files
NO_LIMIT = -1
MAX_ADDRESSES = 8
_LIMIT = re.compile(r"Max (open files|locked memory)\s+(unlimited|[0-9]{1,20})\s")
_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)+[A-Za-z0-9.+-]{0,24}")
_SOCKET_KINDS = ("STREAM", "DGRAM", "RAW")


def find_limits(answer: Answer) -> tuple[int | None, int | None]:
    """Return (open files, locked bytes) that a process may have; NO_LIMIT for unlimited, None if not told."""
    found: dict[str, int] = {}
    for line in answer.section("limits").lines:
        if match := _LIMIT.match(line):
            found[match[1]] = NO_LIMIT if match[2] == "unlimited" else int(match[2])
    return found.get("open files"), found.get("locked memory")


def limit_warnings(max_open_files: int | None) -> list[str]:
    """Say which limit is too low for a run."""
    if max_open_files is None or max_open_files == NO_LIMIT or max_open_files >= MIN_OPEN_FILES:
        return []
    what = f"a process may open {max_open_files} files, need {MIN_OPEN_FILES}"
    return [f"{what}; raise nofile (limits.conf, or --ulimit nofile=1048576)"]


def find_names(answer: Answer) -> tuple[str | None, dict[str, tuple[str, ...]]]:
    """Return the host's own name, and what it and the inventory's names for it resolve to on the host."""
    own: str | None = None
    found: dict[str, tuple[str, ...]] = {}
    name = None
    for line in (*answer.section("names").lines, *answer.section("peer-names").lines):
        words = line.split()
        if len(words) == 2 and words[0] in ("own", "name"):
            name = plain(words[1], max_chars=255)
            own = name if words[0] == "own" else own
            if name and words[0] == "name":
                found.setdefault(name, ())
        elif name and len(words) >= 2 and (address := _resolved(words, name)):
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), address)))[:MAX_ADDRESSES]
    return own, found


def _resolved(words: list[str], name: str) -> str | None:
    """Return the address of a line of `getent ahosts`, or of /etc/hosts if it is about this name."""
    if words[1] not in _SOCKET_KINDS and name.lower() not in (word.lower() for word in words[1:]):
        return None
    try:
        return str(ipaddress.ip_address(words[0].partition("%")[0]))
    except ValueError:
        return None


def loopback_names(names: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the names that mean only the host itself there: no other host gets through by such an answer."""
    return [
        name
        for name, addresses in names.items()
        if addresses and all(ipaddress.ip_address(address).is_loopback for address in addresses)
    ]


def name_warnings(spec: HostSpec, names: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Say where the inventory's name for training traffic is a loopback address, or none, on the host."""
    wanted = spec.data_addr or spec.addr
    if wanted is None or wanted not in names:
        return []
    if wanted in loopback_names(names):
        where = ", ".join(names[wanted])
        return [
            f"{wanted} is {where} on the host itself: a library that looks it up there listens where "
            "no other host gets; set data_addr to a number, or mend its /etc/hosts"
        ]
    return []


def find_sdks(answer: Answer) -> dict[str, str]:
    """Return vendor -> toolkit on the host, such as "/usr/local/cuda-12.4 12.4.1"."""
    found: dict[str, str] = {}
    for line in answer.section("sdk").lines:
        words = line.split("\t")
        if len(words) != 3 or not words[1].startswith("/"):
            continue
        version = _VERSION.search(words[2])
        text = f"{words[1]} {version[0]}" if version else words[1]
        if (said := plain(text, max_chars=96)) and words[0] not in found:
            found[words[0]] = said
    return found


def become_warnings(spec: HostSpec, answer: Answer) -> list[str]:
    """Say that the inventory asks for sudo and the host does not give it."""
    section = answer.section("become")
    if not spec.become or section.rc == 0:
        return []
    said = last_line(section.stderr) or "no word"
    return [
        f"become: true, but sudo -n is refused ({said}); allow it without a password in sudoers, "
        "or take become out of the inventory"
    ]
