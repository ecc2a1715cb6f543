"""Bytes that a stage needs on its device. Whether that is allowed is decided in `shapes.py` and proved in `check.py`."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun import arch
from hetrun.model import Dtype, LayerCount, ModelSpec
from hetrun.planner.cost import Piece, stage_parameters

_WIDE = 4  # norms and loss compute in fp32 at least


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes that one parameter takes, apart from activations."""

    weight: int  # what forward and backward compute with
    gradient: int
    optimizer: int  # its moments, and a master copy of the weight where it keeps one

    def of(self, held: int, updated: int) -> int:
        """Return the bytes of so many parameters, of which the device updates some."""
        return (self.weight + self.gradient) * held + self.optimizer * updated


_ADAMW = {  # weight, gradient and two moments, all in one dtype; beside the weight its copy for the arithmetic, if any
    dtype: StateBytes(
        weight=size + arch.COPY_BYTES_PER_PARAMETER[dtype], gradient=size, optimizer=2 * size
    )
    for dtype, size in arch.BYTES_PER_PARAMETER.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a stage works on, and how; `tp` devices share its layers, each holds embedding and head whole."""

    rows: int
    seq_len: int
    window: int  # microbatches between forward and backward
    tp: int = 1
    recompute: bool = False  # only the layers' inputs wait for the backward
    shards: int = 1  # devices that share out what the optimizer knows of each parameter


def state_bytes(dtype: Dtype) -> StateBytes:
    """Return what one parameter takes in training."""
    return _ADAMW[dtype]


def stage_bytes(
    model: ModelSpec, dtype: Dtype, piece: Piece, load: Load, *, updated: int | None = None
) -> int:
    """Return peak bytes of each device of a stage that updates so many parameters (None: its share by `load`).

    States, plus what autograd holds per microbatch between forward and backward, plus the loss, plus messages
    on their way (one per microbatch in flight, one received ahead, one being sent). With recomputation one
    layer at a time is whole (the largest; of the whole model, where a stage has no layers yet).
    """
    rows, seq_len, window = load.rows, load.seq_len, load.window
    parameters = stage_parameters(model, piece, tp=load.tp)
    share = -(-parameters // load.shards) if updated is None else updated
    states = state_bytes(dtype).of(parameters, share)
    runs = arch.runs_between(model, piece.first_layer, piece.first_layer + piece.num_layers)
    held = sum(count * _held_bytes(model, run, dtype, load) for run, count in runs)
    whole = [run for run, _ in runs] or arch.layer_runs(model)
    again = max(again_bytes(run, dtype, load) for run in whole)
    messages = (window + 2) * arch.boundary_bytes(model, dtype, rows, seq_len)
    loss = head_bytes(model, dtype, rows=rows, seq_len=seq_len) * window if piece.has_head else 0
    return states + window * held + again + messages + loss


def layer_bytes(model: ModelSpec, run: LayerCount, dtype: Dtype, load: Load) -> int:
    """Return what one more layer of a run adds to each device of a stage."""
    parameters = -(-run.parameters // load.tp)
    states = state_bytes(dtype).of(parameters, -(-parameters // load.shards))
    return states + load.window * _held_bytes(model, run, dtype, load)


def again_bytes(run: LayerCount, dtype: Dtype, load: Load) -> int:
    """Return what a layer of a run that computes its forward again holds while it does; one layer at a time."""
    return _activation_bytes(run, dtype, load) if load.recompute else 0


def _held_bytes(model: ModelSpec, run: LayerCount, dtype: Dtype, load: Load) -> int:
    """Return what one layer of a run keeps of one microbatch until its backward."""
    if load.recompute:
        return arch.boundary_bytes(model, dtype, load.rows, load.seq_len)
    return _activation_bytes(run, dtype, load)


def _activation_bytes(run: LayerCount, dtype: Dtype, load: Load) -> int:
    """Return what one layer of a run holds of one microbatch when nothing is computed twice."""
    return arch.layer_activation_bytes(run, dtype, rows=load.rows, seq_len=load.seq_len, tp=load.tp)


def head_bytes(model: ModelSpec, dtype: Dtype, *, rows: int, seq_len: int) -> int:
    """Return what the head holds of one microbatch: its norm, logits, their log-softmax and their gradient."""
    element = arch.BYTES_PER_ELEMENT[dtype]
    wide = max(element, _WIDE)
    norm = 2 * model.hidden_size * wide + model.hidden_size * element
    widened = model.vocab_size * wide if wide > element else 0
    logits = model.vocab_size * (element + 2 * wide) + widened
    return rows * seq_len * (norm + logits)
