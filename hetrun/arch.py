"""Parameters, FLOPs and bytes of a decoder, counted from its shape. What they cost in seconds is decided in `planner/cost.py`."""

from __future__ import annotations

from hetrun.model import Dtype, ModelSpec

BYTES_PER_ELEMENT = {Dtype.FP64: 8, Dtype.FP32: 4, Dtype.BF16: 2}


def num_kv_heads(model: ModelSpec) -> int:
    """Key/value heads; as many as query heads unless the recipe says fewer."""
    return model.num_kv_heads or model.num_heads


def layer_parameters(model: ModelSpec) -> int:
    """Parameters of one decoder layer: q, o (h*h), k, v (h*kv), gate, up, down (h*ffn), two norms (h)."""
    hidden = model.hidden_size
    kv_size = hidden // model.num_heads * num_kv_heads(model)
    return 2 * hidden * hidden + 2 * hidden * kv_size + 3 * hidden * model.ffn_size + 2 * hidden


def embedding_parameters(model: ModelSpec) -> int:
    """Parameters of the token embedding."""
    return model.vocab_size * model.hidden_size


def head_parameters(model: ModelSpec) -> int:
    """Parameters that the head holds: final norm and output projection (the embedding's own matrix if tied)."""
    return model.hidden_size + model.vocab_size * model.hidden_size


def total_parameters(model: ModelSpec) -> int:
    """Parameters of the whole model; a tied matrix counts once."""
    tied = model.vocab_size * model.hidden_size if model.tied_embeddings else 0
    layers = model.num_layers * layer_parameters(model)
    return embedding_parameters(model) + layers + head_parameters(model) - tied


def layer_forward_flops(model: ModelSpec, rows: int, seq_len: int) -> float:
    """FLOPs of one layer's forward on rows x seq_len tokens; backward costs twice that.

    2 FLOPs per matrix parameter and token, plus causal attention: two products of
    (seq_len x head_dim) x (head_dim x seq_len) per head, half of it masked away.
    """
    tokens = rows * seq_len
    matrices = layer_parameters(model) - 2 * model.hidden_size
    return 2.0 * matrices * tokens + 2.0 * tokens * seq_len * model.hidden_size


def head_forward_flops(model: ModelSpec, rows: int, seq_len: int) -> float:
    """FLOPs of the output projection on rows x seq_len tokens; backward costs twice that."""
    return 2.0 * model.vocab_size * model.hidden_size * rows * seq_len


def boundary_bytes(model: ModelSpec, dtype: Dtype, rows: int, seq_len: int) -> int:
    """Bytes that one microbatch sends over a cut, one way: rows x seq_len x hidden_size elements."""
    return rows * seq_len * model.hidden_size * BYTES_PER_ELEMENT[dtype]
