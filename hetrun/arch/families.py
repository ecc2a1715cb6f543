"""What the layers of each model family are made of. Keys are those of Hugging Face configs, defaults those of their model classes.

A family is a function from its config to a `Decoder`; adding one is adding a function to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hetrun.arch.config import MOST_LAYERS, BadConfigError, Config

RMS = 1  # vectors of a norm: a scale
LAYER_NORM = 2  # a scale and a shift


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Query, key, value and output projections. `lora` of a latent attention is (query, key/value, rotated part)."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    key_size: int  # per head
    value_size: int
    qkv_bias: bool = False
    out_bias: bool = False
    norm_elements: int = 0  # norms of q and k: their elements per token
    norm_parameters: int = 0
    lora: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ffn:
    """A feed-forward part; `gated` has three matrices, else two. With experts, a token passes `per_token` of them."""

    size: int
    gated: bool = True
    bias: bool = False
    num_experts: int = 0
    per_token: int = 0
    shared_size: int = 0  # of an expert that every token passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A whole decoder. `ffns` has one entry per layer."""

    hidden: int
    vocab: int
    attention: Attention
    ffns: tuple[Ffn, ...]
    norm: int  # RMS or LAYER_NORM
    norms_per_layer: int = 2
    norm_after_embedding: bool = False
    positions: int = 0  # learned ones
    tied: bool = False
    plain: bool = False  # llama-shaped, nothing added
    linear: bool = True  # its matrices are torch's plain linear maps, whose gradients can wait


def heads(config: Config, *, key_size: int | None = None, kv: int | None = None) -> Attention:
    """Read grouped-query attention; `key_size` and `kv` are the family's defaults."""
    hidden = config.size("hidden_size")
    num_heads = config.size("num_attention_heads")
    if key_size is None and not config.has("head_dim"):
        key_size = _even_share(hidden, num_heads)
    size = config.size("head_dim", default=key_size)
    return Attention(
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", default=kv or num_heads),
        key_size=size,
        value_size=size,
    )


def _even_share(hidden: int, num_heads: int) -> int:
    """Return the size of a head where all together are as wide as the model."""
    if hidden % num_heads:
        raise BadConfigError(f"num_attention_heads: {num_heads}, need a divisor of {hidden}")
    return hidden // num_heads


def _alike(config: Config, ffn: Ffn, *names: str) -> tuple[Ffn, ...]:
    number = config.size("num_hidden_layers", *names)
    if number > MOST_LAYERS:
        raise BadConfigError(f"num_hidden_layers: {number}, need at most {MOST_LAYERS}")
    return (ffn,) * number


def _modern(config: Config, attention: Attention, *, tied: bool = False) -> Decoder:
    """RMSNorm, rotary attention, a gated feed-forward part."""
    ffn = Ffn(size=config.size("intermediate_size"), bias=config.switch("mlp_bias", default=False))
    return Decoder(
        hidden=attention.hidden,
        vocab=config.size("vocab_size"),
        attention=attention,
        ffns=_alike(config, ffn),
        norm=RMS,
        tied=config.switch("tie_word_embeddings", default=tied),
    )


def _llama(config: Config) -> Decoder:
    attention = heads(config)
    bias = config.switch("attention_bias", default=False)
    decoder = _modern(config, replace(attention, qkv_bias=bias, out_bias=bias))
    plain = (
        attention.key_size * attention.num_heads == attention.hidden
        and not bias
        and not config.switch("mlp_bias", default=False)
        and not config.has("rope_scaling")
        and config.plain_rope
        and not config.has("sliding_window")
        and config.word("hidden_act", "silu") == "silu"
        and config.kind in ("llama", "mistral")
    )
    return replace(decoder, plain=plain)


def _mistral(config: Config) -> Decoder:
    return _llama(replace(config, keys={"num_key_value_heads": 8, **config.keys}))


def _gemma(config: Config) -> Decoder:
    return _modern(config, heads(config, key_size=256), tied=True)


def _qwen2(config: Config) -> Decoder:
    return _modern(config, replace(heads(config), qkv_bias=True))


