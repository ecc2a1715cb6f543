"""Layers that the ranks of a lane share: each has some heads and a part of the inner width, and they add up what these give.

A share holds num_heads / tp heads, num_kv_heads / tp key/value heads and ffn_size / tp of the inner width (rows of the
weights of q, k, v, gate, up; columns of those of o and down), and the norms whole (Shoeybi et al. 2019, section 3).
These are plain tensors and two functions that add up rather than torch's DTensor: gloo in host memory can add them up where a
vendor has no library for it, weights' gradients can be put off (`deferred.py`), and buckets take slices of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hetrun.arch import num_kv_heads
from hetrun.errors import ConfigError
from hetrun.model import ModelSpec
from hetrun.runtime.boxes import box_along
from hetrun.runtime.hf_share import hf_shared_dims, is_shareable, share_hf_layers
from hetrun.runtime.hf_stage import HfStage
from hetrun.runtime.network import Layer, Matrix, Stage
from hetrun.runtime.sums import Added, ToAll
from hetrun.schedule.shares import check_tp

_DIM = {"q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "o": 1, "down": 1}  # of weights, that is shared


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Which of `size` equal shares of its stage's layers a rank has, and the group of the ranks that have them all."""

    place: int
    size: int
    group: dist.ProcessGroup | None  # None where one rank has all


class LayerShare(Layer):
    """What one of `tp` devices has of a layer; build it on the meta device, then initialise.

    Without a group its results are partial sums, fit for timing only.
    """

    def __init__(
        self, model: ModelSpec, tp: int, *, group: dist.ProcessGroup | None = None
    ) -> None:
        check_tp(model, tp)
        super().__init__(model)
        self._group = group
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

    def forward(self, x_BTH: Tensor, rotation_2TD: Tensor) -> Tensor:
        """One layer, as `Layer.forward`; all ranks of the group call it with the same rows."""
        if self._group is None:
            return super().forward(x_BTH, rotation_2TD)
        y_BTH = ToAll.apply(self.attention_norm(x_BTH), self._group)
        x_BTH = x_BTH + Added.apply(self._attention(y_BTH, rotation_2TD), self._group)
        y_BTH = ToAll.apply(self.ffn_norm(x_BTH), self._group)
        part_BTH = self.down(functional.silu(self.gate(y_BTH)) * self.up(y_BTH))
        z_BTH: Tensor = x_BTH + Added.apply(part_BTH, self._group)
        return z_BTH


def shared_dims(stage: Stage) -> dict[str, int]:
    """Parameters that several ranks can share, by name, and along which dim; each has the others whole."""
    if isinstance(stage, HfStage):
        return hf_shared_dims(stage)
    return {f"layer.{index}.{name}.weight": d for index in stage.layer for name, d in _DIM.items()}


def share_layers(stage: Stage, share: Share) -> None:
    """Let a stage without values hold one share of each of its layers; nothing changes where one rank has all.

    Raises:
        ConfigError: the layers of this model cannot be shared so.
    """
    if share.size == 1:
        return
    if isinstance(stage, HfStage):
        check_tp(stage.model, share.size)
        if not is_shareable(stage):
            raise ConfigError(
                f"plan: {share.size} ranks share layers of transformers' {stage.model.family}, need one each",
                hint="set plan.tp to [1] in the recipe, and plan again",
            )
        share_hf_layers(stage, place=share.place, size=share.size, group=share.group)
        return
    for index, whole in list(stage.layer.items()):
        for name, dim in _DIM.items():
            shape = getattr(whole, name).weight.shape
            part = shape[dim] // share.size
            start = share.place * part
            stage.boxes[f"layer.{index}.{name}.weight"] = box_along(shape, dim, start, start + part)
        stage.layer[index] = LayerShare(stage.model, share.size, group=share.group)
