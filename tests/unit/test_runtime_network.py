"""The decoder: its parameters are those that the planner counts, and cutting it changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hetrun import arch
from hetrun.model import ModelSpec, StagePlan
from hetrun.runtime.network import Layer, Stage, initial_value, summed_loss, unit_of
from hetrun.schedule.sync import unit_parameters
from tests.dist.plans import MODEL, SEQ_LEN, Pipeline, make_plan

CPU = torch.device("cpu")
TIED = replace(MODEL, tied_embeddings=True)


def _stages(model: ModelSpec, layers: tuple[int, ...], dtype: torch.dtype) -> list[Stage]:
    plan = make_plan((Pipeline(layers, 1, 1),), model=model)
    return [_build(model, stage, dtype) for stage in plan.split.replicas[0].stages]


def _build(model: ModelSpec, stage: StagePlan, dtype: torch.dtype) -> Stage:
    return Stage(model, stage, seq_len=SEQ_LEN).initialise(seed=3, device=CPU, dtype=dtype)


def _tokens(rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(MODEL.vocab_size, (rows, SEQ_LEN), generator=generator)


@pytest.mark.parametrize("model", [MODEL, TIED, replace(MODEL, num_kv_heads=None)])
def test_parameters_are_those_the_planner_counts(model: ModelSpec) -> None:
    (whole,) = _stages(model, (8,), torch.float32)
    assert sum(p.numel() for p in whole.parameters()) == arch.total_parameters(model)
    for unit, parameters in whole.units().items():
        held = sum(parameter.numel() for parameter in parameters.values())
        assert held == unit_parameters(unit, model), unit


@pytest.mark.parametrize("model", [MODEL, TIED])
@pytest.mark.parametrize("layers", [(5, 2, 1), (1, 7), (0, 8), (8, 0)])
def test_cut_model_computes_what_the_whole_one_does(
    model: ModelSpec, layers: tuple[int, ...]
) -> None:
    (whole,) = _stages(model, (8,), torch.float64)
    x = _tokens()
    expected = whole(x)
    for stage in _stages(model, layers, torch.float64):
        x = stage(x)
    assert x.equal(expected)


def test_tied_head_holds_the_embedding_under_its_name() -> None:
    first, last = _stages(TIED, (5, 3), torch.float64)
    assert set(last.units()) == {"layer.5", "layer.6", "layer.7", "embedding", "head"}
    assert set(last.units()["head"]) == {"head.norm.weight"}
    table = dict(first.named_parameters())["embedding.weight"]
    assert dict(last.named_parameters())["embedding.weight"].equal(table)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    (whole,) = _stages(MODEL, (8,), torch.float64)
    tokens = _tokens(1)
    changed = tokens.clone()
    changed[0, 7] = (tokens[0, 7] + 1) % MODEL.vocab_size
    before, after = whole(tokens)[0], whole(changed)[0]
    torch.testing.assert_close(before[:7], after[:7], rtol=1e-12, atol=1e-12)
    assert not before[7].allclose(after[7])


def test_layer_is_rotary_grouped_attention_and_swiglu() -> None:
    """Written out the long way: complex numbers for the rotation, one head at a time."""
    (whole,) = _stages(MODEL, (8,), torch.float64)
    layer = whole.layer["0"]
    assert isinstance(layer, Layer)
    x = torch.randn(1, SEQ_LEN, MODEL.hidden_size, dtype=torch.float64)
    expected = _layer_the_long_way(layer, x[0])
    torch.testing.assert_close(layer(x, whole._rotation_2TD)[0], expected, rtol=1e-10, atol=1e-12)


def _layer_the_long_way(layer: Layer, x: Tensor) -> Tensor:
    size = MODEL.hidden_size // MODEL.num_heads
    per_kv_head = MODEL.num_heads // layer.num_kv_heads
    y = _norm(x) * layer.attention_norm.weight
    q, k, v = (y @ matrix.weight.T for matrix in (layer.q, layer.k, layer.v))
    heads = []
    for head in range(MODEL.num_heads):
        mine = slice(head * size, head * size + size)
        kv = head // per_kv_head
        shared = slice(kv * size, kv * size + size)
        scores = _turn(q[:, mine]) @ _turn(k[:, shared]).T / math.sqrt(size)
        hidden = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, shared])
    x = x + torch.cat(heads, dim=-1) @ layer.o.weight.T
    y = _norm(x) * layer.ffn_norm.weight
    gate, up = y @ layer.gate.weight.T, y @ layer.up.weight.T
    return x + (gate * torch.sigmoid(gate) * up) @ layer.down.weight.T


def _norm(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + MODEL.norm_eps).sqrt()


def _turn(x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    frequencies = MODEL.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), frequencies)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def test_first_values_depend_on_name_and_seed_only() -> None:
    shape = torch.Size((40, 30))

    def value(name: str, seed: int) -> Tensor:
        return initial_value(name, shape, model=MODEL, seed=seed)

    a = value("layer.1.q.weight", 5)
    assert a.equal(value("layer.1.q.weight", 5))
    assert not a.equal(value("layer.1.q.weight", 6))
    assert not a.equal(value("layer.2.q.weight", 5))
    assert float(a.std()) == pytest.approx(0.02, rel=0.1)
    assert float(value("layer.1.o.weight", 5).std()) == pytest.approx(0.02 / 4, rel=0.1)
    assert value("head.norm.weight", 5).equal(torch.ones(shape))


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("embedding.weight", "embedding"),
        ("layer.12.attention_norm.weight", "layer.12"),
        ("head.output.weight", "head"),
    ],
)
def test_parameter_belongs_to_a_unit(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def test_summed_loss_leaves_out_what_is_not_valid() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[1, 2, 3], [4, 0, 1]])
    valid = torch.tensor([[1, 0, 1], [0, 0, 1]])
    kept = [(0, 0), (0, 2), (1, 2)]
    expected = -sum(logits[b, t].log_softmax(-1)[targets[b, t]].item() for b, t in kept)
    assert summed_loss(logits, targets, valid).item() == pytest.approx(expected)


def test_bf16_adds_up_its_loss_in_fp32() -> None:
    (whole,) = _stages(MODEL, (8,), torch.bfloat16)
    logits = whole(_tokens())
    assert logits.dtype is torch.bfloat16
    loss = summed_loss(logits, _tokens(), torch.ones_like(_tokens()))
    assert loss.dtype is torch.float32
    assert loss.item() / _tokens().numel() == pytest.approx(math.log(MODEL.vocab_size), rel=0.05)
