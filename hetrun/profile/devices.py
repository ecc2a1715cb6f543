"""Figures of all kinds of devices: kept ones, and what the hosts measure now."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from hetrun.errors import ConfigError, HetrunError
from hetrun.model import Connection, DeviceProfile, Facts
from hetrun.profile.bench import Wanted, bench_request, read_bench, shape_request
from hetrun.profile.cache import Cache
from hetrun.profile.samples import Kind, Sample, add_checks, choose_samples, kind_of, kinds
from hetrun.profile.stragglers import DeviceCheck, stragglers
from hetrun.transport import Transport
from hetrun.transport.fanout import on_all
from hetrun.transport.jobs import run_module

log = logging.getLogger(__name__)

BENCH_MODULE = "hetrun.runtime.bench"
DEVICE_TIMEOUT_S = 300.0  # a little more than the bench gives each device
CHECK_TIMEOUT_S = 120.0

Progress = Callable[[str, str], None]


def measure_devices(
    facts: Facts, wanted: Wanted, *, cache: Cache | None = None, progress: Progress | None = None
) -> tuple[DeviceProfile, ...]:
    """Measure each kind of device once, compare its equals with it, and name those that are slower.

    Raises:
        HostError: no host answered when it was probed.
        PreflightError: no host offers a device.
        HetrunError: some host could not measure; there is no profile with holes in it.
        ConfigError: there are real devices, and hetrun cannot share the layers of this model among them.
    """
    chosen = choose_samples(facts)
    _check_sharing(wanted, chosen)
    keys = _keys(chosen, wanted, cache)
    kept = _kept(keys, cache, hosts=kinds(facts), progress=progress)
    left = tuple(_without(sample, kept) for sample in chosen)
    samples = add_checks(facts, left)
    answers = _ask(samples, wanted, progress)
    found, checks = _read_all(samples, answers, hosts=kinds(facts), wanted=wanted)
    for figures in found:
        if cache is not None and (key := keys.get((figures.vendor, figures.model))):
            cache.put(key, figures)
    slow = stragglers(checks)
    for sentences in slow.values():
        for sentence in sentences:
            log.warning("%s", sentence)
    return tuple(
        replace(item, warnings=(*item.warnings, *slow.get((item.vendor, item.model), ())))
        for item in sorted((*found, *kept.values()), key=lambda item: (item.vendor, item.model))
    )


def _check_sharing(wanted: Wanted, samples: Sequence[Sample]) -> None:
    """Refuse to measure shares of layers that only transformers can build, before any host is asked."""
    real = [device for sample in samples for device in sample.devices if device.emulated is None]
    model = wanted.recipe.model
    if real and model.config is not None and max(wanted.tp) > 1:
        raise ConfigError(
            f"tp {max(wanted.tp)} of a {model.family} model cannot be measured on {kind_of(real[0])[1]}: hetrun"
            " shares only layers of its own decoder",
            hint="set plan.tp: [1], or estimate it from published peaks: hetrun profile --from-spec",
        )


def _keys(samples: Sequence[Sample], wanted: Wanted, cache: Cache | None) -> dict[Kind, str]:
    """Return the cache's keys of real devices; emulated ones answer at once."""
    if cache is None:
        return {}
    shape = shape_request(wanted)
    return {
        kind_of(device): cache.key(sample.host, device, shape)
        for sample in samples
        for device in sample.devices
        if device.emulated is None
    }


def _kept(
    keys: Mapping[Kind, str],
    cache: Cache | None,
    *,
    hosts: Mapping[Kind, tuple[str, ...]],
    progress: Progress | None,
) -> dict[Kind, DeviceProfile]:
    found = {}
    for kind, key in keys.items():
        figures = cache.get(key) if cache else None
        if figures is not None and (figures.vendor, figures.model) == kind:
            found[kind] = replace(figures, hosts=hosts[kind])
            log.warning("%s %s: figures from the cache; --no-cache measures anew", *kind)
            if progress:
                progress(hosts[kind][0], f"{kind[1]}: from the cache")
    return found


def _without(sample: Sample, kept: Mapping[Kind, DeviceProfile]) -> Sample:
    return replace(sample, devices=tuple(d for d in sample.devices if kind_of(d) not in kept))


def _ask(
    samples: Sequence[Sample], wanted: Wanted, progress: Progress | None
) -> dict[str, Mapping[str, bytes] | HetrunError]:
    """Run the bench on all hosts at once, but one after the other on those that are all this machine."""
    by_host = {sample.host.spec.name: sample for sample in samples}
    alone = threading.Lock()

    def measure(transport: Transport) -> Mapping[str, bytes]:
        sample = by_host[transport.spec.name]
        request = json.dumps(bench_request(sample, wanted)).encode()
        timeout_s = DEVICE_TIMEOUT_S * len(sample.devices) + CHECK_TIMEOUT_S * len(sample.checks)
        with alone if transport.spec.connection is Connection.LOCAL else nullcontext():
            return run_module(transport, BENCH_MODULE, {"bench.json": request}, timeout_s=timeout_s)

    def note(host: str, answer: Mapping[str, bytes] | HetrunError) -> None:
        if progress:
            failed = isinstance(answer, HetrunError)
            progress(host, f"failed: {answer}" if failed else _done(by_host[host]))

    return on_all([sample.host.spec for sample in samples], measure, progress=note)


def _done(sample: Sample) -> str:
    parts = [f"measured {', '.join(kind_of(device)[1] for device in sample.devices)}"]
    if sample.checks:
        parts.append(f"checked {len(sample.checks)} more")
    return "; ".join(parts if sample.devices else parts[1:])


def _read_all(
    samples: Sequence[Sample],
    answers: Mapping[str, Mapping[str, bytes] | HetrunError],
    *,
    hosts: Mapping[Kind, tuple[str, ...]],
    wanted: Wanted,
) -> tuple[list[DeviceProfile], list[DeviceCheck]]:
    found: list[DeviceProfile] = []
    checks: list[DeviceCheck] = []
    failures: list[HetrunError] = []
    for sample in samples:
        answer = answers[sample.host.spec.name]
        try:
            if isinstance(answer, HetrunError):
                raise answer
            full, quick = read_bench(sample, answer, hosts=hosts, wanted=wanted)
        except HetrunError as error:
            failures.append(error)
            continue
        found += full
        checks += quick
    for failure in failures[1:]:
        log.error("%s: could not measure either: %s", failure.host, failure.message)
    if failures:
        raise failures[0]
    return found, checks
