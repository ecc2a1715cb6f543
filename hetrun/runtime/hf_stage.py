"""A stage of a decoder that transformers builds: the model's own forward, with only the units of this stage in it.

The list of layers keeps its length, and each layer runs if it is held here and the microbatch passes it. On a stage without
embedding the forward begins with what was received, and the first place of the list hands that on, whatever was done to it
before; masks and rotary positions are made anew on every stage. On a stage without head what comes out is taken at
the end of the list. Where devices share layers (`hf_share.py`), `boxes` says which part of a parameter is here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetrun.errors import ConfigError
from hetrun.model import ModelSpec, StagePlan
from hetrun.runtime.hf_model import (
    build_on_meta,
    empty,
    fill_buffers,
    hidden_of,
    outline,
    set_forward,
    unset,
)
from hetrun.runtime.network import FirstValues, Stage


def build_stage(model: ModelSpec, stage: StagePlan, *, seq_len: int) -> Stage:
    """A stage of any model, without values.

    Raises:
        PreflightError: it takes transformers, which is missing or too old.
        ConfigError: transformers cannot build the config, or builds another model than was counted.
    """
    kind = Stage if model.config is None else HfStage
    return kind(model, stage, seq_len=seq_len)


@dataclass(slots=True)
class _Flow:
    """What the places of the list of layers know of the forward that runs."""

    layers: range
    entry: Tensor | None = None  # what was received; None where the embedding is
    exit: Tensor | None = None  # what came out of the last place


Modules = list[tuple[str, nn.Module]]  # by name, outer ones first


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Where a parameter stands, and what stood there on the meta device."""

    name: str
    owner: nn.Module
    key: str
    meta: nn.Parameter

    def put(self, value: Tensor) -> None:
        """Fill it."""
        is_made = isinstance(value, nn.Parameter)
        self.owner.register_parameter(self.key, value if is_made else nn.Parameter(value))


