"""A model that transformers builds, as its published files have it. Which checkpoint it comes from is left to `export_hf.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hetrun.model import ModelSpec
from hetrun.runtime.hf_model import build_on_meta, fill_buffers, outline
from hetrun.runtime.hf_names import published
from hetrun.runtime.hf_weights import open_weights


class Published:
    """Names, constants and config of the files of a model."""

    def __init__(self, model: ModelSpec) -> None:
        """Build the model without values.

        Raises:
            PreflightError: transformers is missing or too old.
            ConfigError: it cannot build the config.
        """
        self._outline = outline(model)
        self._built = build_on_meta(model)
        keys: dict[str, Any] = json.loads(model.config or "{}")
        self._kind = keys["model_type"]
        self.config = {"architectures": [type(self._built).__name__], **keys}
        self.names = {self._outline.full_name(name): name for name in self._outline.parameters}

    def tensors(self, parameters: Mapping[str, Tensor], weights: str | None) -> dict[str, Tensor]:
        """Turn parameters under their names in the class into tensors of files: experts one by one, and what no gradient changes.

        Such constants are those of the folder that training began from.

        Raises:
            ConfigError: the folder does not hold this model.
            StorageError: it is not here.
        """
        values = {**parameters, **self._constants(weights)}
        return {
            part.name: value[part.index].contiguous() if part.index else value
            for name, value in values.items()
            for part in published(name, value.shape, self._kind)
        }

    def _constants(self, weights: str | None) -> dict[str, Tensor]:
        shapes = self._outline.constants
        if not shapes:
            return {}
        if weights is not None:
            folder = open_weights(Path(weights), self._outline, self._kind)
            return {name: folder.read(name, shape) for name, shape in shapes.items()}
        fill_buffers(self._built)
        return {name: self._built.get_buffer(name) for name in shapes}
