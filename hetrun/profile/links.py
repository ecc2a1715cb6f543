"""Which links a plan may use, which of them are declared, and what is assumed of one where nothing is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hetrun.errors import ConfigError
from hetrun.model import Connection, Facts, HostFacts, Link, LinkKind, Nic, Source
from hetrun.schedule.sync import find_link
from hetrun.vendors import all_vendors

# Where nothing was declared and nothing is measured; modest figures, always labelled as assumed.
LOOPBACK_BYTES_PER_S = 2e9
LOOPBACK_LATENCY_S = 50e-6
INSIDE_HOST_BYTES_PER_S = 16e9  # PCI Express 4.0, 8 lanes
INSIDE_HOST_LATENCY_S = 20e-6
NETWORK_LATENCY_S = 50e-6
NETWORK_BYTES_PER_S = 1.25e9  # 10 Gbit/s
MAX_PAIRS = 8  # of hosts, looked at for one link


@dataclass(frozen=True, slots=True)
class NeededLink:
    """A link that a plan may use, with the hosts of either vendor."""

    kind: LinkKind
    a: str
    b: str
    hosts_a: tuple[HostFacts, ...]
    hosts_b: tuple[HostFacts, ...]

    @property
    def hosts(self) -> list[HostFacts]:
        """All hosts at its ends, each once."""
        return list({host.spec.name: host for host in (*self.hosts_a, *self.hosts_b)}.values())

    @property
    def name(self) -> str:
        """The link as people see it."""
        return f"{self.kind.value.replace('_', ' ')}, {self.a} to {self.b}"

    @property
    def is_of_accelerators(self) -> bool:
        """True for real devices of one vendor that are not processors; emulated chips are played on those."""
        known = all_vendors().get(self.a)
        if self.a != self.b or known is None or known.torch_device == "cpu":
            return False
        devices = [device for host in self.hosts for device in host.devices]
        return all(device.emulated is None for device in devices if device.vendor == self.a)

    def pairs(self) -> list[tuple[HostFacts, HostFacts]]:
        """Pairs of hosts to measure, the one that stands for the link first; a host with itself where there is no other.

        Inside an island each host and the next; across islands every host of the larger with one of the smaller.
        """
        if self.kind is LinkKind.INSIDE_HOST:
            return [(self.hosts_a[0], self.hosts_a[0])]
        if self.kind is LinkKind.INSIDE_ISLAND:
            found = list(zip(self.hosts_a, self.hosts_a[1:], strict=False))
        else:
            number = max(len(self.hosts_a), len(self.hosts_b))
            found = [
                (self.hosts_a[i % len(self.hosts_a)], self.hosts_b[(i + shift) % len(self.hosts_b)])
                for shift in (0, 1)
                for i in range(number)
            ]
        unique: dict[frozenset[str], tuple[HostFacts, HostFacts]] = {}
        for a, b in found:
            unique.setdefault(frozenset((a.spec.name, b.spec.name)), (a, b))
        between = [pair for key, pair in unique.items() if len(key) == 2]
        return between[:MAX_PAIRS] or list(unique.values())[:1]


def needed_links(facts: Facts) -> Iterator[NeededLink]:
    """Yield the links that a plan may use."""
    hosts_of: dict[str, list[HostFacts]] = {}
    several: dict[str, list[HostFacts]] = {}
    for host in facts.hosts:
        vendors = [device.vendor for device in host.devices]
        for vendor in sorted(set(vendors)):
            hosts_of.setdefault(vendor, []).append(host)
            if vendors.count(vendor) > 1:
                several.setdefault(vendor, []).append(host)
    for vendor, hosts in sorted(hosts_of.items()):
        if vendor in several:
            inside = tuple(several[vendor])
            yield NeededLink(LinkKind.INSIDE_HOST, vendor, vendor, inside, inside)
        if len(hosts) > 1:
            ends = tuple(hosts)
            yield NeededLink(LinkKind.INSIDE_ISLAND, vendor, vendor, ends, ends)
    for a, b in combinations(sorted(hosts_of), 2):
        yield NeededLink(LinkKind.ACROSS, a, b, tuple(hosts_of[a]), tuple(hosts_of[b]))


def declared_link(facts: Facts, needed: NeededLink) -> Link | None:
    """Return the inventory's figures for a link, None where it declares none."""
    try:
        link = find_link(facts.links, needed.kind, needed.a, needed.b)
    except ConfigError:
        return None
    return replace(link, a=needed.a, b=needed.b)


def assumed_link(needed: NeededLink) -> Link:
    """Return a link's figures from what probe found: the slowest interface on the way, loopback on one machine."""
    hosts = needed.hosts
    if needed.kind is LinkKind.INSIDE_HOST and needed.is_of_accelerators:
        rate, latency_s, source = INSIDE_HOST_BYTES_PER_S, INSIDE_HOST_LATENCY_S, Source.ASSUMED
    elif needed.kind is LinkKind.INSIDE_HOST or _is_one_machine(hosts):
        rate, latency_s, source = LOOPBACK_BYTES_PER_S, LOOPBACK_LATENCY_S, Source.ASSUMED
    else:
        speeds = [nic.speed_mbps for host in hosts if (nic := data_nic(host)) and nic.speed_mbps]
        is_known = len(speeds) == len(hosts)
        rate = min(speeds) * 1e6 / 8 if is_known else NETWORK_BYTES_PER_S
        latency_s, source = NETWORK_LATENCY_S, Source.SPEC if is_known else Source.ASSUMED
    return Link(
        kind=needed.kind,
        a=needed.a,
        b=needed.b,
        latency_s=latency_s,
        bytes_per_s=rate,
        source=source,
    )


def describe(link: Link) -> str:
    """Say the figures of a link in words."""
    return f"{link.bytes_per_s / 1e9:.3g} GB/s after {link.latency_s * 1e6:.3g} us"


def _is_one_machine(hosts: Sequence[HostFacts]) -> bool:
    return len(hosts) == 1 or all(host.spec.connection is Connection.LOCAL for host in hosts)


def data_nic(host: HostFacts) -> Nic | None:
    """Return the interface for training traffic: the named one, else the one with the address, else the fastest."""
    spec = host.spec
    for nic in host.nics:
        if nic.name == spec.nic:
            return nic
    for nic in host.nics:
        if (spec.data_addr or spec.addr) in nic.addresses:
            return nic
    outward = [nic for nic in host.nics if nic.up and nic.addresses and nic.name != "lo"]
    return max(outward, key=lambda nic: nic.speed_mbps or 0, default=None)
