"""A llama-shaped decoder without dependencies, built one stage at a time.

A stage holds only the units it owns ("embedding", "layer.3", "head"), under global parameter names, with initial
weights drawn per name: how the model is cut changes no value. Who holds which unit is decided in the plan.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hetrun.arch import num_kv_heads
from hetrun.model import ModelSpec, StagePlan
from hetrun.runtime.boxes import Box

FirstValues = Callable[[str, torch.Size], Tensor]  # of a parameter, by its name and its whole shape

_INIT_STD = 0.02


class RmsNorm(nn.Module):
    """x / rms(x) * weight, with the mean of squares in at least fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Normalise the last dim."""
        wide_BTH = x_BTH.to(torch.promote_types(x_BTH.dtype, torch.float32))
        scale_BT1 = torch.rsqrt(wide_BTH.square().mean(-1, keepdim=True) + self.eps)
        return (wide_BTH * scale_BT1).to(x_BTH.dtype) * self.weight


class Matrix(nn.Module):
    """x @ weight.T, like nn.Linear without bias and without a first value of its own.

    nn.Linear and nn.Embedding draw one while they are built; on the meta device that alone loads torch's
    compiler, seconds for every rank.
    """

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dim."""
        return functional.linear(x, self.weight)


class Table(nn.Module):
    """One row of weights per token, like nn.Embedding."""

    def __init__(self, num_rows: int, row_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, row_size))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Rows of the tokens."""
        return functional.embedding(tokens_BT, self.weight)


class Layer(nn.Module):
    """Grouped-query attention with rotary positions, then SwiGLU, each behind a norm and a residual."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.num_heads = model.num_heads
        self.num_kv_heads = num_kv_heads(model)
        kv_size = hidden // model.num_heads * self.num_kv_heads
        self.attention_norm = RmsNorm(hidden, model.norm_eps)
        self.q = Matrix(hidden, hidden)
        self.k = Matrix(hidden, kv_size)
        self.v = Matrix(hidden, kv_size)
        self.o = Matrix(hidden, hidden)
        self.ffn_norm = RmsNorm(hidden, model.norm_eps)
        self.gate = Matrix(hidden, model.ffn_size)
        self.up = Matrix(hidden, model.ffn_size)
        self.down = Matrix(model.ffn_size, hidden)

    def forward(self, x_BTH: Tensor, rotation_2TD: Tensor) -> Tensor:
        """One layer on rows of hidden states; `rotation_2TD` holds cosines and sines."""
        x_BTH = x_BTH + self._attention(self.attention_norm(x_BTH), rotation_2TD)
        y_BTH = self.ffn_norm(x_BTH)
        return x_BTH + self.down(functional.silu(self.gate(y_BTH)) * self.up(y_BTH))

    def _attention(self, x_BTH: Tensor, rotation_2TD: Tensor) -> Tensor:
        q_BNTD = _rotate(self._heads(self.q(x_BTH), self.num_heads), rotation_2TD)
        k_BNTD = _rotate(self._heads(self.k(x_BTH), self.num_kv_heads), rotation_2TD)
        v_BNTD = self._heads(self.v(x_BTH), self.num_kv_heads)
        group = self.num_heads // self.num_kv_heads
        if group > 1:
            k_BNTD = k_BNTD.repeat_interleave(group, dim=1)
            v_BNTD = v_BNTD.repeat_interleave(group, dim=1)
        y_BNTD = functional.scaled_dot_product_attention(q_BNTD, k_BNTD, v_BNTD, is_causal=True)
        return self.o(y_BNTD.transpose(1, 2).flatten(2))

    @staticmethod
    def _heads(x_BTH: Tensor, num_heads: int) -> Tensor:
        return x_BTH.unflatten(-1, (num_heads, -1)).transpose(1, 2)


class Head(nn.Module):
    """Final norm and output projection; with tied embeddings the projection's matrix is the embedding's."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.norm = RmsNorm(model.hidden_size, model.norm_eps)
        self.output = Matrix(model.hidden_size, model.vocab_size)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Logits over the vocabulary."""
        logits_BTV: Tensor = self.output(self.norm(x_BTH))
        return logits_BTV


