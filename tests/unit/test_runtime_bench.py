"""Figures of a device: declared ones pass through FLOP counts, real ones are medians."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from hetrun.arch import layer_forward_flops
from hetrun.errors import ConfigError, JobError, PreflightError
from hetrun.model import Dtype, EmulatedChip, ModelSpec, Source
from hetrun.runtime import bench, measure
from hetrun.runtime.bench import BenchDevice, BenchRequest, modelled, read_request

MODEL = ModelSpec(num_layers=2, hidden_size=16, num_heads=2, ffn_size=24, vocab_size=256)
CHIP = EmulatedChip(vendor="red", model="r1", num_devices=4, flops_per_s=2e9, memory_bytes=1 << 30)
EMULATED = BenchDevice(vendor="red", model="r1", torch_device="cpu", emulated=CHIP)
REAL = BenchDevice(vendor="cpu", model="some cpu", torch_device="cpu")
REQUEST = BenchRequest(
    model=MODEL, seq_len=8, rows=(1, 3), dtype=Dtype.FP32, devices=(EMULATED, REAL)
)


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """torch.optim loads torch's compiler on first use, a second that belongs to no test."""
    importlib.import_module("torch._dynamo")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARM_UP", 1)
    monkeypatch.setattr(measure, "MAX_REPEATS", 5)
    monkeypatch.setattr(measure, "_MATMUL_SIZE", {"cpu": 32})
    monkeypatch.setattr(measure, "_COPY_BYTES", {"cpu": 1 << 12})


def test_emulated_chip_yields_its_declared_speed() -> None:
    result = modelled(REQUEST, EMULATED, CHIP)
    assert (result.source, result.vendor, result.model) == (Source.MODELLED, "red", "r1")
    assert [timing.rows for timing in result.timings] == [1, 3]
    for timing in result.timings:
        expected_s = layer_forward_flops(MODEL, timing.rows, 8) / 2e9
        assert timing.layer_forward_s == pytest.approx(expected_s)
        assert timing.layer_backward_s == pytest.approx(2 * expected_s)
        assert timing.head_forward_s == pytest.approx(2 * 256 * 16 * timing.rows * 8 / 2e9)
        assert timing.embedding_forward_s == timing.embedding_backward_s == 0
    assert result.optimizer_s_per_parameter == pytest.approx(5e-9)
    assert result.matmul_flops_per_s.value == 2e9
    assert result.copy_bytes_per_s.value is None


def test_request_is_read_as_profile_writes_it(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(asdict(REQUEST)))
    assert read_request(tmp_path) == REQUEST
    (tmp_path / "bench.json").write_text(json.dumps({**asdict(REQUEST), "row": 1}))
    with pytest.raises(ConfigError, match="unknown key 'row'"):
        read_request(tmp_path)


@pytest.mark.usefixtures("quick")
def test_real_device_is_measured_for_every_size() -> None:
    result = measure.measured(REQUEST, REAL)
    assert result.source is Source.MEASURED
    assert [timing.rows for timing in result.timings] == [1, 3]
    for timing in result.timings:
        figures = asdict(timing)
        assert all(figures[name] > 0 for name in figures if name.endswith("_s"))
    assert result.optimizer_s_per_parameter > 0
    assert (result.matmul_flops_per_s.value or 0) > 0
    assert (result.copy_bytes_per_s.value or 0) > 0


def test_device_that_torch_does_not_see_is_an_error() -> None:
    with pytest.raises(PreflightError, match="sees 0 'xpu' devices, need number 0"):
        measure.measured(REQUEST, replace(REAL, torch_device="xpu"))
    with pytest.raises(PreflightError, match="cannot import no_such_plugin"):
        measure.measured(REQUEST, replace(REAL, torch_plugin="no_such_plugin"))


def test_layer_that_does_not_fit_names_the_knob(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    def refuse(self: measure.Bench, rows: int) -> None:
        raise OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(measure.Bench, "timing", refuse)
    with pytest.raises(JobError, match="one layer of 1 rows x 8 tokens") as caught:
        measure.measured(REQUEST, REAL)
    assert "microbatch_rows" in str(caught.value.hint)


def test_figure_is_the_median_of_the_repeats_after_the_warm_up() -> None:
    durations: Iterator[float] = iter([9.0, 9.0, 9.0, 1.0, 5.0, 2.0, 2.0, 3.0])
    result = measure.repeat(lambda: (next(durations), 1.0))
    assert result.medians_s == (2.0, 1.0)
    assert result.spread == pytest.approx((6.0 - 2.0) / 3.0)


def test_threads_are_those_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(measure, "Bench", None)
    with pytest.raises(TypeError):
        measure.measured(REQUEST, replace(REAL, num_threads=3))
    assert asked == [3]


def test_wrong_arguments_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bench, "die_with_parent", lambda: None)
    monkeypatch.setattr("sys.argv", ["bench"])
    assert bench.main() == 1
    assert "need the job directory" in caplog.text
