"""bf16-mixed: fp32 parameters and gradients, bf16 products and activations, and a refusal where there is no bf16."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from hetrun import arch
from hetrun.errors import PreflightError
from hetrun.model import Dtype
from hetrun.planner.cost import Piece
from hetrun.planner.memory import Load, stage_bytes, state_bytes
from hetrun.runtime.bench import BenchRequest
from hetrun.runtime.deferred import DeferredWeights, accumulate_all
from hetrun.runtime.measure import Bench
from hetrun.runtime.network import Stage, summed_loss
from hetrun.runtime.precision import ACTIVATION_DTYPE, TORCH_DTYPE, Precision
from hetrun.schedule.sync import gradient_buckets
from tests.dist.plans import Pipeline, make_plan
from tests.unit.checkpoint_lab import MODEL, SEQ_LEN, whole_stage

CPU = torch.device("cpu")
MIXED = Precision(Dtype.BF16_MIXED, CPU)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """These products are too small to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _train(stage: Stage, precision: Precision, *, put_off: bool = False) -> list[torch.Tensor]:
    """Gradients of three microbatches of one step."""
    precision.prepare(stage)
    deferred = DeferredWeights(stage, precision.arithmetic) if put_off else None
    tokens = torch.randint(
        0, MODEL.vocab_size, (3, 2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(3)
    )
    with precision.step():
        for rows in tokens:
            with precision.arithmetic():
                logits = stage(rows[:, :-1])
            assert logits.dtype is precision.activations
            loss = summed_loss(logits, rows[:, 1:], torch.ones(2, SEQ_LEN))
            loss.backward()
            if deferred is not None:
                accumulate_all(deferred.take())
    return [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]


def test_gradients_are_fp32_and_close_to_those_of_fp32_arithmetic() -> None:
    exact = _train(whole_stage(dtype=Dtype.FP32), Precision(Dtype.FP32, CPU))
    mixed = _train(whole_stage(dtype=Dtype.BF16_MIXED), MIXED)
    assert {gradient.dtype for gradient in mixed} == {torch.float32}
    away = max(float((a - b).norm() / b.norm()) for a, b in zip(mixed, exact, strict=True))
    assert 1e-5 < away < 0.05  # bf16 has 8 bits, and it was used


def test_gradients_gather_in_fp32_over_microbatches() -> None:
    """A sum in bf16 would lose what is 256 times smaller than it."""
    weight = torch.nn.Parameter(torch.ones(1, 1))
    with MIXED.step():
        for x in (256.0, 1.0, 1.0):
            with MIXED.arithmetic():
                y = torch.nn.functional.linear(torch.full((1, 1), x), weight)
            y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.item() == 258.0


def test_put_off_gradients_are_those_of_one_pass_to_the_bit() -> None:
    at_once = _train(whole_stage(dtype=Dtype.BF16_MIXED), MIXED)
    put_off = _train(whole_stage(dtype=Dtype.BF16_MIXED), MIXED, put_off=True)
    assert len(put_off) == len(at_once)
    for a, b in zip(put_off, at_once, strict=True):
        assert a.dtype is torch.float32
        assert torch.equal(a, b)


def test_put_off_gradients_gather_in_fp32() -> None:
    linear = torch.nn.Linear(1, 1)
    deferred = DeferredWeights(linear, MIXED.arithmetic)
    with MIXED.step():
        for x in (256.0, 1.0, 1.0):
            with MIXED.arithmetic():
                y = linear(torch.full((1, 1), x, requires_grad=True))
            y.backward(torch.ones(1, 1, dtype=torch.bfloat16))
    accumulate_all(deferred.take())
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None
    assert (linear.weight.grad.item(), linear.bias.grad.item()) == (258.0, 3.0)
    assert linear.bias.grad.dtype is torch.float32


def test_only_a_step_keeps_the_copies_of_matrices() -> None:
    """Two forwards of a step share a copy; the next step sees the updated matrix."""
    weight = torch.nn.Parameter(torch.ones(4, 4))
    x = torch.ones(1, 4)

    def once() -> torch.Tensor:
        with MIXED.arithmetic():
            return torch.nn.functional.linear(x, weight)

    with MIXED.step():
        first, second = once(), once()
    copies = [y.grad_fn.next_functions[1][0].next_functions[0][0] for y in (first, second)]
    assert copies[0] is copies[1]
    weight.data.mul_(2)
    with MIXED.step():
        assert once()[0, 0].item() == 8.0


def test_activations_and_messages_count_two_bytes_and_gradients_four() -> None:
    for dtype in Dtype:
        assert arch.BYTES_PER_ELEMENT[dtype] == ACTIVATION_DTYPE[dtype].itemsize
        assert arch.BYTES_PER_PARAMETER[dtype] == TORCH_DTYPE[dtype].itemsize
    plan = make_plan((Pipeline((8,), 1, 1), Pipeline((8,), 1, 1)), dtype=Dtype.BF16_MIXED)
    (bucket,) = gradient_buckets(
        plan.split.ranks,
        plan.split.replicas,
        plan.recipe.model,
        arch.BYTES_PER_PARAMETER[Dtype.BF16_MIXED],
    )
    assert bucket.num_bytes == 4 * arch.total_parameters(plan.recipe.model)


def test_memory_of_mixed_is_states_of_fp32_with_a_copy_and_activations_of_bf16() -> None:
    of = state_bytes(Dtype.BF16_MIXED)
    assert (of.weight, of.gradient, of.optimizer) == (6, 4, 8)
    piece = Piece(first_layer=1, num_layers=2, has_embedding=False, has_head=False)

    def held(dtype: Dtype, window: int) -> int:
        return stage_bytes(MODEL, dtype, piece, Load(rows=2, seq_len=64, window=window))

    per_microbatch = [held(d, 3) - held(d, 2) for d in (Dtype.BF16_MIXED, Dtype.BF16, Dtype.FP32)]
    assert per_microbatch[0] == per_microbatch[1] < per_microbatch[2]
    more = held(Dtype.BF16_MIXED, 3) - held(Dtype.BF16, 3)
    assert more == (18 - 8) * arch.layers_parameters(MODEL, 1, 3)


def test_profile_measures_what_trains() -> None:
    request = BenchRequest(
        model=MODEL, seq_len=SEQ_LEN, rows=(1,), dtype=Dtype.BF16_MIXED, devices=(), quick=True
    )
    bench = Bench(request, CPU)
    stage = bench.stage(num_layers=1)
    assert {parameter.dtype for parameter in stage.parameters()} == {torch.float32}
    with bench.precision.arithmetic():
        assert stage(bench._hidden(1)).dtype is torch.bfloat16
    bench._forward_backward(stage, bench._hidden(1), None)()
    assert {p.grad.dtype for p in stage.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.BF16_MIXED])
def test_a_device_without_bf16_is_refused(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as cards before Ampere, whose torch would emulate it in fp32 without a word."""

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation

    backend = SimpleNamespace(is_bf16_supported=is_bf16_supported)
    monkeypatch.setattr(torch, "cpu", backend)
    with pytest.raises(PreflightError, match="has no bf16 arithmetic") as caught:
        Precision(dtype, CPU)
    assert (
        caught.value.hint
        == "set dtype: fp32 in the recipe, or leave this device out of the inventory"
    )
    assert Precision(Dtype.FP32, CPU).parameters is torch.float32


def test_a_product_that_fails_is_a_refusal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not implemented for 'BFloat16'")

    monkeypatch.setattr(torch, "mm", fail)
    with pytest.raises(PreflightError, match="no bf16: not implemented"):
        Precision(Dtype.BF16_MIXED, CPU)
