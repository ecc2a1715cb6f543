"""`hetrun profile`: how fast each device model and each link is on one recipe. What follows from that is left to `planner/`.

Every (vendor, model) is measured on one host that has it, by `hetrun.runtime.bench`; emulated chips answer
with their declared figures on the same way. Links are taken from the inventory where it declares them, else
from what probe found, and say so in their source.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from itertools import combinations
from typing import Any

from hetrun.errors import ConfigError, HetrunError, HostError, JobError, PreflightError
from hetrun.model import (
    Connection,
    Device,
    DeviceProfile,
    Facts,
    HostFacts,
    Link,
    LinkKind,
    Nic,
    Profile,
    Recipe,
    Source,
)
from hetrun.schedule.sync import find_link
from hetrun.strictyaml import BadKeysError, to_noun
from hetrun.transport import Transport
from hetrun.transport.fanout import on_all
from hetrun.transport.jobs import run_module
from hetrun.vendors import all_vendors, get_vendor

log = logging.getLogger(__name__)

BENCH_MODULE = "hetrun.runtime.bench"
BENCH_TIMEOUT_S = 600.0
# Where nothing was declared and nothing is known; modest figures, always labelled as assumed.
LOOPBACK_BYTES_PER_S = 2e9
LOOPBACK_LATENCY_S = 50e-6
INSIDE_HOST_BYTES_PER_S = 16e9  # PCI Express 4.0, 8 lanes
INSIDE_HOST_LATENCY_S = 20e-6
NETWORK_LATENCY_S = 50e-6
NETWORK_BYTES_PER_S = 1.25e9  # 10 Gbit/s

Kind = tuple[str, str]  # vendor and model: devices with the same two are alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one host measures, one device of each kind."""

    host: HostFacts
    devices: tuple[Device, ...]


def profile(
    facts: Facts, recipe: Recipe, *, progress: Callable[[str, str], None] | None = None
) -> Profile:
    """Measure every device model once; `progress(host, text)` is called as each host is through.

    Raises:
        HostError: no host answered when it was probed.
        PreflightError: no host offers a device.
        HetrunError: some host could not measure; there is no profile with holes in it.
    """
    samples = choose_samples(facts)
    hosts = kinds(facts)
    by_host = {sample.host.spec.name: sample for sample in samples}

    def measure(transport: Transport) -> Mapping[str, bytes]:
        sample = by_host[transport.spec.name]
        request = json.dumps(bench_request(sample, recipe)).encode()
        return run_module(
            transport, BENCH_MODULE, {"bench.json": request}, timeout_s=BENCH_TIMEOUT_S
        )

    def note(host: str, answer: Mapping[str, bytes] | HetrunError) -> None:
        failed = isinstance(answer, HetrunError)
        names = ", ".join(device.model or "?" for device in by_host[host].devices)
        if progress:
            progress(host, f"failed: {answer}" if failed else f"measured {names}")

    answers = on_all([sample.host.spec for sample in samples], measure, progress=note)
    found: list[DeviceProfile] = []
    failures: list[HetrunError] = []
    for sample in samples:
        answer = answers[sample.host.spec.name]
        try:
            if isinstance(answer, HetrunError):
                raise answer
            found += read_bench(sample, answer, hosts=hosts, rows=_rows(recipe))
        except HetrunError as error:
            failures.append(error)
    for failure in failures[1:]:
        log.error("%s: could not measure either: %s", failure.host, failure.message)
    if failures:
        raise failures[0]
    return Profile(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        recipe=recipe.name,
        model=recipe.model,
        seq_len=recipe.data.seq_len,
        devices=tuple(sorted(found, key=lambda item: (item.vendor, item.model))),
        links=links(facts),
    )


# --- devices ----------------------------------------------------------------------------------------------


def kinds(facts: Facts) -> dict[Kind, tuple[str, ...]]:
    """Return the kinds of devices, each with the hosts that have it, in order."""
    found: dict[Kind, list[str]] = {}
    for host in facts.hosts:
        for device in host.devices:
            hosts = found.setdefault(_kind(device), [])
            if host.spec.name not in hosts:
                hosts.append(host.spec.name)
    return {kind: tuple(hosts) for kind, hosts in sorted(found.items())}


def _kind(device: Device) -> Kind:
    return device.vendor, device.model or "unknown"


def choose_samples(facts: Facts) -> tuple[Sample, ...]:
    """Choose a host for each kind of device, spread over as many hosts as there are."""
    silent = [host for host in facts.hosts if host.error is not None]
    if len(silent) == len(facts.hosts):
        raise HostError("no host answered when it was probed", hint="`hetrun probe` tells why")
    for host in silent:
        log.warning("%s did not answer when it was probed; left out", host.spec.name)
    todo: dict[str, list[Kind]] = {}
    for kind, names in kinds(facts).items():
        busy = {name: len(todo.get(name, ())) for name in names}
        todo.setdefault(min(names, key=lambda name: busy[name]), []).append(kind)
    if not todo:
        raise PreflightError(
            "no host offers a device", hint="`hetrun probe` shows what is wrong with each"
        )
    samples = []
    for host in facts.hosts:
        wanted = todo.get(host.spec.name, ())
        first = {_kind(device): device for device in reversed(host.devices)}
        if wanted:
            samples.append(Sample(host=host, devices=tuple(first[kind] for kind in wanted)))
    return tuple(samples)


