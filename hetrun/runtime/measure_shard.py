"""One of `tp` equal shares of a layer, as far as its computing goes; its collectives are not here.

A share holds num_heads / tp heads, num_kv_heads / tp key/value heads and ffn_size / tp of the inner width (columns
of q, k, v, gate, up; rows of o and down), and the norms whole: what each of tp devices computes in tensor
parallelism. Its results are partial sums, fit for timing only.
"""

from __future__ import annotations

import torch

from hetrun.arch import num_kv_heads
from hetrun.model import ModelSpec
from hetrun.runtime.network import Layer, Matrix
from hetrun.schedule.shares import check_tp


class LayerShare(Layer):
    """What one of `tp` devices computes of a layer; build it on the meta device, then initialise."""

    def __init__(self, model: ModelSpec, tp: int) -> None:
        check_tp(model, tp)
        super().__init__(model)
        hidden, ffn = model.hidden_size, model.ffn_size // tp
        width = hidden // tp
        kv_width = hidden // model.num_heads * (num_kv_heads(model) // tp)
        self.num_heads = model.num_heads // tp
        self.num_kv_heads = num_kv_heads(model) // tp
        with torch.device("meta"):
            self.q = Matrix(hidden, width)
            self.k = Matrix(hidden, kv_width)
            self.v = Matrix(hidden, kv_width)
            self.o = Matrix(width, hidden)
            self.gate = Matrix(hidden, ffn)
            self.up = Matrix(hidden, ffn)
            self.down = Matrix(ffn, hidden)
