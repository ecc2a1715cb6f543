"""A Hugging Face config.json -> ModelSpec with parameters, FLOPs and activation elements per layer. Families are in `families.py`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from hetrun.arch.config import BadConfigError, Config
from hetrun.arch.families import FAMILIES, Attention, Decoder, Ffn
from hetrun.model import LayerCount, ModelCount, ModelSpec

__all__ = ["BadConfigError", "from_config", "learned_positions", "portable_keys"]

_LEFT_OUT = (  # see `portable_keys`
    "architectures",
    "attn_implementation",
    "auto_map",
    "dtype",
    "experts_implementation",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "quantization_config",
    "return_dict",
    "task_specific_params",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
_TEXT_OF = {"gemma3": "gemma3_text"}  # the decoder in a picture-and-text model


def from_config(keys: Mapping[str, Any], *, transformers: bool = False) -> ModelSpec:
    """Return the model that a config describes.

    A llama-shaped one is ours, known by its sizes. Any other one carries its config, for transformers to build; so does
    a llama-shaped one where `transformers` says so.

    Raises:
        BadConfigError: the family is not known here, or a key is missing or no size.
    """
    config = _text_config(keys)
    decoder = _decoder(config)
    attention = decoder.attention
    runs = [
        _layer(decoder, ffn, num_layers=len(tuple(same))) for ffn, same in groupby(decoder.ffns)
    ]
    matrix = decoder.vocab * decoder.hidden
    norm = decoder.norm * decoder.hidden
    counts = ModelCount(
        layers=tuple(runs),
        embedding_parameters=matrix
        + decoder.positions * decoder.hidden
        + (norm if decoder.norm_after_embedding else 0),
        head_parameters=norm + matrix,
    )
    return ModelSpec(
        num_layers=len(decoder.ffns),
        hidden_size=decoder.hidden,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        ffn_size=decoder.ffns[0].size,
        vocab_size=decoder.vocab,
        tied_embeddings=decoder.tied,
        rope_theta=config.rope_theta,
        norm_eps=config.real("rms_norm_eps", default=1e-6),
        family="llama" if decoder.plain else config.kind,
        counts=None if decoder.plain else counts,
        config=_portable(config, decoder) if transformers or not decoder.plain else None,
    )


def learned_positions(keys: Mapping[str, Any]) -> int | None:
    """Return the longest row that learned positions allow; None for families without them."""
    decoder = _decoder(_text_config(keys))
    if decoder.positions == 0:
        return None
    return decoder.positions - (2 if keys.get("model_type") == "opt" else 0)


def portable_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config says of the model itself: nothing of code to fetch, kernels, files and what is given out."""
    return {
        key: value
        for key, value in keys.items()
        if key not in _LEFT_OUT and not key.startswith("_")
    }


def _portable(config: Config, decoder: Decoder) -> str:
    """Return the config as JSON, the same for the same model."""
    kept = portable_keys(config.keys)
    kept["model_type"] = _TEXT_OF.get(config.kind, config.kind)
    kept["tie_word_embeddings"] = decoder.tied  # families differ in what they take for granted
    return json.dumps(kept, sort_keys=True, separators=(",", ":"))


def _text_config(keys: Mapping[str, Any]) -> Config:
    """Return the keys of the decoder itself: those of a picture-and-text model stand one level deeper."""
    inner = keys.get("text_config")
    if isinstance(inner, Mapping):
        outer = ("model_type", "tie_word_embeddings")  # where the inner ones say nothing
        keys = {**{key: keys.get(key) for key in outer}, **inner}
    kind = keys.get("model_type")
    if not isinstance(kind, str):
        raise BadConfigError("model_type: is missing; is this a config.json of Hugging Face?")
    if kind not in FAMILIES:
        near = difflib.get_close_matches(kind, sorted(FAMILIES), n=1, cutoff=0.6)
        known = f"nearest is {near[0]}" if near else f"known are {', '.join(sorted(FAMILIES))}"
        raise BadConfigError(f"model_type: {kind!r} is not counted here; {known}")
    return Config(kind, keys)


