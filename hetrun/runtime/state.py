"""What one rank has to save: its parameters and what AdamW knows of each, under names of the whole model.

`layer.3.q.weight` is a parameter, `layer.3.q.weight.exp_avg` its first moment. A unit that several ranks hold (replicas,
lanes, a layer at a real cut, tied embeddings) has one name. Of what a rank has a part of, it says which. Who saves what
is decided in `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from hetrun.runtime.boxes import Box, whole_box
from hetrun.runtime.checkpoint_files import BadCheckpointError
from hetrun.runtime.network import Stage, unit_of

MOMENTS = ("exp_avg", "exp_avg_sq")  # shaped like the parameter
COUNT = "step"  # of updates: one number
_NUMBER = whole_box(())


class Updated(Protocol):
    """What an optimizer updates here: all that a rank holds of a parameter, or a part of that."""

    @property
    def name(self) -> str:
        """Of the parameter."""
        ...

    @property
    def box(self) -> Box:
        """Which part of the parameter."""
        ...

    @property
    def value(self) -> nn.Parameter:
        """What the optimizer knows it by."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether no other rank has its moments, so that this one saves them whatever it saves else."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A parameter that the optimizer updates as far as it is here, like all other ranks that hold it."""

    name: str
    box: Box
    value: nn.Parameter
    is_alone: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A tensor of the model, or a part of it, in host memory."""

    name: str
    box: Box
    value: Tensor


class State:
    """Parameters of a stage and the state of its optimizer."""

    def __init__(
        self,
        stage: Stage,
        optimizer: torch.optim.Optimizer,
        *,
        parts: Sequence[Updated] = (),
        is_first: bool = True,
    ) -> None:
        """`parts` are those that the optimizer updates of parameters which it does not know as a whole.

        Of ranks that share layers the first (`is_first`) saves what each holds whole.
        """
        self._optimizer = optimizer
        self._is_first = is_first
        self._shared = frozenset(stage.boxes)
        self._parameters: dict[str, nn.Parameter] = dict(stage.named_parameters())
        self._boxes = {
            name: stage.boxes.get(name) or whole_box(parameter.shape)
            for name, parameter in self._parameters.items()
        }
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        whole = [
            Whole(name, self._boxes[name], parameter)
            for name, parameter in self._parameters.items()
            if id(parameter) in known
        ]
        self._updated: list[Updated] = [*whole, *parts]
        self._moments = {(item.name, item.box): item.value for item in self._updated}
        self.needs: dict[str, dict[Box, torch.dtype]] = {}  # all it needs to go on, by name
        for name, parameter in self._parameters.items():
            self.needs[name] = {self._boxes[name]: parameter.dtype}
        for item in self._updated:
            for moment in MOMENTS:
                needs = self.needs.setdefault(f"{item.name}.{moment}", {})
                needs[item.box] = item.value.dtype
            self.needs[f"{item.name}.{COUNT}"] = {_NUMBER: torch.float32}

    def copy(self, units: frozenset[str]) -> list[Saved]:
        """Copies in host memory of what this rank saves of these units, and of what it alone has."""
        parameters = (
            Saved(name, self._boxes[name], parameter)
            for name, parameter in self._parameters.items()
            if self._saves(name, units)
        )
        moments = (
            saved
            for item in self._updated
            if item.is_alone or self._saves(item.name, units)
            for saved in self._moments_of(item)
        )
        return [
            Saved(saved.name, saved.box, saved.value.detach().to("cpu", copy=True).contiguous())
            for group in (parameters, moments)
            for saved in group
        ]

    def put(self, name: str, box: Box, value: Tensor) -> None:
        """Take one tensor back, or a part of it; all of `needs` have to come before the next step.

        Raises:
            BadCheckpointError: another shape or dtype than here.
        """
        dtype = self.needs[name][box]
        if (tuple(value.shape), value.dtype) != (box.shape, dtype):
            raise BadCheckpointError(
                f"{name}: the checkpoint has {tuple(value.shape)} {value.dtype}, need {box.shape} {dtype}"
            )
        base, _, kind = name.rpartition(".")
        if kind not in (*MOMENTS, COUNT):
            self._parameters[name].data.copy_(value)
        elif kind == COUNT:
            for item in self._updated:
                if item.name == base:
                    self._optimizer.state[item.value][COUNT] = value.to("cpu", copy=True)
        else:
            parameter = self._moments[base, box]
            self._optimizer.state[parameter][kind] = value.to(parameter.device, copy=True)

    def _saves(self, name: str, units: frozenset[str]) -> bool:
        return unit_of(name) in units and (self._is_first or name in self._shared)

    def _moments_of(self, item: Updated) -> Iterator[Saved]:
        state = self._optimizer.state[item.value]
        for moment in MOMENTS:
            yield Saved(f"{item.name}.{moment}", item.box, state[moment])
        yield Saved(f"{item.name}.{COUNT}", _NUMBER, state[COUNT])


def entries(saved: Iterable[Saved]) -> tuple[dict[str, Tensor], dict[str, tuple[str, Box]]]:
    """Names that differ within a file for tensors, and which of them are parts of what; numbers are kept once."""
    tensors: dict[str, Tensor] = {}
    parts: dict[str, tuple[str, Box]] = {}
    for item in saved:
        if item.box.is_whole:
            tensors[item.name] = item.value
            continue
        entry = f"{item.name}#{len(parts)}"
        tensors[entry] = item.value
        parts[entry] = (item.name, item.box)
    return tensors, parts


def first_holders(
    held: Sequence[frozenset[str]],
    directories: Iterable[Iterable[int]],
    lanes: Mapping[int, Sequence[int]],
) -> list[frozenset[str]]:
    """Units that each rank saves: in every directory (its ranks) those of the first lane that holds a unit, all of its ranks.

    The ranks of a lane, which share layers, are on one host and so in one directory.
    """
    saved: list[set[str]] = [set() for _ in held]
    for ranks in directories:
        done: set[str] = set()
        for lane in dict.fromkeys(tuple(lanes[rank]) for rank in sorted(ranks)):
            for rank in lane:
                saved[rank] |= held[rank] - done
            done |= held[lane[0]]
    return [frozenset(units) for units in saved]
