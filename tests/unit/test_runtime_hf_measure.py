"""Layers, embedding and head of a model that transformers builds are timed like those of our own decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hetrun.arch import layer_runs
from hetrun.errors import ConfigError
from hetrun.model import Dtype
from hetrun.runtime import measure, repeats
from hetrun.runtime.bench import BenchDevice, BenchRequest
from tests.unit.hf_lab import tiny

pytestmark = pytest.mark.slow  # imports transformers

CHIP = BenchDevice(vendor="cpu", model="some cpu", torch_device="cpu")
REQUEST = BenchRequest(
    model=tiny("qwen3"), seq_len=8, rows=(1, 3), dtype=Dtype.FP32, devices=(CHIP,), recompute=True
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(repeats, "WARM_UP", 1)
    monkeypatch.setattr(repeats, "MAX_REPEATS", 5)
    monkeypatch.setattr(measure, "_MATMUL_SIZE", {"cpu": 32})
    monkeypatch.setattr(measure, "_COPY_BYTES", {"cpu": 1 << 12})
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_part_has_its_seconds_stored_and_recomputed() -> None:
    timings = measure.measured(REQUEST, CHIP).timings
    assert [(t.recompute, t.rows) for t in timings] == [
        (False, 1),
        (False, 3),
        (True, 1),
        (True, 3),
    ]
    for timing in timings:
        assert not timing.runs
        assert min(timing.layer_forward_s, timing.embedding_forward_s, timing.head_forward_s) > 0
        assert timing.layer_weights_s is not None
        assert 0 < timing.layer_weights_s <= timing.layer_backward_s


def test_layers_that_differ_are_timed_run_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dense layer among those with experts; the mean is over all five."""
    model = tiny("qwen3_moe")
    asked: list[int] = []
    build = measure.Bench.stage

    def noted(self: measure.Bench, *, first_layer: int = 0, **more: object) -> object:
        if more.get("num_layers"):
            asked.append(first_layer)
        return build(self, first_layer=first_layer, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(measure.Bench, "stage", noted)
    request = replace(REQUEST, model=model, rows=(2,), recompute=False)
    (timing,) = measure.measured(request, CHIP).timings
    runs = layer_runs(model)
    assert [run.num_layers for run in timing.runs] == [run.num_layers for run in runs] == [1, 1, 3]
    assert asked[:3] == [0, 1, 2]
    total = sum(run.num_layers * run.forward_s for run in timing.runs)
    assert timing.layer_forward_s == pytest.approx(total / 5)
    assert timing.layer_weights_s is None  # nothing is put off where layers differ


def test_shares_of_layers_are_timed_where_the_config_says_how_to_cut_them() -> None:
    request = replace(REQUEST, rows=(2,), recompute=False, tp=(1, 2))
    timings = measure.measured(request, CHIP).timings
    assert [timing.tp for timing in timings] == [1, 2]
    assert all(timing.layer_forward_s > 0 for timing in timings)
    with pytest.raises(ConfigError, match="2 ranks share layers of transformers' mixtral"):
        measure.measured(replace(request, model=tiny("mixtral")), CHIP)
