"""Which host measures which devices: one of each kind in full, its equals with a quick check."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from hetrun.errors import HostError, PreflightError
from hetrun.model import Device, Facts, HostFacts
from hetrun.vendors import get_vendor

log = logging.getLogger(__name__)

Kind = tuple[str, str]  # vendor and model: devices with the same two are alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one host measures: one device of each kind that fell to it, and checks of further ones."""

    host: HostFacts
    devices: tuple[Device, ...]
    checks: tuple[Device, ...] = ()


def kind_of(device: Device) -> Kind:
    """Return vendor and model."""
    return device.vendor, device.model or "unknown"


def kinds(facts: Facts) -> dict[Kind, tuple[str, ...]]:
    """Return the kinds of devices, each with the hosts that have it, in order."""
    found: dict[Kind, list[str]] = {}
    for host in facts.hosts:
        for device in host.devices:
            hosts = found.setdefault(kind_of(device), [])
            if host.spec.name not in hosts:
                hosts.append(host.spec.name)
    return {kind: tuple(hosts) for kind, hosts in sorted(found.items())}


def choose_samples(facts: Facts) -> tuple[Sample, ...]:
    """Choose a host for each kind of device, spread over as many hosts as there are; in order of hosts."""
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
        first = {kind_of(device): device for device in reversed(host.devices)}
        if wanted:
            samples.append(Sample(host=host, devices=tuple(first[kind] for kind in wanted)))
    return tuple(samples)


def add_checks(facts: Facts, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Add to the samples every further real device whose kind has several; hosts without work stay out.

    Of the devices that are parts of one processor, the first stands for all. A kind with one device
    has nothing to compare with, and emulated chips are as fast as they declare.
    """
    measured = {
        (sample.host.spec.name, device.index) for sample in samples for device in sample.devices
    }
    checkable = {host.spec.name: _checkable(host) for host in facts.hosts}
    numbers = Counter(_equal(device) for devices in checkable.values() for device in devices)
    by_host = {sample.host.spec.name: sample for sample in samples}
    found = []
    for host in facts.hosts:
        name = host.spec.name
        checks = tuple(
            device
            for device in checkable[name]
            if numbers[_equal(device)] > 1 and (name, device.index) not in measured
        )
        full = by_host[name].devices if name in by_host else ()
        if full or checks:
            found.append(Sample(host=host, devices=full, checks=checks))
    return tuple(found)


def _equal(device: Device) -> tuple[Kind, int]:
    """What two devices must share to be as fast as each other."""
    return kind_of(device), device.num_threads


def _checkable(host: HostFacts) -> list[Device]:
    found: list[Device] = []
    processors: set[Kind] = set()
    for device in host.devices:
        if device.emulated is not None:
            continue
        if get_vendor(device.vendor).torch_device == "cpu":
            if kind_of(device) in processors:
                continue
            processors.add(kind_of(device))
        found.append(device)
    return found
