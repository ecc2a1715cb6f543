"""A model of any family that is cut computes what it computes uncut, as transformers itself runs it."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetrun.arch import layer_at
from hetrun.arch.hf import from_config
from hetrun.errors import ConfigError, PreflightError
from hetrun.model import Dtype
from hetrun.runtime.deferred import DeferredWeights, accumulate_all
from hetrun.runtime.hf_model import need_transformers, outline
from hetrun.runtime.hf_stage import HfStage, build_stage
from hetrun.runtime.hf_weights import first_values
from hetrun.runtime.network import Stage, summed_loss
from hetrun.runtime.precision import Precision
from hetrun.schedule.sync import unit_parameters
from tests.unit.hf_lab import (
    NUM_LAYERS,
    SEQ_LEN,
    TINY,
    VOCAB,
    a_stage,
    added_gradients,
    keys_of,
    largest_error,
    pass_through,
    some_tokens,
    stage_plan,
    tiny,
    uncut,
    whole,
)

pytestmark = pytest.mark.slow  # imports transformers, and torch's compiler with it

HELD = (range(3), range(2, 4), range(4, 5))  # layer 2 lives on two stages
CUTS = ((range(3), range(3, 4), HELD[2]), (range(2), range(2, 4), HELD[2]))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are too small to share their work out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", sorted(TINY))
def test_cut_model_has_loss_and_gradients_of_the_uncut_one(kind: str) -> None:
    """Two microbatches that are cut in two ways; the stage in the middle recomputes.

    Norms, softmax, rotary positions and routers are fp32 inside in many families, of both models alike.
    """
    model = tiny(kind)
    stages = [a_stage(model, layers, recompute=layers.start == 2) for layers in HELD]
    built = uncut(model, stages)
    for number, parts in enumerate(CUTS):
        tokens = some_tokens(number)
        loss = summed_loss(built(tokens).logits, tokens, torch.ones_like(tokens))
        loss.backward()
        assert pass_through(stages, parts, tokens) == pytest.approx(loss.item(), rel=1e-13)
    assert largest_error(added_gradients(stages), built) < 1e-12


@pytest.mark.parametrize("kind", sorted(TINY))
def test_built_units_have_the_counted_parameters_and_values_that_no_cut_changes(kind: str) -> None:
    model = tiny(kind)
    at_once = whole(model)
    units = at_once.units()
    for unit, parameters in units.items():
        assert sum(p.numel() for p in parameters.values()) == unit_parameters(unit, model)
    values = dict(at_once.named_parameters())
    for layers in HELD:
        for unit, parameters in a_stage(model, layers).units().items():
            assert list(parameters) == list(units[unit])  # in one order, for gradients travel flat
            for name, parameter in parameters.items():
                assert torch.equal(parameter, values[name]), name


@pytest.mark.parametrize("kind", sorted(TINY))
def test_gradients_that_can_wait_are_those_that_are_counted_so(kind: str) -> None:
    model = tiny(kind)
    stage = whole(model)
    assert isinstance(stage, HfStage)
    for index in range(NUM_LAYERS):
        layer = stage._built.get_submodule(f"{stage.outline.anatomy.layers}.{index}")
        waiting = sum(
            part.weight.numel()
            for part in layer.modules()
            if type(part).forward is torch.nn.Linear.forward
        )
        assert waiting == layer_at(model, index).waiting_parameters


@pytest.mark.parametrize("kind", sorted(TINY))
def test_config_that_transformers_saved_is_counted_like_the_published_one(
    kind: str, tmp_path: Path
) -> None:
    """It writes every key, with its own defaults, and some under other names."""
    from transformers import AutoConfig

    keys = keys_of(kind)
    AutoConfig.for_model(
        kind, **{k: v for k, v in keys.items() if k != "model_type"}
    ).save_pretrained(tmp_path)
    saved = from_config(json.loads((tmp_path / "config.json").read_text()))
    published = from_config(keys)
    for what in (
        "counts",
        "tied_embeddings",
        "num_layers",
        "hidden_size",
        "num_kv_heads",
        "family",
    ):
        assert getattr(saved, what) == getattr(published, what), what


def test_another_seed_gives_other_values() -> None:
    stages = [
        build_stage(tiny("qwen3"), stage_plan(range(NUM_LAYERS)), seq_len=SEQ_LEN) for _ in range(2)
    ]
    for seed, stage in enumerate(stages):
        stage.initialise(seed=seed, device=torch.device("cpu"), dtype=torch.float32)
    first, second = (dict(stage.named_parameters()) for stage in stages)
    name = "layer.0.model.layers.0.mlp.up_proj.weight"
    assert first[name].std().item() == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(first[name], second[name])
    other_layer = second[name.replace(".0.", ".1.")]
    assert not torch.equal(second[name], other_layer)


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt2", "qwen3_moe", "qwen2"])
def test_gradients_of_weights_may_wait(kind: str) -> None:
    """Linear maps put theirs off; what is no nn.Linear has its own at once."""
    model = tiny(kind)
    stages = [a_stage(model, layers, recompute=layers.start == 2) for layers in HELD]
    built = uncut(model, stages)
    deferred = [DeferredWeights(stage) for stage in stages]
    products = 0
    for number, parts in enumerate(CUTS):
        tokens = some_tokens(number)
        summed_loss(built(tokens).logits, tokens, torch.ones_like(tokens)).backward()
        pass_through(stages, parts, tokens)
        for put_off in deferred:
            waiting = put_off.take()
            products += len(waiting)
            accumulate_all(waiting)
    assert products >= 2 * (1 if kind == "gpt2" else 1 + 4 * NUM_LAYERS)
    assert largest_error(added_gradients(stages), built) < 1e-12


@pytest.mark.parametrize("kind", ["mixtral", "gpt2"])
def test_stages_do_without_the_embedding_or_any_layer_for_a_microbatch(kind: str) -> None:
    model = tiny(kind)
    stages = [
        a_stage(model, range(1)),
        a_stage(model, range(NUM_LAYERS)[1:4]),
        a_stage(model, range(4, 5)),
    ]
    built = uncut(model, stages)
    tokens = some_tokens()
    hidden = stages[0](tokens, range(0))  # what a real cut below 1 leaves here
    assert hidden.shape == (*tokens.shape, 16)
    loss = summed_loss(built(tokens).logits, tokens, torch.ones_like(tokens))
    assert pass_through(stages, [range(1), range(1, 4), range(4, 5)], tokens) == pytest.approx(
        loss.item(), rel=1e-13
    )
    received = torch.randn(2, SEQ_LEN, 16, dtype=torch.float64)
    assert torch.equal(stages[1](received, range(1, 1)), received)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma2", "opt"])
def test_other_formats_compute_alike_cut_and_uncut(kind: str, dtype: torch.dtype) -> None:
    model = tiny(kind)
    stages = [a_stage(model, layers, dtype=dtype) for layers in HELD]
    built = uncut(model, stages, dtype)
    tokens = some_tokens()
    loss = summed_loss(built(tokens).logits, tokens, torch.ones_like(tokens))
    assert pass_through(stages, CUTS[0], tokens) == loss.item()
    assert {p.dtype for stage in stages for p in stage.parameters()} == {dtype}


@pytest.mark.parametrize("kind", ["mixtral", "olmo2", "qwen3"])
def test_bf16_mixed_sends_bf16_and_gathers_fp32_alike_cut_and_uncut(kind: str) -> None:
    precision = Precision(Dtype.BF16_MIXED, torch.device("cpu"))
    model, tokens = tiny(kind), some_tokens()
    stages = [a_stage(model, layers, dtype=precision.parameters) for layers in HELD]
    at_once = whole(model, dtype=precision.parameters)
    for stage in (*stages, at_once):
        precision.prepare(stage)
    with precision.step(), precision.arithmetic():
        loss = summed_loss(at_once(tokens), tokens, torch.ones_like(tokens))
        assert pass_through(stages, CUTS[0], tokens) == loss.item()
        assert stages[0](tokens, HELD[0]).dtype is torch.bfloat16
    loss.backward()
    found, expected = added_gradients(stages), added_gradients([at_once])
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_dropout_is_off_while_training() -> None:
    keys = json.loads(tiny("gpt2").config or "")
    config = json.dumps({**keys, "attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5})
    stage = whole(replace(tiny("gpt2"), config=config)).train()
    assert torch.equal(stage(some_tokens()), stage(some_tokens()))


def test_a_layer_alone_computes_what_it_does_in_its_stage() -> None:
    stage = a_stage(tiny("gemma3_text"), range(1, 2))
    x = torch.randn(2, SEQ_LEN, 16, dtype=torch.float64)
    assert torch.equal(stage.layer_alone(x)(x), stage(x))


def test_own_decoder_stays_where_it_computes_the_same() -> None:
    plain = replace(tiny("llama"), config=None, counts=None, family="llama")
    assert type(build_stage(plain, stage_plan(range(NUM_LAYERS)), seq_len=SEQ_LEN)) is Stage
    built = build_stage(tiny("llama"), stage_plan(range(NUM_LAYERS)), seq_len=SEQ_LEN)
    assert type(built) is HfStage


def test_own_decoder_and_transformers_agree_on_a_plain_llama(tmp_path: Path) -> None:
    keys = {key: value for key, value in keys_of("llama").items() if key != "rope_scaling"}
    theirs = whole(from_config(keys, transformers=True))
    for parameter in theirs.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(16.0)  # far from even attention
    uncut(theirs.model, [theirs], torch.float32).save_pretrained(tmp_path)
    ours = build_stage(from_config(keys), stage_plan(range(NUM_LAYERS)), seq_len=SEQ_LEN)
    assert type(ours) is Stage
    ours.initialise(
        seed=0,
        device=torch.device("cpu"),
        dtype=torch.float64,
        weights=first_values(ours, str(tmp_path)),
    )
    tokens = some_tokens()
    difference = (ours(tokens) - theirs(tokens)).abs().max().item()
    assert difference < 1e-6 * theirs(tokens).abs().max().item()  # its norms are fp32 inside


def test_what_was_counted_otherwise_is_refused_by_unit() -> None:
    model = tiny("gpt2")
    assert model.counts is not None
    (run,) = model.counts.layers
    wrong = replace(model.counts, layers=(replace(run, parameters=run.parameters + 1),))
    with pytest.raises(ConfigError, match=r"layer\.0 of this gpt2 has \d+ parameters"):
        outline(replace(model, counts=wrong))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "t5"}, "'t5' is none of the families"),
        ({"n_embd": 15}, "transformers .* cannot build this gpt2 config"),
        ({"layer_norm_epsilon": "x"}, "transformers .* cannot build this gpt2 config"),
        ({"activation_function": "none"}, "transformers .* cannot build this gpt2 config"),
    ],
)
def test_config_that_transformers_cannot_build_is_refused(
    config: dict[str, object], says: str
) -> None:
    keys = json.loads(tiny("gpt2").config or "")
    model = replace(tiny("gpt2"), config=json.dumps({**keys, **config}))
    with pytest.raises(ConfigError, match=says):
        outline(model)


def test_what_a_config_says_of_kernels_and_results_changes_nothing() -> None:
    """A plan may come from elsewhere than from our recipes."""
    keys = json.loads(tiny("mixtral").config or "")
    noise = {
        "_attn_implementation": "somebody/kernels",
        "attn_implementation": "somebody/kernels",
        "auto_map": {"AutoModelForCausalLM": "theirs--modeling.Model"},
        "output_router_logits": True,
        "return_dict": False,
        "use_cache": True,
    }
    model = replace(tiny("mixtral"), config=json.dumps({**keys, **noise}))
    assert torch.equal(whole(model)(some_tokens()), whole(tiny("mixtral"))(some_tokens()))


def test_missing_or_old_transformers_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PreflightError, match="cannot be imported") as caught:
        need_transformers()
    assert "pip install" in (caught.value.hint or "")
    old = types.ModuleType("transformers")
    old.__version__ = "4.57.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(PreflightError, match=r"transformers 4\.57\.1 is too old, need 5\.0"):
        need_transformers()


def test_vocabulary_of_the_tokens_is_that_of_the_model() -> None:
    assert tiny("gpt2").vocab_size == VOCAB
    assert whole(tiny("gpt2"))(some_tokens()).shape == (2, SEQ_LEN, VOCAB)
