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
from hetrun.runtime import bench, measure, process, repeats
from hetrun.runtime.bench import BenchDevice, BenchRequest, modelled, read_request
from hetrun.schedule.shares import check_tp

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
    monkeypatch.setattr(repeats, "WARM_UP", 1)
    monkeypatch.setattr(repeats, "MAX_REPEATS", 5)
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


def test_emulated_chips_share_a_layer_evenly_and_run_a_forward_again() -> None:
    request = replace(REQUEST, tp=(1, 2), recompute=True)
    timings = modelled(request, EMULATED, CHIP).timings
    assert [(t.tp, t.recompute, t.rows) for t in timings] == [
        (tp, again, rows) for tp in (1, 2) for again in (False, True) for rows in (1, 3)
    ]
    layer_s = layer_forward_flops(MODEL, 3, 8) / 2e9
    last = timings[-1]
    assert last.layer_forward_s == pytest.approx(layer_s / 2)
    assert last.layer_backward_s == pytest.approx(3 * layer_s / 2)
    assert last.head_forward_s == timings[1].head_forward_s


def test_request_is_read_as_profile_writes_it(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(asdict(REQUEST)))
    assert read_request(tmp_path) == REQUEST
    (tmp_path / "bench.json").write_text(json.dumps({**asdict(REQUEST), "row": 1}))
    with pytest.raises(ConfigError, match="unknown key 'row'"):
        read_request(tmp_path)
    wrong = json.dumps({**asdict(REQUEST), "checks": [asdict(EMULATED)]})
    (tmp_path / "bench.json").write_text(wrong)
    with pytest.raises(ConfigError, match="checks of emulated chips"):
        read_request(tmp_path)


@pytest.mark.usefixtures("quick")
def test_real_device_is_measured_for_every_size() -> None:
    result = measure.measured(REQUEST, REAL)
    assert result.source is Source.MEASURED
    assert [timing.rows for timing in result.timings] == [1, 3]
    for timing in result.timings:
        figures = asdict(timing)
        assert all(figures[name] > 0 for name in figures if name.endswith("_s"))
        for part in ("layer", "head"):
            assert figures[f"{part}_weights_s"] < figures[f"{part}_backward_s"]
    assert result.optimizer_s_per_parameter > 0
    assert (result.matmul_flops_per_s.value or 0) > 0
    assert (result.copy_bytes_per_s.value or 0) > 0


@pytest.mark.usefixtures("quick")
def test_shares_and_recomputed_layers_are_measured_beside_the_whole_one() -> None:
    request = replace(REQUEST, tp=(1, 2), recompute=True, rows=(2,), quick=True)
    timings = measure.measured(request, REAL).timings
    assert [(t.tp, t.recompute) for t in timings] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    assert len({t.layer_backward_s for t in timings}) == 4
    assert all(0 < (t.layer_weights_s or 0) <= t.layer_backward_s for t in timings)
    assert len({t.head_forward_s for t in timings}) == 1
    assert all(t.layer_peak_bytes is None for t in timings)  # torch does not count them on a CPU


def test_share_of_a_layer_holds_its_part_of_every_matrix() -> None:
    bench_of = measure.Bench(REQUEST, torch.device("cpu"))
    whole, share = (bench_of.stage(num_layers=1, tp=tp).layer["0"] for tp in (1, 2))
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        sizes = [getattr(layer, name).weight.numel() for layer in (whole, share)]
        assert sizes[0] == 2 * sizes[1], name
    assert share.attention_norm.weight.numel() == 16


@pytest.mark.parametrize(
    ("tp", "part"), [(3, "num_heads is 4"), (4, "num_kv_heads is 2"), (2, "ffn_size is 27")]
)
def test_share_that_does_not_divide_is_refused(tp: int, part: str) -> None:
    model = replace(MODEL, num_heads=4, num_kv_heads=2, ffn_size=27 if tp == 2 else 24)
    with pytest.raises(ConfigError, match=part):
        check_tp(model, tp)


@pytest.mark.usefixtures("quick")
def test_check_takes_one_product_and_one_layer() -> None:
    result = measure.checked(replace(REQUEST, quick=True), replace(REAL, index=5))
    assert (result.vendor, result.model, result.index) == ("cpu", "some cpu", 5)
    assert result.layer_s > 0
    assert result.matmul_flops_per_s > 0


def test_peak_is_what_one_turn_takes_above_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        now = peak = 100

        def reset_peak_memory_stats(self, _: object) -> None:
            self.peak = self.now

        def memory_allocated(self, _: object) -> int:
            return self.now

        def max_memory_allocated(self, _: object) -> int:
            return self.peak

    backend = Backend()
    monkeypatch.setattr(torch, "mtia", backend)
    backend.peak = 1000  # of what ran before

    def once() -> tuple[float, ...]:
        backend.peak = max(backend.peak, backend.now + 30)
        return (1.0,)

    chip = measure.Bench(REQUEST, torch.device("mtia"))
    assert chip._peak_bytes(once) == 30
    assert measure.Bench(REQUEST, torch.device("cpu"))._peak_bytes(once) is None


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
    result = repeats.repeat(lambda: (next(durations), 1.0))
    assert result.medians_s == (2.0, 1.0)
    assert result.spread == pytest.approx((6.0 - 2.0) / 3.0)
    assert result.sums_s == (2.0, 6.0, 3.0, 3.0, 4.0)


def test_quick_figures_take_few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(repeats.repeat(lambda: (1.0,), quick=True).sums_s) == repeats.MIN_QUICK_REPEATS
    short = repeats.repeat(lambda: (1e-6,), quick=True)
    assert len(short.sums_s) == repeats.MAX_QUICK_REPEATS


def test_repeats_that_slow_down_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = iter([1.0] * 3 + [1.0 + number / 20 for number in range(30)])
    chip = measure.Bench(REQUEST, torch.device("cpu"))
    monkeypatch.setattr(repeats, "BUDGET_S", 99.0)
    chip._repeat("layer of 4 rows", lambda: (next(durations),))
    assert chip.findings == [
        "layer of 4 rows: repeats got 1.82 times as slow while measuring; throttled?"
    ]


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
    monkeypatch.setattr(process, "die_with_parent", lambda: None)
    monkeypatch.setattr("sys.argv", ["bench"])
    assert bench.main() == 1
    assert "need the job directory" in caplog.text