class Stage(nn.Module):
    """The units of one stage, empty until `initialise`; parameter names are those of the whole model.

    Where the plan says so, a layer keeps only its input for the backward, which runs the layer again. Of a parameter
    that is not here as a whole, `boxes` says which part is.
    """

    def __init__(self, model: ModelSpec, stage: StagePlan, *, seq_len: int) -> None:
        super().__init__()
        self.boxes: dict[str, Box] = {}
        self.model = model
        self.seq_len = seq_len
        self.has_embedding = stage.has_embedding
        self.has_head = stage.has_head
        self.recompute = stage.recompute
        self._build(range(stage.first_layer, stage.first_layer + stage.num_layers))

    @property
    def needs_table(self) -> bool:
        """Whether the unit "embedding" is held: also by a head whose matrix it is."""
        return self.has_embedding or (self.has_head and self.model.tied_embeddings)

    def _build(self, layers: range) -> None:
        """Make the modules of the stage, without values."""
        model = self.model
        with torch.device("meta"):
            self.embedding = (
                Table(model.vocab_size, model.hidden_size) if self.needs_table else None
            )
            self.layer = nn.ModuleDict({str(index): Layer(model) for index in layers})
            self.head = Head(model) if self.has_head else None
        self._tie()
        self._rotation_2TD = torch.empty(0)

    def initialise(
        self,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        weights: FirstValues | None = None,
    ) -> Stage:
        """Give every parameter its first value: from `weights`, or drawn on the CPU from its name and the seed alone."""
        self.to_empty(device=device).to(dtype)
        self._tie()
        for name, parameter in self.named_parameters():
            box = self.boxes.get(name)
            shape = parameter.shape if box is None else torch.Size(box.whole)
            if weights is None:
                value = initial_value(name, shape, model=self.model, seed=seed)
            else:
                value = weights(name, shape)
            parameter.data.copy_(value if box is None else box.of(value))
        self._rotation_2TD = _rotation(self.model, self.seq_len).to(device=device, dtype=dtype)
        return self

    def forward(self, x: Tensor, layers: range | None = None) -> Tensor:
        """Token ids (first stage) or hidden states in; hidden states or logits (last stage) out.

        `layers` are those that the input passes here, all when None; numbers are those of the whole model.
        """
        if self.has_embedding and self.embedding is not None:
            x = self.embedding(x)
        for index in self.layer if layers is None else map(str, layers):
            x = self._pass(self.layer[index], x)
        return x if self.head is None else self.head(x)

    def layer_alone(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """The first layer held, for hidden states like `x`, without what a model does before its layers: for measuring."""
        return self

    def _pass(self, layer: nn.Module, x_BTH: Tensor) -> Tensor:
        if self.recompute:
            args = (x_BTH, self._rotation_2TD)
            y_BTH: Tensor = checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)
        else:
            y_BTH = layer(x_BTH, self._rotation_2TD)
        return y_BTH

    def _tie(self) -> None:
        """Let the head's matrix be the embedding's, where the model has one for both."""
        if self.model.tied_embeddings and self.head is not None and self.embedding is not None:
            self.head.output.weight = self.embedding.weight

    def units(self) -> dict[str, dict[str, nn.Parameter]]:
        """Parameters by unit, each in one fixed order."""
        units: dict[str, dict[str, nn.Parameter]] = {}
        for name, parameter in self.named_parameters():
            units.setdefault(unit_of(name), {})[name] = parameter
        return units


def unit_of(name: str) -> str:
    """Unit of a parameter: "layer.3.q.weight" -> "layer.3", "head.norm.weight" -> "head"."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layer" else parts[0]


def initial_value(name: str, shape: torch.Size, *, model: ModelSpec, seed: int) -> Tensor:
    """First value of one parameter in fp32: ones for norms, else normal with std 0.02.

    Projections back into the residual stream are 1 / sqrt(2 * num_layers) smaller, since that many are added up.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    std = _INIT_STD
    if name.endswith((".o.weight", ".down.weight")):
        std /= math.sqrt(2 * model.num_layers)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def summed_loss(logits_BTV: Tensor, targets_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Cross entropy in at least fp32, added up over the valid tokens. Dividing is left to the caller."""
    wide_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    loss_BT = functional.cross_entropy(
        wide_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none"
    )
    return (loss_BT * valid_BT.flatten()).sum()


def _rotation(model: ModelSpec, seq_len: int) -> Tensor:
    """Cosines and sines of every position, in fp64: (2, seq_len, head size)."""
    head_size = model.hidden_size // model.num_heads
    exponents_D = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    positions_T = torch.arange(seq_len, dtype=torch.float64)
    angles_TD = torch.outer(positions_T, model.rope_theta**-exponents_D).repeat(1, 2)
    return torch.stack((angles_TD.cos(), angles_TD.sin()))


def _rotate(x_BNTD: Tensor, rotation_2TD: Tensor) -> Tensor:
    first, second = x_BNTD.chunk(2, dim=-1)
    turned_BNTD = torch.cat((-second, first), dim=-1)
    return x_BNTD * rotation_2TD[0] + turned_BNTD * rotation_2TD[1]
