"""What parameters are called in published files, which differ a little from the names of transformers' modules.

Our name of a parameter is its unit and then its name in the model class: `layer.3.model.layers.3.mlp.up_proj.weight`. Files
have every expert by itself where the class has all of them in one tensor, and may lack or add a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from hetrun.model import ModelSpec

_UNIT = re.compile(r"(layer\.\d+|embedding|head)\.(.+)")
_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_RENAMED: dict[str, tuple[str, str]] = {  # by model_type: in the class, in files
    "mixtral": (".mlp.", ".block_sparse_moe."),
    "gpt_neox": ("lm_head.", "embed_out."),
}
_MIXTRAL = ("w1", "w3", "w2")
_IGNORED = (  # masks and frequencies that older files have, and the output matrix that is the embedding's
    re.compile(r"(.*\.)?(attn|attention)\.(bias|masked_bias)"),
    re.compile(r".*\.rotary_emb\.inv_freq"),
)


_LLAMA = {  # modules of our own decoder's layer in transformers' Llama
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Part:
    """Where the values of one tensor of a file stand in a parameter: an expert, some of its rows, or all (no index)."""

    name: str
    index: tuple[int | slice, ...] = ()


def in_class(name: str) -> str:
    """Our name without its unit."""
    match = _UNIT.fullmatch(name)
    if match is None:
        raise ValueError(f"{name}: starts with no unit")
    return match.group(2)


def llama_names(model: ModelSpec) -> dict[str, str]:
    """Names of transformers' Llama by our names; a tied output matrix has none of its own."""
    names = {"embedding.weight": "model.embed_tokens.weight"}
    for layer in range(model.num_layers):
        for ours, theirs in _LLAMA.items():
            names[f"layer.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    names["head.norm.weight"] = "model.norm.weight"
    if not model.tied_embeddings:
        names["head.output.weight"] = "lm_head.weight"
    return names


def published(name: str, shape: Sequence[int], kind: str) -> list[Part]:
    """The tensors of a file that make up a parameter; `name` is that in the class of model_type `kind`."""
    match = _EXPERTS.fullmatch(name)
    if match is None or len(shape) != 3:
        return [Part(_renamed(name, kind))]
    base, which = _renamed(match.group(1) + ".", kind), match.group(2)
    gate, up, down = _MIXTRAL if kind == "mixtral" else _GATE_UP_DOWN
    if which == "down_proj":
        return [Part(f"{base}{e}.{down}.weight", (e,)) for e in range(shape[0])]
    half = shape[1] // 2
    return [
        Part(f"{base}{e}.{matrix}.weight", (e, rows))
        for e in range(shape[0])
        for matrix, rows in ((gate, slice(0, half)), (up, slice(half, 2 * half)))
    ]


Style = Callable[[str], str]


def style_of(names: Collection[str], wanted: Iterable[str]) -> Style | None:
    """How a file's names differ from the published ones in front: the first way in which any wanted one is there."""
    first = list(wanted)
    for style in (_as_it_is, _without_prefix, _in_a_larger_model, _in_a_newer_larger_model):
        if any(style(name) in names for name in first):
            return style
    return None


def is_ignored(name: str, style: Style) -> bool:
    """Whether a tensor of a file says nothing: one that follows from the config, or a part of a larger model."""
    if style is _in_a_larger_model and not name.startswith("language_model."):
        return True
    if style is _in_a_newer_larger_model and not name.startswith(("model.language_model.", "lm_")):
        return True
    return any(pattern.fullmatch(name) for pattern in _IGNORED)


def _renamed(name: str, kind: str) -> str:
    old, new = _RENAMED.get(kind, ("", ""))
    if old.startswith("."):
        return name.replace(old, new, 1)
    return new + name.removeprefix(old) if old and name.startswith(old) else name


def _as_it_is(name: str) -> str:
    return name


def _without_prefix(name: str) -> str:
    """Of a model without its output matrix: `wte.weight`."""
    prefix, _, rest = name.partition(".")
    return name if prefix in ("lm_head", "embed_out") else rest


def _in_a_larger_model(name: str) -> str:
    return f"language_model.{name}"


def _in_a_newer_larger_model(name: str) -> str:
    prefix, _, rest = name.partition(".")
    return f"model.language_model.{rest}" if prefix == "model" else name