def _smollm3(config: Config) -> Decoder:
    tied = config.switch("tie_word_embeddings", default=True)
    return replace(_llama(config), plain=False, tied=tied)


def _with_head_norms(attention: Attention) -> Attention:
    """Norms of q and k over each head, one scale for all heads."""
    width = (attention.num_heads + attention.num_kv_heads) * attention.key_size
    return replace(attention, norm_elements=width, norm_parameters=2 * attention.key_size)


def _qwen3(config: Config) -> Decoder:
    bias = config.switch("attention_bias", default=False)
    attention = _with_head_norms(heads(config, key_size=128, kv=None))
    return _modern(config, replace(attention, qkv_bias=bias, out_bias=bias))


def _qwen3_moe(config: Config) -> Decoder:
    base = _qwen3(config)
    step = config.size("decoder_sparse_step", default=1)
    dense = config.numbers("mlp_only_layers")
    experts = Ffn(
        size=config.size("moe_intermediate_size"),
        num_experts=config.size("num_experts", "num_local_experts"),
        per_token=config.size("num_experts_per_tok"),
    )
    ffns = tuple(
        experts if layer not in dense and (layer + 1) % step == 0 else ffn
        for layer, ffn in enumerate(base.ffns)
    )
    return replace(base, ffns=ffns)


def _mixtral(config: Config) -> Decoder:
    experts = Ffn(
        size=config.size("intermediate_size"),
        num_experts=config.size("num_local_experts", default=8),
        per_token=config.size("num_experts_per_tok", default=2),
    )
    return replace(_modern(config, heads(config, kv=8)), ffns=_alike(config, experts))


def _deepseek_v3(config: Config) -> Decoder:
    hidden, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    plain, rotated = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    query_lora, kv_lora = config.count("q_lora_rank"), config.size("kv_lora_rank")
    attention = Attention(
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        key_size=plain + rotated,
        value_size=config.size("v_head_dim"),
        norm_elements=query_lora + kv_lora,
        norm_parameters=query_lora + kv_lora,
        lora=(query_lora, kv_lora, rotated),
    )
    base = _modern(config, attention)
    size = config.size("moe_intermediate_size")
    experts = Ffn(
        size=size,
        num_experts=config.size("n_routed_experts"),
        per_token=config.size("num_experts_per_tok"),
        shared_size=size * config.count("n_shared_experts"),
    )
    first, every = config.count("first_k_dense_replace"), config.size("moe_layer_freq", default=1)
    ffns = tuple(
        experts if layer >= first and layer % every == 0 else ffn
        for layer, ffn in enumerate(base.ffns)
    )
    return replace(base, ffns=ffns)


def _gemma2(config: Config) -> Decoder:
    return replace(_gemma(config), norms_per_layer=4)


def _gemma3(config: Config) -> Decoder:
    defaults = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208}
    full = replace(config, keys={**defaults, **config.keys})
    attention = _with_head_norms(heads(full, key_size=256))
    return replace(_modern(full, attention, tied=True), norms_per_layer=4)


def _olmo2(config: Config) -> Decoder:
    attention = heads(config)
    width = (attention.num_heads + attention.num_kv_heads) * attention.key_size
    return _modern(config, replace(attention, norm_elements=width, norm_parameters=width))


def _classic(config: Config, attention: Attention, ffn: Ffn, *, tied: bool) -> Decoder:
    """LayerNorm and a feed-forward part of two matrices."""
    return Decoder(
        hidden=attention.hidden,
        vocab=config.size("vocab_size"),
        attention=attention,
        ffns=_alike(config, ffn, "n_layer"),
        norm=LAYER_NORM,
        tied=config.switch("tie_word_embeddings", default=tied),
    )


def _even_heads(hidden: int, num_heads: int, *, bias: bool, kv: int | None = None) -> Attention:
    size = _even_share(hidden, num_heads)
    return Attention(
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=kv or num_heads,
        key_size=size,
        value_size=size,
        qkv_bias=bias,
        out_bias=bias,
    )


