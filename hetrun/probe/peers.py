"""Names by which hosts of an inventory meet: which to look up on every host, and where the answers do not agree."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hetrun.model import HostFacts, HostSpec
from hetrun.probe.doubts import some
from hetrun.probe.system import loopback_names

MAX_NAMES = 256
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9._])?")


def data_name(spec: HostSpec) -> str | None:
    """Return the name by which training traffic finds a host; None where the inventory gives a number or nothing."""
    wanted = spec.data_addr or spec.addr
    if wanted is None or not _NAME.fullmatch(wanted):
        return None
    try:
        ipaddress.ip_address(wanted)
    except ValueError:
        return wanted
    return None


def names_to_look_up(specs: Sequence[HostSpec]) -> tuple[str, ...]:
    """Return the names of the hosts, each once, the first of too many; none where a host has no other to meet."""
    names = tuple(dict.fromkeys(filter(None, map(data_name, specs))))
    return names[:MAX_NAMES] if len(specs) > 1 else ()


def compared(hosts: Sequence[HostFacts]) -> tuple[HostFacts, ...]:
    """Return the facts with a warning on each host that takes another host's name for something else.

    What was looked up for the comparison alone is dropped: only a host's own names stay in its facts.
    """
    notes: dict[str, list[str]] = {}
    missing: dict[str, list[str]] = {}
    for owner in hosts:
        name = data_name(owner.spec)
        if name is None:
            continue
        told = {
            host.spec.name: host.names[name]
            for host in hosts
            if name in host.names and host is not owner
        }
        for where, note in _notes(owner, name, told):
            notes.setdefault(where, []).append(note)
        # A name that only SSH goes to may be an alias of the user's ssh configuration: no host has to know it.
        if owner.spec.data_addr or any(told.values()):
            for where in (where for where, addresses in told.items() if not addresses):
                missing.setdefault(where, []).append(f"{name} ({owner.spec.name})")
    for where, names in missing.items():
        what = f"names of other hosts do not resolve there: {some(names)}"
        notes.setdefault(where, []).append(
            f"{what}; set data_addr to numbers, or name them in /etc/hosts"
        )
    return tuple(
        replace(
            host,
            names=_own(host),
            warnings=(*host.warnings, *dict.fromkeys(notes.get(host.spec.name, ()))),
        )
        for host in hosts
    )


def _own(host: HostFacts) -> dict[str, tuple[str, ...]]:
    kept = (host.hostname, host.spec.data_addr, host.spec.addr)
    return {name: found for name, found in host.names.items() if name in kept}


def _notes(
    owner: HostFacts, name: str, told: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, str]]:
    """Yield (host, warning) for each host that does not find the owner by its name."""
    what = f"{name}, the address of {owner.spec.name},"
    usual = _usual(owner, name, told)
    for host, addresses in told.items():
        if not addresses:
            continue
        if loopback_names({name: addresses}):
            yield (
                host,
                f"{what} is {some(addresses)} there, a loopback address: it finds itself in place of "
                f"{owner.spec.name}; mend its /etc/hosts",
            )
        elif usual and not set(addresses) & usual.keys():
            yield (
                host,
                f"{what} is {some(addresses)} there and {some(list(usual))} on {some(_told_by(usual))}; "
                "set data_addr to a number, or mend /etc/hosts or DNS",
            )


def _usual(
    owner: HostFacts, name: str, told: Mapping[str, tuple[str, ...]]
) -> dict[str, list[str]]:
    """Return the addresses that most hosts, or the owner itself, know the name by -> who says so.

    Loopback on the owner is no answer. Empty where nothing can be compared.
    """
    said = {owner.spec.name: owner.names.get(name, ()), **told}
    real = {
        host: addresses
        for host, addresses in said.items()
        if addresses and not loopback_names({name: addresses})
    }
    if not real:
        return {}
    votes = Counter(address for addresses in real.values() for address in addresses)
    most = max(real.values(), key=lambda found: max(votes[address] for address in found))
    best = real.get(owner.spec.name, most)
    return {address: [h for h, found in real.items() if address in found] for address in best}


def _told_by(usual: Mapping[str, Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(host for hosts in usual.values() for host in hosts))
