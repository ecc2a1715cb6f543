"""Shares of the layers of a model that transformers builds, as its config says which matrices are cut along which dim.

`base_model_tp_plan` names them: `colwise` by their outputs, `rowwise` by their inputs, whose results are added up. Norms of the
heads that a rank has are whole, and their gradients are added up. What else a config may ask for is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hetrun.runtime.boxes import box_along
from hetrun.runtime.hf_stage import HfStage
from hetrun.runtime.sums import Added, ToAll, add_up

_DIM = {"colwise": 0, "rowwise": 1}  # of weights; a bias beside the former is cut too
_SUMMED = "replicated_with_grad_allreduce"
_LAYERS = "layers.*."


def is_shareable(stage: HfStage) -> bool:
    """Whether all that its config says of shared layers is done here."""
    rules = stage.tp_rules
    known = all(
        name.startswith(_LAYERS) and rule in (*_DIM, _SUMMED) for name, rule in rules.items()
    )
    if not (rules and known):
        return False
    return all(
        isinstance(module, nn.Linear) and (rule == "colwise" or module.bias is None)
        for _, module, rule in _ruled(stage)
        if rule != _SUMMED
    )


def hf_shared_dims(stage: HfStage) -> dict[str, int]:
    """Parameters that several ranks can share, by name, and along which dim."""
    if not is_shareable(stage):
        return {}
    return {
        stage.outline.full_name(f"{name}.{key}"): 0 if key == "bias" else _DIM[rule]
        for name, module, rule in _ruled(stage)
        if rule != _SUMMED
        for key, _ in module.named_parameters(recurse=False)
    }


def share_hf_layers(
    stage: HfStage, *, place: int, size: int, group: dist.ProcessGroup | None
) -> None:
    """Let a stage without values hold one of `size` equal shares of each of its layers, if these are shareable.

    Without a group their results are partial sums, fit for timing only.
    """
    for name, dim in hf_shared_dims(stage).items():
        shape = stage.whole_shape(name)
        part = shape[dim] // size
        stage.boxes[name] = box_along(shape, dim, place * part, (place + 1) * part)
    if group is None:
        return
    parents: dict[nn.Module, None] = {}
    for name, module, rule in _ruled(stage):
        if rule == "rowwise":
            module.register_forward_hook(partial(_add, group))
        elif rule == _SUMMED:
            _Summed(module, group)
        else:
            parents[stage.module(name.rpartition(".")[0])] = None
    for parent in parents:
        parent.register_forward_pre_hook(partial(_spread, group), with_kwargs=True)


def _ruled(stage: HfStage) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules of the held layers that a rule is for, by their names in the class."""
    for layer in stage.held_layers:
        for name, rule in stage.tp_rules.items():
            full = f"{layer}.{name.removeprefix(_LAYERS)}"
            yield full, stage.module(full), rule


def _add(group: dist.ProcessGroup, _module: nn.Module, _args: Any, part: Tensor) -> Tensor:
    total: Tensor = Added.apply(part, group)
    return total


def _spread(
    group: dist.ProcessGroup, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before attention or the inner network: the same hidden states for every share."""
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": ToAll.apply(kwargs["hidden_states"], group)}
    return (ToAll.apply(args[0], group), *args[1:]), kwargs


class _Summed:
    """Adds up the gradients of a module's parameters; they are made after the stage is shared, so at its first forward."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._handle = module.register_forward_pre_hook(self._begin)

    def _begin(self, module: nn.Module, _args: Any) -> None:
        for parameter in module.parameters():
            parameter.register_hook(partial(add_up, group=self._group))
        self._handle.remove()
