"""Which decoder is trained: its sizes, or what was counted from a config."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hetrun.model.base import Noun, check_name, need

MAX_CONFIG = 1 << 18  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCount(Noun):
    """What each of `num_layers` equal, consecutive layers holds and computes."""

    num_layers: int
    parameters: int  # of one layer, all experts included
    active_parameters: int  # of the matrices that one token passes; forward costs 2 FLOPs each
    attention_width: int  # query heads x (key + value size); causal attention costs this x seq_len
    wide_elements: int  # held per token for the backward, in fp32 at least
    elements: int  # held per token for the backward, in the recipe's dtype
    shared_wide_elements: int = 0  # of these, what devices that share the layer hold a part of each
    shared_elements: int = 0
    waiting_parameters: int | None = (
        None  # of active_parameters: gradients of the others cannot be put off; None: all can
    )
    copied_parameters: int = 0  # of a layer, what each of the devices that share it holds whole

    def __post_init__(self) -> None:
        for what in ("num_layers", "parameters", "active_parameters"):
            need(getattr(self, what) >= 1, f"layers: {what} {getattr(self, what)}, need at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCount(Noun):
    """What a decoder of another shape than llama's holds, counted from its config by `hetrun.arch`."""

    layers: tuple[LayerCount, ...]  # runs of equal layers, in order
    embedding_parameters: int  # token table, learned positions and a norm after them
    head_parameters: int  # final norm and output projection, as if not tied

    def __post_init__(self) -> None:
        need(bool(self.layers), "model: counts of no layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(Noun):
    """A decoder. Without `counts` it is llama-shaped: RMSNorm, rotary grouped-query attention, SwiGLU.

    With `counts` it is of another `family`. With `config` it is the model class of transformers that is trained, which every
    model with counts is; else hetrun's own decoder.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    num_kv_heads: int | None = None  # num_heads when None
    tied_embeddings: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    family: str = "llama"  # model_type of the config that it was read from
    counts: ModelCount | None = None
    config: str | None = None  # a Hugging Face config of the decoder alone, as JSON

    def __post_init__(self) -> None:
        for what in ("num_layers", "hidden_size", "num_heads", "ffn_size", "vocab_size"):
            need(getattr(self, what) >= 1, f"model: {what} {getattr(self, what)}, need at least 1")
        for what in ("rope_theta", "norm_eps"):
            need(getattr(self, what) > 0, f"model: {what} {getattr(self, what)}, need more than 0")
        check_name("model: family", self.family)
        _check_config(self.config)
        if self.counts is not None:
            counted = sum(run.num_layers for run in self.counts.layers)
            need(
                counted == self.num_layers,
                f"model: counts of {counted} layers, need num_layers {self.num_layers}",
            )
            need(
                self.config is not None,
                f"model: family {self.family} without its config; write the plan again",
            )
            return  # other families have heads of any size
        need(self.family == "llama", f"model: family {self.family} without counts; name its config")
        need(
            self.hidden_size % (2 * self.num_heads) == 0,
            f"model: hidden_size {self.hidden_size}, need a multiple of 2 * num_heads = {2 * self.num_heads}",
        )
        num_kv_heads = self.num_kv_heads or self.num_heads
        need(
            num_kv_heads >= 1 and self.num_heads % num_kv_heads == 0,
            f"model: num_kv_heads {num_kv_heads}, need a divisor of num_heads {self.num_heads}",
        )


def _check_config(text: str | None) -> None:
    if text is None:
        return
    need(
        len(text) <= MAX_CONFIG,
        f"model: a config of {len(text)} characters, need at most {MAX_CONFIG}",
    )
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model: config is not JSON: {error}") from error
    need(
        isinstance(keys, dict) and isinstance(keys.get("model_type"), str),
        "model: config without model_type",
    )