class HfStage(Stage):
    """The units of one stage in a model of transformers."""

    def _build(self, layers: range) -> None:
        self.outline = outline(self.model)
        self._held = layers
        self._flow = _Flow(range(0))
        self._built = build_on_meta(self.model)
        self._forwards: dict[int, Callable[..., Any]] = {}  # of the held layers
        anatomy = self.outline.anatomy
        for index, layer in enumerate(self._built.get_submodule(anatomy.layers)):
            if index in layers:
                self._forwards[index] = layer.forward
            else:
                empty(layer)
            set_forward(layer, partial(self._place, index))
        for name in sorted(anatomy.before | anatomy.after):
            module = self._built.get_submodule(name)
            is_before = name in anatomy.before
            if not (self.has_embedding if is_before else self.has_head):
                set_forward(module, self._entry if is_before else _given)
            if not (self.needs_table if is_before else self.has_head):
                empty(module)

    def initialise(
        self,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        weights: FirstValues | None = None,
    ) -> Stage:
        """As `Stage.initialise`. Drawn are values by the model's own rule, in fp32, layer by layer.

        Buffers keep their format: transformers computes rotary positions in fp32 whatever the parameters are.
        """
        grouped = (
            device.type == "cuda" and dtype is torch.bfloat16
        )  # products of all experts at once
        self._built.set_experts_implementation("grouped_mm" if grouped else "eager")
        fill_buffers(self._built)
        made: dict[nn.Parameter, nn.Parameter] = {}  # by what stood there: tied ones are one
        for name, modules in self._parts():
            slots = _slots(modules)
            new = [slot for slot in slots if slot.meta not in made]
            if weights is None:
                self._draw(f"{seed}/{name}", modules, new)
            else:
                for slot in new:
                    slot.put(weights(self.outline.full_name(slot.name), slot.meta.shape))
            for slot in new:
                value = slot.owner.get_parameter(slot.key).detach()
                box = self.boxes.get(self.outline.full_name(slot.name))
                value = value if box is None else box.of(value).contiguous()
                made[slot.meta] = nn.Parameter(value.to(device, dtype))
            for slot in slots:
                slot.put(made[slot.meta])
        self._place_buffers(device, weights)
        return self

    def _draw(self, word: str, modules: Modules, slots: Sequence[_Slot]) -> None:
        """Give parameters values that follow from a word alone, however much else is drawn on this rank."""
        if not slots:
            return
        for slot in slots:
            slot.put(unset(slot.meta))
        digest = hashlib.sha256(word.encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            for _, module in reversed(modules):  # outer ones correct what inner ones got
                self._built._init_weights(module)  # noqa: SLF001 - the only word on first values
        for slot in slots:
            if bool(slot.owner.get_parameter(slot.key).isnan().any()):
                raise ConfigError(f"transformers gives {slot.name} no first value")

    def _parts(self) -> list[tuple[str, Modules]]:
        """The held layers, and each module with parameters of its own outside of them; the embedding before the head."""
        anatomy, built = self.outline.anatomy, self._built
        parts = []
        for index in self._held:
            name = f"{anatomy.layers}.{index}"
            parts.append((name, list(built.get_submodule(name).named_modules(prefix=name))))
        outside = [*sorted(anatomy.before), *sorted(anatomy.after)]
        return parts + [(name, [(name, built.get_submodule(name))]) for name in outside]

    def _place_buffers(self, device: torch.device, weights: FirstValues | None) -> None:
        """Bring buffers to the device; those that files have come from there."""
        for name, buffer in self._built.named_buffers():
            value = buffer
            if weights is not None and name in self.outline.constants:
                value = weights(self.outline.full_name(name), buffer.shape).to(buffer.dtype)
            owner, _, key = name.rpartition(".")
            setattr(self._built.get_submodule(owner), key, value.to(device))

    def forward(self, x: Tensor, layers: range | None = None) -> Tensor:
        """As `Stage.forward`."""
        flow = _Flow(self._held if layers is None else layers, None if self.has_embedding else x)
        self._flow = flow
        given = {"input_ids": x} if self.has_embedding else {"inputs_embeds": x.detach()}
        try:
            if self.has_head:
                logits_BTV: Tensor = self._built(**given, use_cache=False).logits
                return logits_BTV
            self._built.base_model(**given, use_cache=False)
        finally:
            self._flow = _Flow(range(0))  # holds no tensor of a microbatch longer than its forward
        if flow.exit is None:
            raise RuntimeError(f"the forward of {self.model.family} left its layers out")
        return flow.exit

    @property
    def tp_rules(self) -> dict[str, str]:
        """What the config says of modules of shared layers, by names in the base model with `*` for the layer."""
        return dict(getattr(self._built.config, "base_model_tp_plan", None) or {})

    @property
    def held_layers(self) -> list[str]:
        """Names of the held layers in the class."""
        return [f"{self.outline.anatomy.layers}.{index}" for index in self._held]

    def module(self, name: str) -> nn.Module:
        """A module by its name in the class."""
        found: nn.Module = self._built.get_submodule(name)
        return found

    def whole_shape(self, name: str) -> torch.Size:
        """Shape of a parameter, by our name, before `initialise`."""
        return dict(self.named_parameters())[name].shape

    def layer_alone(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """The first layer held, with what the model's forward hands it beside the hidden states `x`: for measuring."""
        index, layer = next(iter(self._forwards.items()))
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def note(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            calls.append((args, kwargs))
            return x

        self._forwards[index] = note
        with torch.no_grad():
            self(x)
        self._forwards[index] = layer
        args, kwargs = calls[0]
        return lambda y: _first(layer(y, *args, **kwargs))

    def train(self, mode: bool = True) -> HfStage:
        """Change nothing: what the model does in training alone (dropout, noise of routers) would depend on the plan."""
        self.training = mode
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Held parameters under our names: unit, then the name in the class."""
        if not recurse:
            return
        start = f"{prefix}." if prefix else ""
        for name, parameter in self._built.named_parameters(remove_duplicate=remove_duplicate):
            yield start + self.outline.full_name(name), parameter

    def _place(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """The forward of one place in the list of layers."""
        flow = self._flow
        x = hidden_of(args, kwargs)
        if index == 0 and flow.entry is not None:
            x = flow.entry
        if index in flow.layers:
            layer = self._forwards[index]
            kwargs.pop("hidden_states", None)
            if self.recompute:
                once = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False)
                x = _first(once(x, *args[1:], **kwargs))
            else:
                x = _first(layer(x, *args[1:], **kwargs))
        if index == self.model.num_layers - 1:
            flow.exit = x
        return (x,) if self.outline.anatomy.gives_tuples else x

    def _entry(self, *_args: Any, **_kwargs: Any) -> Tensor:
        """What a module before the layers gives where the embedding is not: of the right shape, and thrown away."""
        if self._flow.entry is None:
            raise RuntimeError("a module before the layers ran without an entry")
        return self._flow.entry.detach()


def _given(x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """What a module after the layers gives where the head is not."""
    return x


def _first(result: Any) -> Tensor:
    """The hidden states in what a layer gives."""
    x: Tensor = result[0] if isinstance(result, tuple) else result
    return x


def _slots(modules: Modules) -> list[_Slot]:
    """Parameters of modules, each module's own."""
    return [
        _Slot(f"{name}.{key}", module, key, parameter)
        for name, module in modules
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
