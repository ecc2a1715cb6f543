"""Tensors as the bytes and flat elements that are moved. Host memory only."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from hetrun.bridge.failure import NotBridgedError


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor; keeps the tensor alive."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # whoever holds the view holds the memory
    return memoryview(array).cast("B")


def check_host(tensor: Tensor) -> None:
    """Refuse what lies elsewhere than in host memory as plain elements.

    Raises:
        NotBridgedError: names what it is.
    """
    if tensor.layout is not torch.strided:
        raise NotBridgedError(f"the bridge moves no tensors of layout {tensor.layout}")
    if tensor.device.type != "cpu":
        raise NotBridgedError(
            f"the bridge moves tensors in host memory, this one is on {tensor.device}",
            hint="groups inside one island take the tensors of its own library",
        )


def flat(tensor: Tensor) -> Tensor:
    """All elements in order, shape [numel]: the tensor's own memory where that is contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1)


def flat_bytes(tensor: Tensor) -> Tensor:
    """As `flat`, as bytes: shape [numel * itemsize]."""
    return flat(tensor).view(torch.uint8)


def writer(tensor: Tensor, elements: Tensor) -> Callable[[], None]:
    """Return what brings `elements` (from `flat` or `flat_bytes` of the tensor) back where they are a copy."""

    def write() -> None:
        if elements.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(elements.view(tensor.dtype).view(tensor.shape))

    return write


def padded(elements: Tensor, parts: int) -> Tensor:
    """The elements, with zeros behind so that `parts` divide them; themselves where they do already."""
    short = -elements.numel() % parts
    return torch.cat([elements, elements.new_zeros(short)]) if short else elements
