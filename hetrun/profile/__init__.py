"""`hetrun profile`: how fast each device model and each link is on one recipe. What follows from that is left to `planner/`.

In the order in which data flows: `samples.py` chooses who measures what, `cache.py` what need not be measured,
`bench.py` asks and reads the hosts, `stragglers.py` compares equals, `devices.py` does all of that; `links.py`
says which links matter, `pairs.py` measures one stream between two hosts, `collectives.py` ranks that add up,
`fit.py` and `curves.py` make figures of it, `network.py` does all of that; `estimate.py` takes the place of both where nothing can be run.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from hetrun.model import DeviceProfile, Facts, Profile, Recipe
from hetrun.profile.bench import wanted_of
from hetrun.profile.cache import Cache, cache_folder
from hetrun.profile.devices import Progress, measure_devices
from hetrun.profile.estimate import estimate
from hetrun.profile.links import declared_link, needed_links
from hetrun.profile.network import Network, assumed_network, measure_network
from hetrun.profile.samples import choose_samples, kind_of, kinds
from hetrun.transport.bundle import build_bundle
from hetrun.transport.connect import one_connection_per_host

__all__ = ["cache_folder", "num_steps", "profile", "profile_from_spec"]


def profile(
    facts: Facts,
    recipe: Recipe,
    *,
    quick: bool = False,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure every device model and every link; `progress(who, text)` is called as each host or pair is through.

    `quick` takes fewer repeats, sizes, microbatch sizes and pairs. `cache` is a folder of figures of devices.

    Raises:
        ConfigError: the recipe asks for a tp that does not divide the model.
        HostError: no host answered when it was probed.
        PreflightError: no host offers a device.
        HetrunError: some host or pair could not be measured; there is no profile with holes in it.
    """
    wanted = wanted_of(recipe, quick=quick)
    kept = None if cache is None else Cache(cache, build_bundle().sha256)
    with one_connection_per_host():
        devices = measure_devices(facts, wanted, cache=kept, progress=progress)
        network = measure_network(facts, quick=quick, progress=progress)
    return _profile(recipe, devices, network, quick=quick)


def profile_from_spec(facts: Facts, recipe: Recipe) -> Profile:
    """Estimate from published peaks and interface speeds, without a word to any host.

    Raises:
        ConfigError, HostError, PreflightError: as `profile`; also where a chip's peak is not published.
    """
    wanted = wanted_of(recipe)
    hosts = kinds(facts)
    devices = [
        estimate(device, wanted, hosts=hosts[kind_of(device)])
        for sample in choose_samples(facts)
        for device in sample.devices
    ]
    ordered = tuple(sorted(devices, key=lambda item: (item.vendor, item.model)))
    return _profile(recipe, ordered, assumed_network(facts), quick=False)


def num_steps(facts: Facts, *, quick: bool = False) -> int:
    """Return how many different names `profile` tells its progress for, at most: hosts, and pairs of hosts."""
    pairs = {
        " - ".join(dict.fromkeys((a.spec.name, b.spec.name)))
        for needed in needed_links(facts)
        if declared_link(facts, needed) is None
        for a, b in needed.pairs()[: 1 if quick else None]
    }
    return len({host.spec.name for host in facts.hosts if host.devices} | pairs)


def _profile(
    recipe: Recipe, devices: tuple[DeviceProfile, ...], network: Network, *, quick: bool
) -> Profile:
    return Profile(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        recipe=recipe.name,
        model=recipe.model,
        seq_len=recipe.data.seq_len,
        devices=devices,
        links=network.links,
        curves=network.curves,
        quick=quick,
        warnings=network.warnings,
    )
