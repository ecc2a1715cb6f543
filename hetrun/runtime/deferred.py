"""Linear maps whose backward comes in two passes: the gradient of the input at once, those of the weights later.

For orders that put off the gradients of the weights (zero bubble). Only the linear maps are split, for they are
nearly all of that work; norms and embeddings get their gradients in the first pass. When each pass runs is decided
in `schedule/`, and done in `engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hetrun.runtime.network import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """One use of a linear map whose input gradient is done: all that its weights' gradients need, and no more."""

    weight: Tensor  # (outputs, inputs)
    bias: Tensor | None  # (outputs,)
    x: Tensor  # (..., inputs)
    gradient: Tensor  # of the result, (..., outputs)

    def accumulate(self) -> None:
        """Add gradient.T @ x to the gradient of the weight, and the summed gradient to that of the bias."""
        gradient_NO = self.gradient.reshape(-1, self.gradient.shape[-1])
        x_NI = self.x.reshape(-1, self.x.shape[-1])
        if self.weight.requires_grad:
            if self.weight.grad is None:
                self.weight.grad = (gradient_NO.t() @ x_NI).to(self.weight.dtype)
            elif self.weight.dtype is not x_NI.dtype:  # fp32 gathers products of bf16
                self.weight.grad.add_(gradient_NO.t() @ x_NI)
            else:
                self.weight.grad.addmm_(gradient_NO.t(), x_NI)
        if self.bias is not None and self.bias.requires_grad:
            _add(self.bias, gradient_NO.sum(0))


class DeferredWeights:
    """Makes the linear maps of a module put off the gradients of their weights, and keeps what is put off."""

    def __init__(
        self, module: nn.Module, arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """Change every linear map below `module`; one with a forward of its own stays as it is.

        `arithmetic` is what forwards run in, so that the first pass multiplies in the same format.
        """
        self._products: list[Product] = []
        self._arithmetic = arithmetic
        for part in module.modules():
            if type(part).forward in (nn.Linear.forward, Matrix.forward):
                setattr(part, "forward", self._forward(part))  # noqa: B010 - of this one module

    def take(self) -> list[Product]:
        """Hand over what the backward passes since the last call have put off."""
        products, self._products = self._products, []
        return products

    def _forward(self, part: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            weight, bias = part.weight, getattr(part, "bias", None)
            y: Tensor = _SplitLinear.apply(x, weight, bias, self._put_off, self._arithmetic)
            return y

        return forward

    def _put_off(self, product: Product) -> None:
        self._products.append(product)


def accumulate_all(products: list[Product]) -> None:
    """Do what was put off, last first, and let go of each product once it is done."""
    while products:
        products.pop().accumulate()


class _SplitLinear(torch.autograd.Function):
    """x @ weight.T + bias, whose backward returns the gradient of x and tells `put_off` the rest."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        put_off: Callable[[Product], None],
        arithmetic: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        y = functional.linear(x, weight, bias)
        ctx.save_for_backward(x.to(y.dtype))
        ctx.weight, ctx.bias = weight, bias  # as saved tensors, recomputation would hand out copies
        ctx.put_off, ctx.arithmetic = put_off, arithmetic
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.put_off(Product(ctx.weight, ctx.bias, x.detach(), gradient))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        with ctx.arithmetic():
            return gradient @ ctx.weight, None, None, None, None


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)
