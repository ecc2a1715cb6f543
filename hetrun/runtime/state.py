"""What one rank has to save: its parameters and what AdamW knows of each, under names of the whole model.

`layer.3.q.weight` is a parameter, `layer.3.q.weight.exp_avg` its first moment. A unit that several ranks hold (replicas,
lanes, a layer at a real cut, tied embeddings) has one name. Who saves what is decided in `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hetrun.model import ModelSpec, Plan, StagePlan
from hetrun.runtime.checkpoint_files import BadCheckpointError
from hetrun.runtime.network import Stage, unit_of

MOMENTS = ("exp_avg", "exp_avg_sq")  # shaped like the parameter
COUNT = "step"  # of updates: one number


class State:
    """Parameters of a stage and the state of its optimizer."""

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: dict[str, nn.Parameter] = dict(stage.named_parameters())
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}  # of all it needs to go on
        for name, parameter in self._parameters.items():
            like = (tuple(parameter.shape), parameter.dtype)
            self.shapes[name] = like
            self.shapes.update({f"{name}.{moment}": like for moment in MOMENTS})
            self.shapes[f"{name}.{COUNT}"] = ((), torch.float32)

    def copy(self, units: frozenset[str]) -> dict[str, Tensor]:
        """Copies in host memory of all tensors of these units."""
        return {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in self._tensors()
            if unit_of(name) in units
        }

    def put(self, name: str, value: Tensor) -> None:
        """Take one tensor back; all of `shapes` have to come before the next step.

        Raises:
            BadCheckpointError: another shape or dtype than here.
        """
        shape, dtype = self.shapes[name]
        if (tuple(value.shape), value.dtype) != (shape, dtype):
            raise BadCheckpointError(
                f"{name}: the checkpoint has {tuple(value.shape)} {value.dtype}, need {shape} {dtype}"
            )
        base, _, kind = name.rpartition(".")
        if kind not in (*MOMENTS, COUNT):
            self._parameters[name].data.copy_(value)
            return
        parameter = self._parameters[base]
        state = self._optimizer.state[parameter]
        device = torch.device("cpu") if kind == COUNT else parameter.device
        state[kind] = value.to(device, copy=True)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield name, parameter
            for kind in (*MOMENTS, COUNT):
                yield f"{name}.{kind}", self._optimizer.state[parameter][kind]


def held_units(plan: Plan) -> list[frozenset[str]]:
    """Units that each rank holds, in order of rank."""
    held: list[frozenset[str]] = [frozenset()] * len(plan.split.ranks)
    for replica in plan.split.replicas:
        for stage in replica.stages:
            units = _units(stage, plan.recipe.model)
            for rank in stage.ranks:
                held[rank] = units
    return held


def first_holders(
    held: Sequence[frozenset[str]], directories: Iterable[Iterable[int]]
) -> list[frozenset[str]]:
    """Units that each rank saves: in every directory (its ranks) the first rank that holds a unit."""
    saved: list[set[str]] = [set() for _ in held]
    for ranks in directories:
        done: set[str] = set()
        for rank in sorted(ranks):
            saved[rank] |= held[rank] - done
            done |= held[rank]
    return [frozenset(units) for units in saved]


def _units(stage: StagePlan, model: ModelSpec) -> frozenset[str]:
    layers = range(stage.first_layer, stage.first_layer + stage.num_layers)
    units = {f"layer.{layer}" for layer in layers}
    if stage.has_embedding or (stage.has_head and model.tied_embeddings):
        units.add("embedding")
    if stage.has_head:
        units.add("head")
    return frozenset(units)
