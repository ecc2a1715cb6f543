"""A report that may leave the house: no host names, addresses, users or paths. What a report says is left to `build.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from hetrun.model import HostSpec, Plan, RunReport

T = TypeVar("T")

# Words of ours, which a host may be called like.
_FIXED = frozenset({"kind", "status", "started", "shape", "recipe", "run_id", "vendor", "models"})
_GENERAL = (
    (re.compile(r"\b[A-Za-z0-9._-]+@[A-Za-z0-9][A-Za-z0-9._-]*"), "user@host"),
    (re.compile(r"(?<![0-9.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![0-9.])"), "address"),
    (
        re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{1,4}:){2,7}(?::|[0-9A-Fa-f]{1,4})[0-9A-Fa-f:]*"),
        "address",
    ),
    (re.compile(r"(?<![\w.<-])(?:~|/[A-Za-z0-9._@+-]+)(?:/[^\s'\",:;)\]]+)+"), "path"),
    (re.compile(r"\bMIG-[0-9a-f-]{8,}|\bGPU-[0-9a-f-]{8,}", re.IGNORECASE), "device id"),
)


def shareable(report: RunReport, plan: Plan) -> RunReport:
    """Return the report with hosts called host-1, host-2, ... and without what names a person or a place.

    Words of failures stay, the lines that ranks printed do not: nobody can tell what they hold.
    """
    bare = replace(
        report,
        failures=tuple(replace(failure, last_lines=()) for failure in report.failures),
    )
    words = _words(plan.hosts)
    longest_first = sorted(words, key=len, reverse=True)
    named = re.compile(
        "|".join(
            rf"(?<![A-Za-z0-9_.-]){re.escape(word)}(?![A-Za-z0-9_-])" for word in longest_first
        )
    )

    def clean(text: str) -> str:
        text = named.sub(lambda found: words[found[0]], text)
        for pattern, word in _GENERAL:
            text = pattern.sub(word, text)
        return text

    return _mapped(bare, clean)


def _words(hosts: Iterable[HostSpec]) -> dict[str, str]:
    """Return what tells who and where a host is -> what stands in its place."""
    words: dict[str, str] = {}
    for number, spec in enumerate(hosts, 1):
        name = f"host-{number}"
        users = [spec.user, *(hop.user for hop in spec.jump)]
        places = [spec.addr, spec.data_addr, spec.group, *(hop.addr for hop in spec.jump)]
        words.update({user: "user" for user in users if user})
        words.update({place: f"address of {name}" for place in places if place})
        words[spec.name] = name  # last: addr may be the same word
    return words


def _mapped(value: T, clean: Callable[[str], str]) -> T:
    """Return the value with all of its free text cleaned."""
    found: Any = value
    if isinstance(value, str):
        found = value if type(value) is not str else clean(value)
    elif isinstance(value, tuple):
        found = tuple(_mapped(item, clean) for item in value)
    elif isinstance(value, dict):
        found = {_mapped(key, clean): _mapped(item, clean) for key, item in value.items()}
    elif is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: _mapped(getattr(value, field.name), clean)
            for field in fields(value)
            if field.name not in _FIXED
        }
        found = replace(value, **changed)
    result: T = found
    return result
