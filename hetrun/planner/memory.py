"""Bytes that a stage needs on its device. Whether that is allowed is decided in `shapes.py` and proved in `check.py`."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun import arch
from hetrun.model import Dtype, ModelSpec
from hetrun.planner.cost import Piece, stage_parameters

STATES_PER_PARAMETER = 4  # weight, gradient and AdamW's two moments, all in the recipe's dtype
_WIDE = 4  # norms and loss compute in fp32 at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a stage works on, and how; `tp` devices share its layers, each holds embedding and head whole."""

    rows: int
    seq_len: int
    window: int  # microbatches between forward and backward
    tp: int = 1
    recompute: bool = False  # only the layers' inputs wait for the backward


def stage_bytes(model: ModelSpec, dtype: Dtype, piece: Piece, load: Load) -> int:
    """Return peak bytes of each device of a stage.

    States, plus what autograd holds per microbatch between forward and backward, plus the loss, plus messages
    on their way (one per microbatch in flight, one received ahead, one being sent). With recomputation one
    layer at a time is whole.
    """
    rows, seq_len, window = load.rows, load.seq_len, load.window
    element = arch.BYTES_PER_ELEMENT[dtype]
    states = STATES_PER_PARAMETER * stage_parameters(model, piece, tp=load.tp) * element
    held = piece.num_layers * _held_bytes(model, dtype, load)
    again = 0
    if load.recompute:
        again = layer_activation_bytes(model, dtype, rows=rows, seq_len=seq_len, tp=load.tp)
    messages = (window + 2) * arch.boundary_bytes(model, dtype, rows, seq_len)
    loss = head_bytes(model, dtype, rows=rows, seq_len=seq_len) * window if piece.has_head else 0
    return states + window * held + again + messages + loss


def layer_bytes(model: ModelSpec, dtype: Dtype, load: Load) -> int:
    """Return what one more layer adds to each device of a stage."""
    parameters = -(-arch.layer_parameters(model) // load.tp)
    states = STATES_PER_PARAMETER * parameters * arch.BYTES_PER_ELEMENT[dtype]
    return states + load.window * _held_bytes(model, dtype, load)


def _held_bytes(model: ModelSpec, dtype: Dtype, load: Load) -> int:
    """Return what one layer keeps of one microbatch until its backward."""
    if load.recompute:
        return arch.boundary_bytes(model, dtype, load.rows, load.seq_len)
    return layer_activation_bytes(model, dtype, rows=load.rows, seq_len=load.seq_len, tp=load.tp)


def layer_activation_bytes(
    model: ModelSpec, dtype: Dtype, *, rows: int, seq_len: int, tp: int = 1
) -> int:
    """Return what one layer holds of one microbatch for its backward (attention fused, so no score matrix).

    Per token: two norms (input and scaled input in fp32 at least, output), rotated q and repeated k and v,
    attention's output twice, its row sums per head, and four vectors of ffn_size (gate, its silu, up, product).
    `tp` devices share all of that but the norms.
    """
    if model.counts is not None:  # of another family; all layers alike where plans are made
        return arch.layer_activation_bytes(
            arch.layer_runs(model)[0], dtype, rows=rows, seq_len=seq_len
        )
    element = arch.BYTES_PER_ELEMENT[dtype]
    wide = max(element, _WIDE)
    hidden = model.hidden_size
    norms = 2 * (2 * hidden * wide + hidden * element)
    attention = 5 * hidden * element + model.num_heads * wide
    ffn = 4 * model.ffn_size * element
    return rows * seq_len * (norms + -(-(attention + ffn) // tp))


def head_bytes(model: ModelSpec, dtype: Dtype, *, rows: int, seq_len: int) -> int:
    """Return what the head holds of one microbatch: its norm, logits, their log-softmax and their gradient."""
    element = arch.BYTES_PER_ELEMENT[dtype]
    wide = max(element, _WIDE)
    norm = 2 * model.hidden_size * wide + model.hidden_size * element
    widened = model.vocab_size * wide if wide > element else 0
    logits = model.vocab_size * (element + 2 * wide) + widened
    return rows * seq_len * (norm + logits)
