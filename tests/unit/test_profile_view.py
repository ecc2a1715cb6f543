"""What a person sees of a profile, and what its options mean together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.arch.hf import from_config
from hetrun.cli import render
from hetrun.cli.profile import profile as command
from hetrun.errors import ConfigError
from hetrun.model import Device, DeviceProfile, PlanLimits, Profile, RowTiming, Source
from hetrun.profile import cache_folder, profile_from_spec
from hetrun.profile.bench import wanted_of
from hetrun.profile.estimate import estimate
from hetrun.report.words import format_seconds
from tests.unit.arch_configs import DEEPSEEK_V3
from tests.unit.profile_lab import RECIPE, Lab, device, facts, host

CPUS = facts(host("a1", device(0, "cpu", num_threads=4)), host("a2", device(0, "cpu")))


def shown(found: Profile, capfd: pytest.CaptureFixture[str]) -> str:
    render.show_profile(found, Path("profile.json"), as_json=False)
    return " ".join(capfd.readouterr().err.split())


def test_estimates_say_that_nothing_was_measured(capfd: pytest.CaptureFixture[str]) -> None:
    text = shown(profile_from_spec(CPUS, RECIPE), capfd)
    assert "Assumed figures come from published peaks and were measured nowhere." in text
    assert "link inside island, cpu to cpu was not measured" in text


def test_shares_recomputed_layers_and_peaks_are_told_apart(
    capfd: pytest.CaptureFixture[str],
) -> None:
    wanted = wanted_of(replace(RECIPE, plan=PlanLimits(tp=(1, 2), recompute=True)))
    figures = estimate(_cpu(), wanted, hosts=("a1",))
    timings = tuple(replace(t, layer_peak_bytes=3 << 20) for t in figures.timings)
    found = replace(profile_from_spec(CPUS, RECIPE), devices=(_with(figures, timings),), quick=True)
    text = shown(found, capfd)
    for case in ("1 1 stored 3 MiB", "1 1 recomputed 3 MiB", "2 2 recomputed 3 MiB"):
        assert case in text
    assert "Rows tp Layer Peak" in text
    assert text.count("3 MiB") == len(timings)
    assert "what the shares tell each other is not inside" in text
    assert "Measured in haste (--quick)" in text
    assert "repeats drift" in text


def test_layers_that_differ_are_shown_run_by_run(capfd: pytest.CaptureFixture[str]) -> None:
    recipe = replace(RECIPE, model=from_config(DEEPSEEK_V3))
    text = shown(profile_from_spec(CPUS, recipe), capfd)
    dense, sparse = profile_from_spec(CPUS, recipe).devices[0].timings[0].runs
    each = [format_seconds(run.forward_s + run.backward_s) for run in (dense, sparse)]
    assert f"with 1 row forward and backward of each: 3 of {each[0]}, 58 of {each[1]}." in text
    assert "means" not in shown(profile_from_spec(CPUS, RECIPE), capfd)


def _cpu() -> Device:
    return device(0, "cpu", num_threads=4)


def _with(figures: DeviceProfile, timings: tuple[RowTiming, ...]) -> DeviceProfile:
    return replace(figures, timings=timings, source=Source.MEASURED, warnings=("repeats drift",))


def test_measured_link_names_its_hosts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from hetrun.profile import network

    Lab(monkeypatch)
    found = network.measure_network(CPUS, quick=False)
    one = replace(profile_from_spec(CPUS, RECIPE), links=found.links, curves=found.curves)
    assert "inside island cpu - cpu 10.0 µs 954 MiB/s measured 1.9 GiB/s a1 - a2" in shown(
        one, capfd
    )


def test_estimate_and_haste_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="--from-spec measures nothing"):
        command(Path("recipe.yaml"), quick=True, from_spec=True)


def test_figures_are_kept_in_the_users_cache() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/hetrun/figures")
    assert cache_folder({}) == Path.home() / ".cache" / "hetrun" / "figures"