def bench_request(sample: Sample, recipe: Recipe) -> dict[str, Any]:
    """Return what the bench on a host is asked, as JSON values."""
    return {
        "model": asdict(recipe.model),
        "seq_len": recipe.data.seq_len,
        "rows": _rows(recipe),
        "dtype": recipe.train.dtype.value,
        "devices": [_bench_device(device) for device in sample.devices],
    }


def _rows(recipe: Recipe) -> list[int]:
    return sorted(set(recipe.train.microbatch_rows))


def _bench_device(device: Device) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "vendor": device.vendor,
        "model": _kind(device)[1],
        "torch_device": "cpu",
        "torch_plugin": None,
        "visible_env": None,
        "visible_id": None,
        "num_threads": device.num_threads,
        "emulated": None if device.emulated is None else asdict(device.emulated),
    }
    if device.emulated is None:
        vendor = get_vendor(device.vendor)
        entry |= {
            "torch_device": vendor.torch_device,
            "torch_plugin": vendor.torch_plugin,
            "visible_env": vendor.visible_devices_env,
            "visible_id": device.visible_id,
        }
    return entry


def read_bench(
    sample: Sample,
    files: Mapping[str, bytes],
    *,
    hosts: Mapping[Kind, tuple[str, ...]],
    rows: Sequence[int],
) -> list[DeviceProfile]:
    """Return what a host measured; `hosts` have devices of each kind.

    Raises:
        JobError: the answer is missing, damaged or about something else.
    """
    name = sample.host.spec.name
    try:
        answer = json.loads(files["bench.json"])
        found = [
            to_noun(DeviceProfile, {**item, "hosts": hosts[item["vendor"], item["model"]]})
            for item in answer["devices"]
        ]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        what = str(error) if isinstance(error, BadKeysError) else repr(error)
        raise JobError(f"the bench answered in a wrong way: {what[:300]}", host=name) from error
    wanted = sorted((kind, tuple(rows)) for kind in map(_kind, sample.devices))
    got = sorted(
        ((item.vendor, item.model), tuple(timing.rows for timing in item.timings)) for item in found
    )
    if got != wanted:
        raise JobError(f"the bench measured {got}, asked for {wanted}", host=name)
    return found


# --- links ------------------------------------------------------------------------------------------------


def links(facts: Facts) -> tuple[Link, ...]:
    """Return figures for every kind of link between the devices at hand, each with its source."""
    found = []
    for kind, a, b, hosts in _needed(facts):
        try:
            link = find_link(facts.links, kind, a, b)
        except ConfigError:  # not declared
            link = _derived(kind, a, hosts)
            figures = f"{link.bytes_per_s / 1e9:.3g} GB/s after {link.latency_s * 1e6:.3g} us"
            log.warning("link %s, %s to %s: %s, %s", kind.value, a, b, figures, link.source.value)
        found.append(replace(link, a=a, b=b))
    return tuple(found)


def _needed(facts: Facts) -> Iterator[tuple[LinkKind, str, str, list[HostFacts]]]:
    """Yield the links that a plan may use, with the hosts at their ends."""
    hosts_of: dict[str, list[HostFacts]] = {}
    most: dict[str, int] = {}
    for host in facts.hosts:
        vendors = [device.vendor for device in host.devices]
        for vendor in sorted(set(vendors)):
            hosts_of.setdefault(vendor, []).append(host)
            most[vendor] = max(most.get(vendor, 0), vendors.count(vendor))
    for vendor, hosts in sorted(hosts_of.items()):
        if most[vendor] > 1:
            yield LinkKind.INSIDE_HOST, vendor, vendor, hosts
        if len(hosts) > 1:
            yield LinkKind.INSIDE_ISLAND, vendor, vendor, hosts
    for a, b in combinations(sorted(hosts_of), 2):
        ends = {host.spec.name: host for host in (*hosts_of[a], *hosts_of[b])}
        yield LinkKind.ACROSS, a, b, list(ends.values())


def _derived(kind: LinkKind, vendor: str, hosts: Sequence[HostFacts]) -> Link:
    """Return a link's figures from what probe found: the slowest interface on the way, loopback on one machine."""
    if kind is LinkKind.INSIDE_HOST and _is_accelerator(vendor):
        rate, latency_s, source = INSIDE_HOST_BYTES_PER_S, INSIDE_HOST_LATENCY_S, Source.ASSUMED
    elif kind is LinkKind.INSIDE_HOST or _is_one_machine(hosts):
        rate, latency_s, source = LOOPBACK_BYTES_PER_S, LOOPBACK_LATENCY_S, Source.ASSUMED
    else:
        speeds = [nic.speed_mbps for host in hosts if (nic := data_nic(host)) and nic.speed_mbps]
        is_known = len(speeds) == len(hosts)
        rate = min(speeds) * 1e6 / 8 if is_known else NETWORK_BYTES_PER_S
        latency_s, source = NETWORK_LATENCY_S, Source.SPEC if is_known else Source.ASSUMED
    return Link(kind=kind, latency_s=latency_s, bytes_per_s=rate, source=source)


def _is_accelerator(vendor: str) -> bool:
    """True for a real vendor whose devices are not the host's processor; emulated chips are played on that."""
    known = all_vendors().get(vendor)
    return known is not None and known.torch_device != "cpu"


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