def _decoder(config: Config) -> Decoder:
    decoder = FAMILIES[config.kind](config)
    attention = decoder.attention
    if attention.num_heads % attention.num_kv_heads:
        raise BadConfigError(
            f"num_key_value_heads: {attention.num_kv_heads}, need a divisor of {attention.num_heads}"
        )
    for ffn in decoder.ffns:
        if ffn.per_token > ffn.num_experts:
            raise BadConfigError(
                f"num_experts_per_tok: {ffn.per_token}, there are {ffn.num_experts} experts"
            )
    return decoder


def _layer(decoder: Decoder, ffn: Ffn, *, num_layers: int) -> LayerCount:
    """Add up one layer; what is held per token follows `hetrun.arch`'s count of llama's layer."""
    attention = decoder.attention
    matrices, biases = _attention_parameters(attention)
    held, active, ffn_biases = _ffn_parameters(decoder.hidden, ffn)
    norms = decoder.norms_per_layer * decoder.norm * decoder.hidden + attention.norm_parameters
    normed = decoder.norms_per_layer * decoder.hidden + attention.norm_elements
    of_heads = 0 if attention.lora else attention.norm_elements  # latent norms precede the heads
    query = attention.num_heads * attention.key_size
    value = attention.num_heads * attention.value_size
    latent = sum(attention.lora) if attention.lora else 0
    always = (
        active
        if ffn.num_experts == 0
        else (3 if ffn.gated else 2) * decoder.hidden * ffn.shared_size
    )
    return LayerCount(
        num_layers=num_layers,
        parameters=matrices + biases + held + ffn_biases + norms,
        active_parameters=matrices + active,
        attention_width=query + value,
        wide_elements=2 * normed + attention.num_heads + ffn.num_experts,
        elements=normed + 2 * query + 3 * value + latent + sum(_ffn_elements(decoder.hidden, ffn)),
        shared_wide_elements=2 * of_heads + attention.num_heads,
        shared_elements=of_heads + 2 * query + 3 * value + _ffn_elements(decoder.hidden, ffn)[0],
        waiting_parameters=matrices + always if decoder.linear else 0,
        copied_parameters=norms
        + decoder.hidden * (attention.out_bias + ffn.bias + ffn.num_experts),
    )


def _attention_parameters(attention: Attention) -> tuple[int, int]:
    """Return parameters of the matrices and of the biases."""
    hidden = attention.hidden
    query = attention.num_heads * attention.key_size
    out = attention.num_heads * attention.value_size * hidden
    if attention.lora is not None:
        query_lora, kv_lora, rotated = attention.lora
        down_up = hidden * query_lora + query_lora * query if query_lora else hidden * query
        unrotated = attention.num_heads * (attention.key_size - rotated + attention.value_size)
        return down_up + hidden * (kv_lora + rotated) + kv_lora * unrotated + out, 0
    kv = attention.num_kv_heads * (attention.key_size + attention.value_size)
    biases = (query + kv) * attention.qkv_bias + hidden * attention.out_bias
    return hidden * (query + kv) + out, biases


def _ffn_parameters(hidden: int, ffn: Ffn) -> tuple[int, int, int]:
    """Return matrix parameters that are held, those that one token passes, and biases."""
    matrices = 3 if ffn.gated else 2
    one = matrices * hidden * ffn.size
    if ffn.num_experts == 0:
        return one, one, ((matrices - 1) * ffn.size + hidden) * ffn.bias
    router = hidden * ffn.num_experts
    always = router + matrices * hidden * ffn.shared_size
    return ffn.num_experts * one + always, ffn.per_token * one + always, 0


def _ffn_elements(hidden: int, ffn: Ffn) -> tuple[int, int]:
    """Return elements held per token: 4 vectors per gated part, 2 per plain one; and what experts got and gave."""
    vectors = 4 if ffn.gated else 2
    if ffn.num_experts == 0:
        return vectors * ffn.size, 0
    return vectors * (ffn.per_token * ffn.size + ffn.shared_size), 2 * hidden * ffn.per_token
