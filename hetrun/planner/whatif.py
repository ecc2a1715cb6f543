"""Answers "what if": facts and profile are changed on paper, no host is touched. Both plans are compared by `compare`.

Grammar, one change per text, several texts together:

    plus COUNT of NAME               more devices of a vendor or device model, on hosts like those it has; links that only
                                     they need are as declared, else assumed
    without host HOST                a host taken away
    without NAME                     all devices of a vendor or device model taken away
    without COUNT of NAME            so many of them, from the last hosts on
    RATE WHERE                       links WHERE at RATE; latencies stay
    TIME WHERE                       links WHERE with latency TIME; rates stay

RATE is such as `10 Gb/s` (bits) or `1.2 GB/s` (bytes), TIME such as `50 us`; WHERE is `across` (between
vendors), `inside islands` (between hosts of a vendor) or `inside hosts`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetrun.errors import ConfigError
from hetrun.model import (
    Connection,
    Device,
    Efficiency,
    Facts,
    HostFacts,
    Link,
    LinkKind,
    Noun,
    Plan,
    Profile,
    Source,
)
from hetrun.planner.words import shape_words

log = logging.getLogger(__name__)

_HINT = (
    'such as "plus 4 of VENDOR", "without host NAME", "without 2 of VENDOR", "10 Gb/s across",'
    ' "50 us inside islands"'
)
_WHERE = {
    "across": LinkKind.ACROSS,
    "between islands": LinkKind.ACROSS,
    "inside islands": LinkKind.INSIDE_ISLAND,
    "inside hosts": LinkKind.INSIDE_HOST,
}
_BITS = {"kb/s": 1e3, "Mb/s": 1e6, "Gb/s": 1e9, "Tb/s": 1e12}
_BYTES = {"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
_TIME = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_MOST_ADDED = 1_000_000
_PLUS = re.compile(r"plus (\d+) of (\S+)")
_WITHOUT_SOME = re.compile(r"without (\d+) of (\S+)")
_WITHOUT_HOST = re.compile(r"without host (\S+)")
_WITHOUT = re.compile(r"without (\S+)")
_LINKS = re.compile(rf"(\d+(?:\.\d+)?) ?(\S+) ({'|'.join(_WHERE)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures(Noun):
    """What a comparison shows of one plan; all of it modelled."""

    num_devices: int
    num_used: int
    shape: str
    step_s: float
    tokens_per_s: float
    bound_s: float
    efficiency: Efficiency
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Noun):
    """A plan as things are and one as they might be."""

    changes: tuple[str, ...]
    before: PlanFigures
    after: PlanFigures
    speedup: float  # tokens per second after / before


def change(facts: Facts, profile: Profile, texts: Sequence[str]) -> tuple[Facts, Profile]:
    """Return facts and profile with all changes made, in order.

    Raises:
        ConfigError: a text is not of the grammar, or names what is not there.
    """
    for text in texts:
        facts, profile = _change(facts, profile, " ".join(text.split()))
    return facts, profile


def compare(before: Plan, after: Plan, texts: Sequence[str]) -> Comparison:
    """Put two plans beside each other."""
    old, new = figures_of(before), figures_of(after)
    return Comparison(
        changes=tuple(texts),
        before=old,
        after=new,
        speedup=new.tokens_per_s / old.tokens_per_s,
    )


def figures_of(plan: Plan) -> PlanFigures:
    """Return what a comparison shows of a plan."""
    split, recipe = plan.split, plan.recipe
    tokens = recipe.train.global_batch_rows * recipe.data.seq_len
    return PlanFigures(
        num_devices=len(split.ranks) + len(plan.idle_devices),
        num_used=len(split.ranks),
        shape=shape_words(split.replicas),
        step_s=split.cost.step_s,
        tokens_per_s=tokens / split.cost.step_s,
        bound_s=plan.bound_s,
        efficiency=split.efficiency,
        verdict=plan.verdict,
    )


def _change(facts: Facts, profile: Profile, text: str) -> tuple[Facts, Profile]:
    if match := _PLUS.fullmatch(text):
        more = _plus(facts, int(match[1]), match[2])
        return more, replace(profile, links=_with_new_links(more, profile.links))
    if match := _WITHOUT_SOME.fullmatch(text):
        return _without(facts, match[2], count=int(match[1])), profile
    if match := _WITHOUT_HOST.fullmatch(text):
        return _without_host(facts, match[1]), profile
    if match := _WITHOUT.fullmatch(text):
        return _without(facts, match[1]), profile
    if match := _LINKS.fullmatch(text):
        links = _links(profile.links, float(match[1]), match[2], match[3])
        return replace(facts, links=links), replace(profile, links=links)
    raise ConfigError(f"what if {text!r}: not understood", hint=_HINT)


def _plus(facts: Facts, count: int, name: str) -> Facts:
    """Add hosts like the fullest one that has such devices, until there are so many more."""
    if not 1 <= count <= _MOST_ADDED:
        raise ConfigError(f"what if plus {count}: need 1 to {_MOST_ADDED:,} devices", hint=_HINT)
    models = sorted({device.model or "" for _, device in _devices(facts, name)})
    if len(models) > 1:
        raise ConfigError(
            f"what if plus {count} of {name}: it has {', '.join(models)}",
            hint="name the device model instead of the vendor",
        )
    template = max(
        (host for host in facts.hosts if _count(host, name)), key=lambda host: _count(host, name)
    )
    devices = [device for device in template.devices if _is(device, name)]
    taken = {host.spec.name for host in facts.hosts}
    added: list[HostFacts] = []
    number = 1
    while count > 0:
        host_name = f"{template.spec.name[:40]}-more{number}"
        number += 1
        if host_name not in taken:
            added.append(_imagined(template, host_name, devices[:count]))
            count -= len(devices)
    return replace(facts, hosts=(*facts.hosts, *added))


def _with_new_links(facts: Facts, links: Sequence[Link]) -> tuple[Link, ...]:
    """Return the links with those that only the added hosts need.

    They are as the inventory declares them, else as the slowest that the vendor's hosts have to others: they leave by
    the same interface. That is assumed, and said.
    """
    known = (*links, *(link for link in facts.links if link not in links))
    for vendor in sorted({device.vendor for host in facts.hosts for device in host.devices}):
        hosts = [host for host in facts.hosts if any(d.vendor == vendor for d in host.devices)]
        kind = LinkKind.INSIDE_ISLAND
        named = [link for link in known if link.kind is kind and _joins(link, vendor)]
        others = [link for link in known if link.kind is LinkKind.ACROSS and _joins(link, vendor)]
        if len(hosts) < 2 or named or not others:
            continue
        like = min(others, key=lambda link: link.bytes_per_s)
        log.warning("what if: between hosts of %s as between vendors, assumed", vendor)
        new = replace(like, kind=kind, a=vendor, b=vendor, source=Source.ASSUMED)
        known = (*known, new)
    return known


def _joins(link: Link, vendor: str) -> bool:
    return vendor in (link.a or vendor, link.b or vendor)


def _imagined(template: HostFacts, name: str, devices: Sequence[Device]) -> HostFacts:
    """Return a host like another that exists on paper: its address leads nowhere, so nobody launches on it."""
    spec = replace(
        template.spec,
        name=name,
        connection=Connection.SSH,
        addr=f"{name.replace('_', '-')}.invalid",
        data_addr=None,
        jump=(),
        emulate=tuple(
            replace(chip, num_devices=len(devices)) for chip in template.spec.emulate[:1]
        ),
    )
    own = tuple(
        replace(device, index=index, uuid=None, visible_id=None)
        for index, device in enumerate(devices)
    )
    return replace(template, spec=spec, devices=own)


def _without_host(facts: Facts, name: str) -> Facts:
    hosts = tuple(host for host in facts.hosts if host.spec.name != name)
    if len(hosts) == len(facts.hosts):
        known = ", ".join(host.spec.name for host in facts.hosts[:8])
        raise ConfigError(f"what if without host {name}: no such host", hint=f"there are {known}")
    return replace(facts, hosts=hosts)


def _without(facts: Facts, name: str, count: int | None = None) -> Facts:
    """Take devices away, from the last host on."""
    there = len(_devices(facts, name))
    left = there if count is None else count
    if left > there or left < 1:
        raise ConfigError(f"what if without {left} of {name}: there are {there}", hint=_HINT)
    hosts = []
    for host in reversed(facts.hosts):
        kept = []
        for device in reversed(host.devices):
            if left and host.error is None and _is(device, name):
                left -= 1
            else:
                kept.append(device)
        hosts.append(replace(host, devices=tuple(reversed(kept))))
    return replace(facts, hosts=tuple(reversed(hosts)))


def _links(links: Sequence[Link], number: float, unit: str, where: str) -> tuple[Link, ...]:
    kind = _WHERE[where]
    if not any(link.kind is kind for link in links):
        raise ConfigError(f"what if {where}: the profile has no such link", hint=_HINT)
    if unit in _TIME:
        return tuple(
            replace(link, latency_s=number * _TIME[unit], source=Source.ASSUMED)
            if link.kind is kind
            else link
            for link in links
        )
    if unit not in _BITS and unit not in _BYTES:
        units = ", ".join([*_BITS, *_BYTES, *_TIME])
        raise ConfigError(f"what if {number:g} {unit}: not a unit", hint=f"units are {units}")
    rate = number * (_BITS[unit] / 8 if unit in _BITS else _BYTES[unit])
    if rate <= 0:
        raise ConfigError(f"what if {number:g} {unit}: need more than 0", hint=_HINT)
    return tuple(
        replace(link, bytes_per_s=rate, source=Source.ASSUMED) if link.kind is kind else link
        for link in links
    )


def _devices(facts: Facts, name: str) -> list[tuple[HostFacts, Device]]:
    """Return devices of a vendor or model, with their hosts."""
    found = [(h, d) for h in facts.hosts if h.error is None for d in h.devices if _is(d, name)]
    if not found:
        known = sorted({d.vendor for h in facts.hosts for d in h.devices})
        raise ConfigError(
            f"what if {name}: no devices of such a vendor or model",
            hint=f"vendors here are {', '.join(known) or 'none'}",
        )
    return found


def _count(host: HostFacts, name: str) -> int:
    return 0 if host.error is not None else sum(_is(device, name) for device in host.devices)


def _is(device: Device, name: str) -> bool:
    return name in (device.vendor, device.model)
