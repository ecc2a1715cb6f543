"""A backward in two passes gives the gradients of one, and holds no more in between than the second one needs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hetrun.model import ModelSpec
from hetrun.runtime.deferred import DeferredWeights, accumulate_all
from hetrun.runtime.network import Layer, Stage, summed_loss
from tests.dist.plans import MODEL, SEQ_LEN, Pipeline, make_plan

TIED = replace(MODEL, tied_embeddings=True)
Gradients = dict[str, Tensor | None]


def _whole(model: ModelSpec, *, recompute: bool = False) -> Stage:
    (stage,) = make_plan((Pipeline((8,), 1, 1),), model=model).split.replicas[0].stages
    stage = replace(stage, recompute=recompute)
    whole = Stage(model, stage, seq_len=SEQ_LEN)
    return whole.initialise(seed=3, device=torch.device("cpu"), dtype=torch.float64)


def _losses(stage: Stage, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(count):
        tokens = torch.randint(MODEL.vocab_size, (2, SEQ_LEN), generator=generator)
        losses.append(summed_loss(stage(tokens), tokens, torch.ones_like(tokens)))
    return losses


def _gradients(module: nn.Module) -> Gradients:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()
    }


def _difference(found: Gradients, expected: Gradients) -> float:
    assert found.keys() == expected.keys()
    differences = []
    for name, gradient in expected.items():
        other = found[name]
        assert gradient is not None
        assert other is not None, name
        differences.append(((gradient - other).abs().max() / gradient.abs().max()).item())
    return max(differences)


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["own head", "tied head"])
@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_two_passes_add_up_to_the_gradients_of_one(model: ModelSpec, recompute: bool) -> None:
    plain, split = _whole(model), _whole(model, recompute=recompute)
    deferred = DeferredWeights(split)
    put_off = []
    for expected, loss in zip(_losses(plain), _losses(split), strict=True):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
        expected.backward()
        loss.backward()
        put_off.append(deferred.take())
    before = _gradients(split)
    assert before["layer.3.attention_norm.weight"] is not None  # norms are done at once
    assert before["layer.3.down.weight"] is None  # no matrix is
    for products in put_off:
        assert len(products) == 8 * 7 + 1
        accumulate_all(products)
        assert not products
    assert _difference(_gradients(split), _gradients(plain)) < 1e-12


def test_input_gradient_does_not_wait_for_the_weights() -> None:
    plain, split = _whole(MODEL), _whole(MODEL)
    DeferredWeights(split)
    x = torch.randn(2, SEQ_LEN, MODEL.hidden_size, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for stage, own in zip((plain, split), inputs, strict=True):
        layer = stage.layer["4"]
        layer(own, stage._rotation_2TD).square().sum().backward()
    first, second = (own.grad for own in inputs)
    assert first is not None
    assert second is not None
    torch.testing.assert_close(first, second, rtol=1e-13, atol=0.0)


class Bent(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_any_linear_layer_of_a_tree_is_split_and_others_are_left_alone() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4, bias=False))
        return nn.Sequential(mlp, Bent(4, 4), nn.Linear(4, 3)).double()

    plain, split = build(), build()
    frozen = split[2]
    for module in (plain, split):
        module[2].weight.requires_grad_(False)
    deferred = DeferredWeights(split)
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    for module in (plain, split):
        module(x).square().sum().backward()
    assert split[1].weight.grad is not None
    assert split[0][0].weight.grad is None
    products = deferred.take()
    assert len(products) == 3
    accumulate_all(products)
    assert frozen.weight.grad is None
    assert frozen.bias.grad is not None
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            found = dict(split.named_parameters())[name].grad
            torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-14)


def test_without_gradients_nothing_is_put_off() -> None:
    split = _whole(MODEL)
    deferred = DeferredWeights(split)
    with torch.no_grad():
        split(torch.zeros(1, SEQ_LEN, dtype=torch.long))
    assert deferred.take() == []


def _watched(layer: nn.Module) -> dict[str, weakref.ref[Tensor]]:
    """References to what comes out of each part of a layer, filled in by its forward."""
    seen: dict[str, weakref.ref[Tensor]] = {}

    def hook(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def note(module: nn.Module, args: object, output: Tensor) -> None:
            seen.setdefault(name, weakref.ref(output))

        return note

    for name, part in layer.named_children():
        part.register_forward_hook(hook(name))
    return seen


def test_after_the_first_pass_only_inputs_and_gradients_of_products_are_held() -> None:
    split = _whole(MODEL)
    deferred = DeferredWeights(split)
    layer = split.layer["4"]
    assert isinstance(layer, Layer)
    seen = _watched(layer)
    (loss,) = _losses(split, 1)
    assert seen["gate"]() is not None
    loss.backward()
    del loss
    products = deferred.take()
    assert seen["gate"]() is None  # autograd held it for silu
    assert seen["q"]() is None
    storages = {p.x.untyped_storage().data_ptr() for p in products}
    assert len(storages) == 8 * 4 + 1  # q, k, v share one, gate and up another
    assert all(p.x.grad_fn is None for p in products)


def test_recomputed_layer_holds_its_input_alone() -> None:
    stored, again = _whole(MODEL), _whole(MODEL, recompute=True)
    for stage, is_held in ((stored, True), (again, False)):
        seen = _watched(stage.layer["4"])
        (loss,) = _losses(stage, 1)
        assert (seen["gate"]() is not None) is is_held
        loss.backward()
    assert _difference(_gradients(again), _gradients(stored)) == 0.0
