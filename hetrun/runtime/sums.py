"""Sums over the ranks that share a layer, forwards and backwards. Where they stand is not decided here.

These ranks are devices of one vendor on one host, so the vendor's own library can add up on the devices; else gloo does
in host memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hetrun.model import RankPlan
from hetrun.runtime.boundary import PeerLostError

GLOO = "gloo"


def backend_of(rank: RankPlan) -> str:
    """Name in torch.distributed of what adds up between a rank and those that share its layers.

    The one that torch, or the vendor's plug-in, names for the device; gloo for CPUs, emulated chips and where there is none.
    """
    named = dist.Backend.default_device_backend_map.get(rank.torch_device, GLOO)
    return named if not rank.emulated and dist.is_backend_available(named) else GLOO


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
    on = "cpu" if dist.get_backend(group) == GLOO else part.device
    total = part.detach().to(on, copy=True).contiguous()
    try:
        dist.all_reduce(total, group=group)
    except RuntimeError as error:
        raise PeerLostError(f"a rank did not give its share of a layer: {error}") from error
    return total.to(part.device)
