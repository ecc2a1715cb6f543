"""Reads the first values of parameters from a folder of safetensors files, only those that a stage holds.

The files are those that Hugging Face publishes, read with our own reader: nothing in them is run. Which parameters there
are is told by the caller.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hetrun.errors import ConfigError, StorageError
from hetrun.runtime.checkpoint_files import Piece, read_shard
from hetrun.runtime.hf_model import Outline
from hetrun.runtime.hf_names import (
    Part,
    Style,
    in_class,
    is_ignored,
    llama_names,
    published,
    style_of,
)
from hetrun.runtime.hf_stage import HfStage
from hetrun.runtime.job import read_json
from hetrun.runtime.network import FirstValues, Stage

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """All tensors of a model, of other stages too, by their names in its class."""

    kind: str  # model_type
    shapes: Mapping[str, Sequence[int]]
    tied: tuple[str, ...] = ()  # further names of tensors that stand under another one
    ignored: tuple[str, ...] = ()  # patterns of what else may be in the files


def first_values(stage: Stage, weights: str | None) -> FirstValues | None:
    """What to initialise a stage with: reads from a folder on this host when it is asked; None where there is none.

    Raises:
        ConfigError: the folder does not hold all of the model, or more than it.
        StorageError: a file cannot be read.
    """
    if weights is None:
        return None
    folder = Path(weights)
    if isinstance(stage, HfStage):
        kind = json.loads(stage.model.config or "{}")["model_type"]
        theirs = open_weights(folder, stage.outline, kind)
        return lambda name, shape: theirs.read(in_class(name), shape)
    names = llama_names(stage.model)
    tied = ("lm_head.weight",) if stage.model.tied_embeddings else ()
    wanted = Wanted(kind="llama", shapes=dict.fromkeys(names.values(), ()), tied=tied)
    ours = Weights(folder, wanted)
    return lambda name, shape: ours.read(names[name], shape)


def open_weights(folder: Path, outline: Outline, kind: str) -> Weights:
    """Open the folder of a model that transformers builds, `kind` its model_type.

    Raises:
        ConfigError: the folder does not hold all of the model, or more than it.
        StorageError: a file cannot be read.
    """
    wanted = Wanted(
        kind=kind,
        shapes={**outline.parameters, **outline.constants},
        tied=outline.tied,
        ignored=outline.ignored,
    )
    return Weights(folder, wanted)


class Weights:
    """An open folder."""

    def __init__(self, folder: Path, wanted: Wanted) -> None:
        """Read what the files say they hold, and compare it with what the model has.

        Raises:
            ConfigError: no safetensors there; tensors are missing, or there are more than the model has.
            StorageError: a file cannot be read.
        """
        self._folder = folder
        self._kind = wanted.kind
        self._pieces = _pieces(folder)
        parts = {name: published(name, shape, wanted.kind) for name, shape in wanted.shapes.items()}
        self._style = self._find_style(parts)
        self._check_missing(parts)
        self._check_extra(parts, wanted)

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """One tensor by its name in the model's class, in the format of the file.

        Raises:
            ConfigError: the file has another shape, or quantised numbers.
        """
        whole: Tensor | None = None
        for part in self._parts(name, published(name, shape, self._kind)):
            value = self._pieces[part.name].read()
            if not part.index:
                _check(self._folder, part.name, value, tuple(shape))
                return value
            if whole is None:
                whole = torch.empty(tuple(shape), dtype=value.dtype)
            place = whole[part.index]
            _check(self._folder, part.name, value, tuple(place.shape))
            place.copy_(value)
        if whole is None:
            raise ValueError(f"{name} has no parts")
        return whole

    def _parts(self, name: str, parts: Sequence[Part]) -> list[Part]:
        """What to read: the tensor itself where a file has it under the name of the class."""
        if self._style(name) in self._pieces:
            return [Part(self._style(name))]
        return [Part(self._style(part.name), part.index) for part in parts]

    def _find_style(self, parts: Mapping[str, Sequence[Part]]) -> Style:
        names = [part.name for several in parts.values() for part in several]
        style = style_of(self._pieces, [*parts, *names])
        if style is None:
            there = ", ".join(sorted(self._pieces)[:_SHOWN])
            raise ConfigError(
                f"weights: {self._folder} has none of this model's tensors, such as {names[0]}; it has {there}",
                hint="are these the weights of the model that the recipe names?",
            )
        return style

    def _check_missing(self, parts: Mapping[str, Sequence[Part]]) -> None:
        missing = [
            part.name
            for name, several in parts.items()
            for part in self._parts(name, several)
            if part.name not in self._pieces
        ]
        if missing:
            raise ConfigError(
                f"weights: {self._folder} lacks {_short(missing)}",
                hint="are these the weights of the model that the recipe names? Is every shard there?",
            )

    def _check_extra(self, parts: Mapping[str, Sequence[Part]], wanted: Wanted) -> None:
        known = {
            part.name for name, several in parts.items() for part in self._parts(name, several)
        }
        tied = {
            self._style(part.name) for name in wanted.tied for part in published(name, (), wanted.kind)
        } | {self._style(name) for name in wanted.tied}  # fmt: skip
        extra = [
            name
            for name in sorted(self._pieces.keys() - known - tied)
            if not is_ignored(name, self._style)
            and not any(re.search(pattern, name) for pattern in wanted.ignored)
        ]
        if extra:
            raise ConfigError(
                f"weights: {self._folder} has {_short(extra)}, which the model has not",
                hint="does the config belong to these weights? Quantised weights cannot be trained",
            )


def _pieces(folder: Path) -> dict[str, Piece]:
    """Where every tensor of the folder lies."""
    pieces: dict[str, Piece] = {}
    for path in _files(folder):
        for piece in read_shard(path):
            if piece.name in pieces:
                raise ConfigError(
                    f"weights: {piece.name} is in {path} and {pieces[piece.name].path}"
                )
            pieces[piece.name] = piece
    return pieces


def _files(folder: Path) -> list[Path]:
    """The files that the index names; the single one, where there is none."""
    index = folder / INDEX
    if index.is_file():
        data = read_json(index)
        names = data.get("weight_map") if isinstance(data, dict) else None
        files = list(names.values()) if isinstance(names, dict) else []
        wrong = [name for name in files if not isinstance(name, str) or not _FILE.fullmatch(name)]
        if not files or wrong:
            raise ConfigError(
                f"{index}: {'file ' + repr(wrong[0]) if wrong else 'no weight_map'}, need names of"
                " safetensors files beside it"
            )
        return [folder / name for name in sorted(set(files))]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not folder.is_dir():
        raise StorageError(
            f"weights: no folder {folder} on this host", hint="copy it to every host of the plan"
        )
    raise ConfigError(
        f"weights: {folder} has neither {INDEX} nor {SINGLE}",
        hint="other formats are not read here, least of all pickles (.bin): save it as safetensors",
    )


def _check(folder: Path, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if not value.is_floating_point() or value.element_size() < 2:
        raise ConfigError(
            f"weights: {folder} has {name} as {value.dtype}, need numbers with 16 bits or more",
            hint="quantised weights cannot be trained: take those that they were made of",
        )
    if tuple(value.shape) != shape:
        raise ConfigError(
            f"weights: {folder} has {name} as {tuple(value.shape)}, the model as {shape}",
            hint="does the config belong to these weights?",
        )


def _short(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
