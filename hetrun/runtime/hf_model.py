"""A decoder of transformers on torch's meta device, and where it can be cut. Stages are made of it in `hf_stage.py`.

Nothing here knows a family: the layers are the list of `num_layers` modules, and a forward without them shows which other
modules run before and which after.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hetrun.arch.families import FAMILIES
from hetrun.arch.hf import portable_keys
from hetrun.errors import ConfigError, PreflightError
from hetrun.model import ModelSpec
from hetrun.schedule.sync import unit_parameters

OLDEST = (
    5,
    0,
)  # of transformers: buffers that are built on the meta device get their values back since then
_HINT = (
    "install it beside the vendor's torch, without touching that: pip install 'transformers>=5.0'"
)
_PROBE_SHAPE = (2, 3)  # rows, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Where a model can be cut; all names are those of its modules."""

    layers: str  # the list of layers
    before: frozenset[str]  # modules with parameters of their own that run before the layers
    after: frozenset[str]  # and after them
    gives_tuples: bool  # whether a layer's result is a tuple with the hidden states first

    def unit_of(self, module: str) -> str:
        """Unit that a module's own parameters belong to."""
        if module.startswith(f"{self.layers}."):
            return f"layer.{module.removeprefix(f'{self.layers}.').split('.')[0]}"
        return "embedding" if module in self.before else "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """All tensors of a whole model."""

    anatomy: Anatomy
    parameters: dict[str, torch.Size]  # by the name in the class, a tied one once
    constants: dict[
        str, torch.Size
    ]  # what no gradient changes and files have: correction biases of routers
    tied: tuple[str, ...]  # further names of tied ones
    ignored: tuple[str, ...]  # patterns of what else the class lets be in files

    def full_name(self, name: str) -> str:
        """Our name of a parameter: its unit, then its name in the class."""
        return f"{self.anatomy.unit_of(name.rpartition('.')[0])}.{name}"


@lru_cache(maxsize=4)
def outline(model: ModelSpec) -> Outline:
    """Find out what a model is made of, and check that it is what hetrun has counted.

    Raises:
        PreflightError: transformers is missing or too old.
        ConfigError: it cannot build the config, or builds another model than was counted, or one that cannot be cut.
    """
    built = build_on_meta(model)
    parameters = {name: parameter.shape for name, parameter in built.named_parameters()}
    twice = built.named_parameters(remove_duplicate=False)
    state = built.state_dict()
    tied = tuple(name for name, _ in twice if name not in parameters)
    constants = {
        name: value.shape for name, value in state.items() if name not in {*parameters, *tied}
    }
    patterns = getattr(built, "_keys_to_ignore_on_load_unexpected", None) or ()
    fill_buffers(built)
    found = Outline(
        anatomy=examine(built, model),
        parameters=parameters,
        constants=constants,
        tied=tied,
        ignored=tuple(patterns),
    )
    _check_counts(found, model)
    return found


def need_transformers() -> Any:
    """Import transformers.

    Raises:
        PreflightError: it is not there, or too old.
    """
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise PreflightError(
            f"this model is built by transformers, which cannot be imported: {error}", hint=_HINT
        ) from error
    numbers = tuple(int(part) for part in library.__version__.split(".")[:2] if part.isdecimal())
    if numbers < OLDEST:
        raise PreflightError(
            f"transformers {library.__version__} is too old, need {'.'.join(map(str, OLDEST))}",
            hint=_HINT,
        )
    library.logging.set_verbosity_error()
    return library


def build_on_meta(model: ModelSpec) -> Any:
    """Return the whole model without a single value, but for buffers that follow from the config.

    Only classes of the library are built, never code that comes with a model. Dropout and noise of routers are off for
    good, since what they do would depend on the plan; keys and values are not cached.

    Raises:
        PreflightError: transformers is missing or too old.
        ConfigError: it cannot build the config.
    """
    library = need_transformers()
    keys = portable_keys(json.loads(model.config or "{}"))
    kind = keys.pop("model_type", None)
    if kind not in FAMILIES:
        raise ConfigError(f"model: {kind!r} is none of the families {', '.join(sorted(FAMILIES))}")
    strict = importlib.import_module("huggingface_hub.errors").StrictDataclassError
    try:
        config = library.AutoConfig.for_model(kind, **keys)
        config.use_cache = False
        with torch.device("meta"):
            built = library.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            built.tie_weights()  # the first releases of 5 leave it undone on the meta device
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, strict) as error:
        raise ConfigError(
            f"transformers {library.__version__} cannot build this {model.family} config: {error}",
            hint="a newer transformers may know it",
        ) from error
    return built.eval()


def fill_buffers(built: Any) -> None:
    """Give the buffers of a model their values, in host memory: rotary frequencies, scales, biases that no gradient changes.

    Raises:
        ConfigError: some buffer has no first value.
    """
    for name, module in built.named_modules():
        own = {key: buffer for key, buffer in module._buffers.items() if buffer is not None}  # noqa: SLF001
        for key, buffer in own.items():
            setattr(module, key, unset(buffer))
        if own:
            built._init_weights(module)  # noqa: SLF001 - parameters are on the meta device, where this does nothing
        for key in own:
            if bool(getattr(module, key).isnan().any()):
                raise ConfigError(f"transformers gives {name}.{key} no first value")


def examine(built: Any, model: ModelSpec) -> Anatomy:
    """Find out where a model can be cut; takes its modules apart, so build another one after that.

    Raises:
        ConfigError: it has no list of so many layers, or a module that runs at no time or among the layers.
    """
    found = [
        (name, part)
        for name, part in built.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == model.num_layers
    ]
    if not found:
        raise ConfigError(f"this {model.family} has no list of {model.num_layers} layers")
    name, layers = min(found, key=lambda item: item[0].count("."))
    owners = {
        other: part
        for other, part in built.named_modules()
        if not other.startswith(f"{name}.")
        and any(p is not None for p in part._parameters.values())  # noqa: SLF001
    }
    probe = _Probe(model.hidden_size)
    probe.watch(layers, owners)
    probe.run(built)
    before, after = probe.seen_before(), probe.seen_after()
    lost = sorted(owners.keys() - before - after) + sorted(before & after)
    if lost:
        raise ConfigError(
            f"{lost[0]} of this {model.family} runs at no time, or before and after its layers"
        )
    return Anatomy(
        layers=name,
        before=frozenset(before),
        after=frozenset(after),
        gives_tuples=probe.gives_tuples,
    )


def _check_counts(found: Outline, model: ModelSpec) -> None:
    """Plans rest on counted parameters: those that are built must be as many, unit by unit."""
    units: dict[str, int] = {}
    for name, shape in found.parameters.items():
        unit = found.full_name(name).removesuffix(f".{name}")
        units[unit] = units.get(unit, 0) + shape.numel()
    for unit, count in units.items():
        if count != unit_parameters(unit, model):
            raise ConfigError(
                f"{unit} of this {model.family} has {count} parameters as transformers builds it, the plan counts"
                f" {unit_parameters(unit, model)}",
                hint="hetrun does not know some key of this config; please tell its developers",
            )


class _TakesFirstError(Exception):
    """A model takes the first element of what its layers give."""


class _Probe:
    """Runs the forward of a model whose layers and whose modules with parameters only say that they were called."""

    def __init__(self, hidden_size: int) -> None:
        self._shape = (*_PROBE_SHAPE, hidden_size)
        self._calls: list[str] = []  # names of modules; empty ones are layers
        self.gives_tuples = False

    def watch(self, layers: nn.ModuleList, owners: dict[str, nn.Module]) -> None:
        """Replace the forwards."""
        for layer in layers:
            set_forward(layer, self._layer)
            empty(layer)
        for name, module in owners.items():
            set_forward(module, self._owner(name))

    def run(self, built: Any) -> None:
        """One forward on a few tokens; a second one where the layers turn out to give tuples."""
        try:
            self._forward(built)
        except _TakesFirstError:
            self.gives_tuples = True
            self._forward(built)  # if that is not it, it raises again: our bug, not the user's

    def seen_before(self) -> set[str]:
        """Names of modules that ran before the first layer."""
        return set(self._calls[: self._calls.index("")])

    def seen_after(self) -> set[str]:
        """Names of modules that ran after the last layer."""
        last = len(self._calls) - self._calls[::-1].index("")
        return set(self._calls[last:])

    def _forward(self, built: Any) -> None:
        self._calls = []
        with torch.no_grad():
            built(input_ids=torch.zeros(_PROBE_SHAPE, dtype=torch.long), use_cache=False)

    def _layer(self, *args: Any, **kwargs: Any) -> Any:
        x = self._checked(hidden_of(args, kwargs))
        self._calls.append("")
        return (x,) if self.gives_tuples else x

    def _owner(self, name: str) -> Any:
        def forward(*args: Any, **_kwargs: Any) -> Tensor:
            is_after = "" in self._calls
            self._calls.append(name)
            return self._checked(args[0]) if is_after else torch.zeros(self._shape)

        return forward

    def _checked(self, x: Tensor) -> Tensor:
        if "" in self._calls and x.shape != self._shape:
            raise _TakesFirstError
        return x


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among the arguments of a layer."""
    x: Tensor = args[0] if args else kwargs["hidden_states"]
    return x


def set_forward(module: nn.Module, forward: Any) -> None:
    """Replace the forward of one module; the rest of it, which a model's own forward may look at, stays."""
    module.forward = forward


def empty(module: nn.Module) -> None:
    """Take away all parameters and buffers of a module, and the modules below it."""
    module._modules.clear()  # noqa: SLF001
    for held in (module._parameters, module._buffers):  # noqa: SLF001
        held.update(dict.fromkeys(held))  # code may ask whether they are None


def unset(like: Tensor) -> Tensor:
    """A tensor in host memory that shows whether anybody filled it."""
    value = float("nan") if like.is_floating_point() else 0
    return torch.full(like.shape, value, dtype=like.dtype, device="cpu")
