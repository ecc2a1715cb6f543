"""Reads single keys of a Hugging Face config with their types and defaults. What they mean is left to `families.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from sys import float_info
from typing import Any

MOST = 10**9  # no size in a config is larger; keeps products sane
MOST_LAYERS = 10_000


class BadConfigError(ValueError):
    """A config lacks a key, or holds something else than a size there."""


@dataclass(frozen=True, slots=True)
class Config:
    """The keys of one config; `kind` is its model_type."""

    kind: str
    keys: Mapping[str, Any]

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the first of these keys that is there, a whole number of at least 1.

        Raises:
            BadConfigError: none is there and there is no default, or it is no such number.
        """
        for name in names:
            value = self.keys.get(name)
            if value is not None:
                return _whole(name, value, least=1)
        if default is None:
            raise BadConfigError(f"{names[0]}: is missing in this {self.kind} config")
        return default

    def count(self, name: str, *, default: int = 0) -> int:
        """Return a whole number of at least 0."""
        value = self.keys.get(name)
        return default if value is None else _whole(name, value, least=0)

    def switch(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self.keys.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadConfigError(f"{name}: need true or false, got {value!r}")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers; empty where the key is not there."""
        value = self.keys.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise BadConfigError(f"{name}: need a list, got {value!r}")
        return tuple(_whole(name, item, least=0) for item in value)

    def real(self, name: str, *, default: float) -> float:
        """Return a finite number above 0."""
        value = self.keys.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadConfigError(f"{name}: need a number, got {value!r}")
        if not 0 < value <= float_info.max:
            raise BadConfigError(f"{name}: need a finite number above 0, got {value!r:.40}")
        return float(value)

    def has(self, name: str) -> bool:
        """Whether a key is there and says something."""
        return self.keys.get(name) is not None

    @property
    def rope(self) -> Mapping[str, Any]:
        """What newer configs say of rotary positions in one place."""
        inner = self.keys.get("rope_parameters")
        return inner if isinstance(inner, Mapping) else {}

    @property
    def plain_rope(self) -> bool:
        """Whether rotary positions are those of the first Llama, whatever their base."""
        return bool(self.rope.get("rope_type", "default") == "default")

    @property
    def rope_theta(self) -> float:
        """Base of rotary positions, 10000 where the config says none."""
        inner = (
            Config(self.kind, self.rope).real("rope_theta", default=10000.0)
            if self.rope
            else 10000.0
        )
        return self.real("rope_theta", default=inner)

    def word(self, name: str, default: str = "") -> str:
        """Return text."""
        value = self.keys.get(name)
        return default if value is None else str(value)


def _whole(name: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise BadConfigError(f"{name}: need a whole number of at least {least}, got {value!r}")
    return value
