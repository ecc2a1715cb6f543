"""Tiny random models of every family, cut into stages, and the same models uncut as transformers builds them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hetrun.arch.hf import from_config
from hetrun.model import ModelSpec, StagePlan
from hetrun.runtime.hf_names import in_class
from hetrun.runtime.hf_stage import build_stage
from hetrun.runtime.network import FirstValues, Stage, summed_loss

Keys = dict[str, Any]
NUM_LAYERS = 5
VOCAB = 61
SEQ_LEN = 11
ROWS = 2
_SIZES: Keys = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
}
_GROUPED: Keys = {**_SIZES, "num_key_value_heads": 2}
_WIDE: Keys = {**_GROUPED, "head_dim": 8}
_WINDOW: Keys = {"sliding_window": 5}
TINY: dict[str, Keys] = {
    "bloom": {"hidden_size": 16, "n_layer": NUM_LAYERS, "n_head": 4, "vocab_size": VOCAB},
    "deepseek_v3": {
        **_SIZES,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 12,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
    },
    "falcon": {
        "hidden_size": 16,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
    },
    "gemma": _WIDE,
    "gemma2": {**_WIDE, **_WINDOW},
    "gemma3_text": {
        **_WIDE,
        **_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    },
    "gpt2": {"n_embd": 16, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 32, "vocab_size": VOCAB},
    "gpt_neox": _SIZES,
    "granite": {**_GROUPED, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "llama": {**_GROUPED, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mistral": {**_GROUPED, **_WINDOW},
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": _GROUPED,
    "opt": {
        "hidden_size": 16,
        "ffn_dim": 24,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 16,
    },
    "phi3": _GROUPED,
    "qwen2": {**_GROUPED, "tie_word_embeddings": True},
    "qwen3": _WIDE,
    "qwen3_moe": {
        **_WIDE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "mlp_only_layers": [1],
    },
    "smollm3": _GROUPED,
    "stablelm": _GROUPED,
    "starcoder2": _GROUPED,
}  # fmt: skip
_NO_WORDS: Keys = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def keys_of(kind: str) -> Keys:
    """The config of a tiny model."""
    return {**_NO_WORDS, **TINY[kind], "model_type": kind}


def tiny(kind: str) -> ModelSpec:
    """A tiny model that transformers builds."""
    return from_config(keys_of(kind), transformers=True)


def a_stage(
    model: ModelSpec,
    layers: range,
    *,
    recompute: bool = False,
    dtype: torch.dtype = torch.float64,
    weights: FirstValues | None = None,
) -> Stage:
    """A stage with these layers; the first has the embedding, the last the head."""
    stage = build_stage(model, stage_plan(layers, recompute=recompute), seq_len=SEQ_LEN)
    return stage.initialise(seed=3, device=torch.device("cpu"), dtype=dtype, weights=weights)


def stage_plan(layers: range, *, recompute: bool = False) -> StagePlan:
    """What the plan says of a stage with these layers."""
    return StagePlan(
        ranks=(0,), first_layer=layers.start, num_layers=len(layers),
        has_embedding=layers.start == 0, has_head=layers.stop == NUM_LAYERS, window=1, forward_s=0,
        backward_s=0, send_s=0, optimizer_s=0, memory_bytes=0, memory_limit_bytes=None,
        recompute=recompute,
    )  # fmt: skip


def whole(model: ModelSpec, **more: Any) -> Stage:
    """All of a model on one stage."""
    return a_stage(model, range(NUM_LAYERS), **more)


def uncut(model: ModelSpec, values: Iterable[Stage], dtype: torch.dtype = torch.float64) -> Any:
    """The model as transformers builds it, with the values of our stages; buffers keep their format."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        from transformers import AutoConfig, AutoModelForCausalLM

        keys = json.loads(model.config or "{}")
        config = AutoConfig.for_model(keys.pop("model_type"), **keys)
        built = AutoModelForCausalLM.from_config(config).eval()
    built.set_experts_implementation("eager")
    named = {in_class(n): p.detach() for stage in values for n, p in stage.named_parameters()}
    for name, parameter in built.named_parameters():
        parameter.data = named[name].to(dtype).clone()
    return built


def some_tokens(seed: int = 1) -> Tensor:
    """Token ids of one microbatch."""
    return torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(seed))


def pass_through(stages: Sequence[Stage], parts: Sequence[range], tokens: Tensor) -> float:
    """Forward and backward of one microbatch over all stages, each of which runs its part; return the summed loss."""
    x, sent = tokens, []
    for stage, layers in zip(stages, parts, strict=True):
        y = stage(x, layers)
        sent.append((x, y))
        x = y.detach().requires_grad_()
    logits = sent[-1][1]
    loss = summed_loss(logits, tokens, torch.ones_like(tokens))
    loss.backward()
    for (received, _), (_, given) in zip(sent[:0:-1], sent[-2::-1], strict=True):
        given.backward(received.grad)
    return loss.item()


def added_gradients(stages: Iterable[Stage]) -> dict[str, Tensor]:
    """Gradients by name in the class, parts of shared units added up."""
    total: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                key = in_class(name)
                total[key] = total[key] + parameter.grad if key in total else parameter.grad.clone()
    return total


def largest_error(found: dict[str, Tensor], built: Any) -> float:
    """Largest difference of any gradient from that of the uncut model, relative to its largest element."""
    names = dict(built.named_parameters())
    assert found.keys() == names.keys()
    errors = []
    for name, parameter in names.items():
        largest = parameter.grad.abs().max()
        assert largest > 0, name
        errors.append(((found[name] - parameter.grad).abs().max() / largest).item())
    return max(errors)