def _gpt2(config: Config) -> Decoder:
    hidden = config.size("n_embd", "hidden_size")
    attention = _even_heads(hidden, config.size("n_head", "num_attention_heads"), bias=True)
    ffn = Ffn(size=config.size("n_inner", default=4 * hidden), gated=False, bias=True)
    positions = config.size("n_positions", "n_ctx", "max_position_embeddings", default=1024)
    decoder = _classic(config, attention, ffn, tied=True)
    return replace(decoder, positions=positions, linear=False)


def _gpt_neox(config: Config) -> Decoder:
    bias = config.switch("attention_bias", default=True)
    attention = _even_heads(
        config.size("hidden_size"), config.size("num_attention_heads"), bias=bias
    )
    ffn = Ffn(size=config.size("intermediate_size"), gated=False, bias=True)
    return _classic(config, attention, ffn, tied=False)


def _opt(config: Config) -> Decoder:
    hidden = config.size("hidden_size")
    if config.size("word_embed_proj_dim", default=hidden) != hidden:
        raise BadConfigError("word_embed_proj_dim: embeddings of another size are not counted here")
    if not config.switch("do_layer_norm_before", default=True):
        raise BadConfigError("do_layer_norm_before: norms after each part are not counted here")
    bias = config.switch("enable_bias", default=True)
    attention = _even_heads(hidden, config.size("num_attention_heads"), bias=bias)
    ffn = Ffn(size=config.size("ffn_dim"), gated=False, bias=bias)
    positions = config.size("max_position_embeddings", default=2048) + 2  # two for padding
    return replace(_classic(config, attention, ffn, tied=True), positions=positions)


def _bloom(config: Config) -> Decoder:
    hidden = config.size("hidden_size", "n_embed")
    attention = _even_heads(hidden, config.size("n_head", "num_attention_heads"), bias=True)
    decoder = _classic(config, attention, Ffn(size=4 * hidden, gated=False, bias=True), tied=True)
    return replace(decoder, norm_after_embedding=True)


def _falcon(config: Config) -> Decoder:
    hidden = config.size("hidden_size")
    num_heads = config.size("num_attention_heads", "n_head")
    new = config.switch("new_decoder_architecture", default=False)
    parallel = config.switch("parallel_attn", default=True)
    bias = config.switch("bias", default=False)
    kv = num_heads
    if new:
        kv = config.size("num_kv_heads", "n_head_kv", default=num_heads)
    elif config.switch("multi_query", default=True):
        kv = 1
    attention = _even_heads(hidden, num_heads, bias=bias, kv=kv)
    size = config.size("ffn_hidden_size", default=4 * hidden)
    decoder = _classic(config, attention, Ffn(size=size, gated=False, bias=bias), tied=True)
    two = config.size("num_ln_in_parallel_attn", default=2) if new else (1 if parallel else 2)
    return replace(decoder, norms_per_layer=two, linear=False)


def _starcoder2(config: Config) -> Decoder:
    bias = config.switch("use_bias", default=True)
    attention = replace(heads(config, kv=2), qkv_bias=bias, out_bias=bias)
    ffn = Ffn(size=config.size("intermediate_size"), gated=False, bias=bias)
    return _classic(config, attention, ffn, tied=True)


def _stablelm(config: Config) -> Decoder:
    if config.switch("qk_layernorm", default=False):
        raise BadConfigError("qk_layernorm: norms of every head are not counted here")
    attention = replace(heads(config), qkv_bias=config.switch("use_qkv_bias", default=False))
    one = config.switch("use_parallel_residual", default=False)
    decoder = _classic(config, attention, Ffn(size=config.size("intermediate_size")), tied=False)
    return replace(decoder, norms_per_layer=1 if one else 2)


FAMILIES: dict[str, Callable[[Config], Decoder]] = {
    "bloom": _bloom,
    "deepseek_v3": _deepseek_v3,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "granite": _llama,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "opt": _opt,
    "phi3": lambda config: replace(_llama(config), plain=False),
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
