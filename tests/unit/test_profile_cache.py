"""Figures that need no measuring: kept ones, and estimates."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetrun.errors import PreflightError
from hetrun.model import (
    DataSpec,
    EmulatedChip,
    Source,
)
from hetrun.profile import profile, profile_from_spec
from tests.unit.profile_lab import (
    RECIPE,
    TWO,
    Lab,
    bench,
    device,
    facts,
    host,
)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(monkeypatch)


# --- the cache ----------------------------------------------------------------------------------------------


def test_figures_are_measured_once_and_then_come_from_the_cache(
    lab: Lab,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lab.answers = {"a1": bench(("nvidia", "x")), "a2": bench(("amd", "y"))}
    first = profile(TWO, RECIPE, cache=tmp_path)
    lab.answers = {}  # a host that is asked now fails the test
    again = profile(TWO, RECIPE, cache=tmp_path)
    assert again.devices == first.devices
    assert "nvidia x: figures from the cache; --no-cache measures anew" in caplog.text
    assert len(lab.pairs) == 2  # links are measured each time
    with pytest.raises(KeyError):
        profile(TWO, RECIPE, cache=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"driver": "2"},
        {"num_threads": 2},
        {"model": "y"},
    ],
)
def test_another_device_is_measured_anew(lab: Lab, tmp_path: Path, changes: dict[str, Any]) -> None:
    lab.answers = {"a1": bench(("nvidia", "x"))}
    one = facts(host("a1", device(0, "nvidia", "x", driver="1")))
    profile(one, RECIPE, cache=tmp_path)
    lab.answers = {}
    profile(one, RECIPE, cache=tmp_path)
    other = facts(host("a1", replace(device(0, "nvidia", "x", driver="1"), **changes)))
    with pytest.raises(KeyError):
        profile(other, RECIPE, cache=tmp_path)


def test_another_shape_torch_or_haste_is_measured_anew(lab: Lab, tmp_path: Path) -> None:
    one = facts(host("a1", device(0, "nvidia", "x"), torch_version="2.9"))
    lab.answers = {"a1": bench(("nvidia", "x"))}
    profile(one, RECIPE, cache=tmp_path)
    lab.answers = {}
    for found, recipe, quick in (
        (facts(host("a1", device(0, "nvidia", "x"), torch_version="2.10")), RECIPE, False),
        (one, replace(RECIPE, data=DataSpec(seq_len=16)), False),
        (one, RECIPE, True),
    ):
        with pytest.raises(KeyError):
            profile(found, recipe, cache=tmp_path, quick=quick)
    profile(one, replace(RECIPE, name="other-name"), cache=tmp_path)


def test_damaged_cache_is_measured_anew(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = facts(host("a1", device(0, "nvidia", "x")))
    lab.answers = {"a1": bench(("nvidia", "x"))}
    first = profile(one, RECIPE, cache=tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_text("{")
    assert profile(one, RECIPE, cache=tmp_path).devices == first.devices
    assert "the kept figures are damaged" in caplog.text


def test_cache_that_cannot_be_written_only_warns(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    lab.answers = {"a1": bench(("nvidia", "x"))}
    profile(facts(host("a1", device(0, "nvidia", "x"))), RECIPE, cache=tmp_path / "file")
    assert "the figures of x are not kept" in caplog.text


# --- estimates ----------------------------------------------------------------------------------------------


def test_estimates_are_labelled_assumed_and_emulated_chips_modelled() -> None:
    chip = EmulatedChip(vendor="v", model="m", num_devices=1, flops_per_s=2e9, memory_bytes=3)
    cards = host(
        "a1", device(0, "nvidia", "NVIDIA A100-SXM4-80GB"), device(1, "cpu", num_threads=4)
    )
    found = profile_from_spec(facts(cards, host("a2", device(0, "v", emulated=chip))), RECIPE)
    by_vendor = {item.vendor: item for item in found.devices}
    assert {vendor: item.source for vendor, item in by_vendor.items()} == {
        "cpu": Source.ASSUMED,
        "nvidia": Source.ASSUMED,
        "v": Source.MODELLED,
    }
    a100 = by_vendor["nvidia"]
    assert a100.matmul_flops_per_s.value == pytest.approx(0.40 * 312e12)
    assert "40% of 312 TFLOP/s" in a100.matmul_flops_per_s.why
    assert a100.timings[0].layer_backward_s == 2 * a100.timings[0].layer_forward_s
    assert by_vendor["v"].matmul_flops_per_s.value == 2e9
    assert {link.source for link in found.links} == {Source.ASSUMED}
    assert len(found.warnings) == len(found.links) == 3
    assert not found.curves


def test_chip_without_a_published_peak_is_not_estimated() -> None:
    with pytest.raises(PreflightError, match="nvidia unheard-of: no peak is published") as caught:
        profile_from_spec(facts(host("a1", device(0, "nvidia", "unheard-of"))), RECIPE)
    assert "--from-spec" in (caught.value.hint or "")
