"""Sums over the ranks that share a layer, forwards and backwards, through host memory. Where they stand is not decided here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetrun.runtime.boundary import PeerLostError


class ToAll(torch.autograd.Function):
    """The same values for every share; gradients that come back from all of them are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return add_up(gradient, ctx.group), None


class Added(torch.autograd.Function):
    """The sum of what all shares give; its gradient is that of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return add_up(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def add_up(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks of a group, the same bits on all of them.

    Raises:
        PeerLostError: a rank is gone.
    """
    total = part.detach().to("cpu", copy=True).contiguous()
    try:
        dist.all_reduce(total, group=group)
    except RuntimeError as error:
        raise PeerLostError(f"a rank did not give its share of a layer: {error}") from error
    return total.to(part.device)
