"""The torch device of one rank: importing its plug-in, waiting for it, asking its peak memory.

Nothing here names a vendor: the plan carries the torch names, and the variable that selects the chip is
set before torch is imported (`worker.py`, `bench.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from hetrun.errors import PreflightError
from hetrun.model import RankPlan


def open_device(torch_device: str, torch_plugin: str | None, index: int = 0) -> torch.device:
    """Import the plug-in that adds the device to torch, if any, and check that the device is there.

    Raises:
        PreflightError: the plug-in cannot be imported, or torch sees no such device.
    """
    if torch_plugin is not None:
        try:
            importlib.import_module(torch_plugin)
        except ImportError as error:
            raise PreflightError(
                f"cannot import {torch_plugin}, which adds {torch_device!r} to torch: {error}",
                hint="name the interpreter with the vendor's torch as `python:` in the inventory",
            ) from error
    if torch_device == "cpu":
        return torch.device("cpu")
    backend = _backend(torch_device)
    count = backend.device_count() if backend is not None and backend.is_available() else 0
    if index >= count:
        raise PreflightError(
            f"torch {torch.__version__} sees {count} {torch_device!r} devices, need number {index}",
            hint="compare with the host's devices in facts.json: hetrun probe",
        )
    device = torch.device(torch_device, index)
    backend.set_device(device)
    return device


def local_index(ranks: Sequence[RankPlan], mine: RankPlan) -> int:
    """Number of the device among those that this process sees: 0 where a variable hides the others."""
    if mine.visible_env is not None:
        return 0
    before = ranks[: mine.rank]
    return sum(
        rank.host == mine.host and rank.torch_device == mine.torch_device and not rank.emulated
        for rank in before
    )


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it; a CPU always has."""
    if device.type != "cpu":
        _backend(device.type).synchronize(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most bytes that tensors took on the device so far; None where torch does not count them."""
    backend = _backend(device.type)
    if device.type == "cpu" or not hasattr(backend, "max_memory_allocated"):
        return None
    return int(backend.max_memory_allocated(device))


def _backend(torch_device: str) -> Any:
    """torch.cuda, torch.npu, ...: every device plug-in adds a module of its own name."""
    return getattr(torch, torch_device, None)
