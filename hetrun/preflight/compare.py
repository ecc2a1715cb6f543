"""What the answers of all hosts say together: versions, clocks, MTUs, addresses, who reaches whom. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from hetrun.model import CheckedHost, Finding, PairTiming, Severity
from hetrun.preflight.addresses import LOOPBACK

CLOCK_WARN_S = 2.0
CLOCK_REFUSE_S = 10.0
OLDEST_TORCH = (2, 4)
_SLOW = 4.0  # a pair that is so much slower than the median of all is named
_MOST_NAMED = 8


def compare(hosts: Sequence[CheckedHost], boots: Mapping[str, str]) -> list[Finding]:
    """Return what is wrong between hosts, or with one in the light of the others."""
    return [*_clocks(hosts), *_torch(hosts), *_mtus(hosts), *_addresses(hosts, boots)]


def _clocks(hosts: Sequence[CheckedHost]) -> Iterator[Finding]:
    for host in hosts:
        off_s = host.clock_offset_s or 0.0
        if abs(off_s) <= CLOCK_WARN_S:
            continue
        refuse = abs(off_s) > CLOCK_REFUSE_S
        yield Finding(
            check="clock",
            host=host.name,
            severity=Severity.ERROR if refuse else Severity.WARNING,
            what=f"its clock is {abs(off_s):.1f} s {'ahead of' if off_s > 0 else 'behind'} ours",
            fix="start chrony or ntpd there (timedatectl set-ntp true)"
            + ("; --allow-skew passes this over" if refuse else ""),
        )


def _torch(hosts: Sequence[CheckedHost]) -> Iterator[Finding]:
    versions = {host.name: host.torch for host in hosts if host.torch}
    for host, version in versions.items():
        if _version(version) < OLDEST_TORCH:
            yield Finding(
                check="torch-versions",
                host=host,
                severity=Severity.ERROR,
                what=f"torch {version} is too old, need 2.4 or newer",
                fix="set `python` of the host to an interpreter with a newer torch",
            )
    conflict = _conflict(versions)
    if conflict is not None:
        first, other = conflict
        yield Finding(
            check="torch-versions",
            host=first,
            severity=Severity.ERROR,
            what=f"torch {versions[first]} cannot meet torch {versions[other]} on {other}",
            fix="torch before 2.6 talks only to torch before 2.6",
        )
    elif len(set(versions.values())) > 1:
        shown = Counter(versions.values()).most_common()
        words = ", ".join(f"{version} on {count}" for version, count in shown)
        yield Finding(
            check="torch-versions",
            host=hosts[0].name,
            severity=Severity.NOTE,
            what=f"versions of torch differ: {words} of the hosts; they can meet",
        )


def _conflict(versions: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a host whose torch cannot meet that of another, and the other; None where all can meet.

    Gloo's keys in the store changed in 2.6: both sides would sit out their whole timeout.
    """
    old = [host for host, text in versions.items() if _version(text) < (2, 6)]
    new = [host for host in versions if host not in old]
    return (old[0], new[0]) if old and new else None


def _version(text: str) -> tuple[int, int]:
    """Return major and minor number; a high one where a vendor counts in its own way."""
    parts = text.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return 99, 0  # a vendor's own numbering tells nothing


def _mtus(hosts: Sequence[CheckedHost]) -> Iterator[Finding]:
    known = {host.name: host.mtu for host in hosts if host.mtu is not None}
    if len(set(known.values())) <= 1:
        return
    usual = Counter(known.values()).most_common(1)[0][0]
    for name, mtu in known.items():
        if mtu != usual:
            yield Finding(
                check="mtu",
                host=name,
                severity=Severity.WARNING,
                what=f"its interface has MTU {mtu}, those of most hosts have {usual}",
                fix="give all interfaces of the data network one MTU; large packets may be lost",
            )


def _addresses(hosts: Sequence[CheckedHost], boots: Mapping[str, str]) -> Iterator[Finding]:
    is_one_machine = len({boots.get(host.name) for host in hosts}) <= 1
    for host in hosts:
        addr = ipaddress.ip_address(host.addr or LOOPBACK)
        if addr.is_loopback and not is_one_machine:
            yield Finding(
                check="address",
                host=host.name,
                severity=Severity.ERROR,
                what=f"its data address {addr} means another machine on every host",
                fix="set `data_addr` of the host in the inventory and plan again",
            )
        if addr.is_global:
            yield Finding(
                check="public",
                host=host.name,
                severity=Severity.ERROR,
                what=f"{addr} is a public address, and what ranks say to each other is neither secret nor signed",
                fix="set `data_addr` to an address of a private network; --allow-public passes this over",
            )


def pair_findings(
    failed: Sequence[tuple[str, str, str]], timings: Sequence[PairTiming]
) -> list[Finding]:
    """Return one finding per host that does not reach some others, and those that are far slower than the rest."""
    found = []
    for host in dict.fromkeys(a for a, _, _ in failed):
        mine = [(b, why) for a, b, why in failed if a == host]
        shown = ", ".join(f"{b} ({why})" for b, why in mine[:_MOST_NAMED])
        more = f" and {len(mine) - _MOST_NAMED} more" if mine[_MOST_NAMED:] else ""
        found.append(
            Finding(
                check="pairs",
                host=host,
                severity=Severity.ERROR,
                what=f"does not reach {shown}{more} on the data network",
                fix="open TCP ports 20000-60999 between data addresses, and check data_addr and routes",
            )
        )
    rates = sorted(pair.bytes_per_s for pair in timings)
    if len(rates) >= 4:
        middle = rates[len(rates) // 2]
        slow = [pair for pair in timings if pair.bytes_per_s * _SLOW < middle]
        found += [
            Finding(
                check="pairs",
                host=pair.a,
                severity=Severity.NOTE,
                what=f"{pair.bytes_per_s / 1e6:.0f} MB/s to {pair.b}, most pairs have {middle / 1e6:.0f}"
                " (one short stream)",
            )
            for pair in slow[:_MOST_NAMED]
        ]
    return found
