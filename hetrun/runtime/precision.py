"""Which number formats a stage holds and computes in: the one place that knows what `train.dtype` is to torch.

fp64, fp32 and bf16 are one format for everything. With bf16-mixed parameters, gradients and moments are fp32, matrices are
multiplied in bf16 by torch's autocast, and what flows between modules and stages is bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hetrun.errors import PreflightError
from hetrun.model import Dtype

TORCH_DTYPE = {  # of parameters, their gradients and moments
    Dtype.FP64: torch.float64,
    Dtype.FP32: torch.float32,
    Dtype.BF16: torch.bfloat16,
    Dtype.BF16_MIXED: torch.float32,
}
ACTIVATION_DTYPE = {**TORCH_DTYPE, Dtype.BF16_MIXED: torch.bfloat16}
_BF16_HINT = "set dtype: fp32 in the recipe, or leave this device out of the inventory"


class Precision:
    """How one device computes with a recipe's dtype."""

    def __init__(self, dtype: Dtype, device: torch.device) -> None:
        """Try bf16 where the recipe asks for it.

        Raises:
            PreflightError: the device, or its torch, has none.
        """
        self.parameters = TORCH_DTYPE[dtype]
        self.activations = ACTIVATION_DTYPE[dtype]
        self._device = device
        self._is_mixed = self.parameters != self.activations
        if self.activations is torch.bfloat16:
            self._need_bf16()

    def step(self) -> AbstractContextManager[Any]:
        """Around all forwards and backwards of a step: the bf16 copies of matrices are made once, and dropped at its end."""
        return self._autocast(False) if self._is_mixed else nullcontext()

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Around a forward, or a product in a backward that is written by hand; autograd's own backward needs none."""
        return self._autocast(True) if self._is_mixed else nullcontext()

    def prepare(self, stage: nn.Module) -> None:
        """Let what modules with parameters give be of the activations' format: embeddings and norms would widen it."""
        if not self._is_mixed:
            return
        for module in stage.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_hook(self._narrow)

    def _narrow(self, _module: nn.Module, _args: object, result: Any) -> Any:
        if isinstance(result, Tensor) and result.dtype is self.parameters:
            return result.to(self.activations)
        return result

    def _autocast(self, enabled: bool) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, self.activations, enabled=enabled)

    def _need_bf16(self) -> None:
        """Ask torch's word for it, and multiply once: some builds only emulate it, some fail when asked."""
        backend = getattr(torch, self._device.type, None)
        word: Callable[[], bool] | None = getattr(backend, "is_bf16_supported", None)
        try:
            native = True if word is None else _without_emulation(word)
            ones = torch.ones(8, 8, device=self._device, dtype=self.parameters)
            with self.arithmetic():
                product = torch.mm(ones, ones)
            right = product.dtype is torch.bfloat16 and bool((product == 8).all())
        except (RuntimeError, AttributeError) as error:
            raise PreflightError(f"{self._device}: no bf16: {error}", hint=_BF16_HINT) from error
        if not (native and right):
            raise PreflightError(
                f"{self._device}: torch {torch.__version__} has no bf16 arithmetic for it",
                hint=_BF16_HINT,
            )


def _without_emulation(word: Callable[..., bool]) -> bool:
    """What a backend says of its bf16; those that can emulate it are asked not to count that."""
    try:
        return word(including_emulation=False)
    except TypeError:  # a vendor's backend takes no such argument
        return word()
