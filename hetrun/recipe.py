"""recipes/*.yaml -> Recipe. Whether a recipe fits the devices at hand is decided by `planner/`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetrun.arch.hf import BadConfigError, from_config, learned_positions
from hetrun.errors import ConfigError
from hetrun.model import Noun, Pins, Recipe
from hetrun.strictyaml import BadKeysError, config_error, read_text, read_yaml, to_noun

_HINT = "recipes/tiny-llama.yaml shows the keys, docs/recipes.md explains them"
NUM_BYTE_TOKENS = 256  # where no tokenizer is named
_MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChoice(Noun):
    """`model` of a recipe that names a config instead of sizes."""

    config: str  # path of a config.json or of its folder, relative to the recipe's
    transformers: bool = (
        False  # also for a llama-shaped one, which hetrun's own decoder trains otherwise
    )


def load_recipe(path: Path) -> Recipe:
    """Return what a recipe file says; its name is the file's unless it says another.

    `model` is a mapping of sizes, or names a Hugging Face config.json or its folder: a path, or a mapping with `config`.

    Raises:
        ConfigError: the file, or the config that it names, is missing or wrong; lists every wrong key with its path.
    """
    content = read_yaml(path, hint=_HINT)
    if content.get("name") is None:
        content["name"] = path.stem
    positions = None
    choice = _config_choice(path, content.get("model"))
    if choice is not None:
        content["model"], positions = _read_config(path.parent, choice)
    elif isinstance(content.get("model"), dict):
        _refuse_counts(path, content["model"])
    try:
        recipe = to_noun(Recipe, content)
    except BadKeysError as error:
        raise config_error(path, error.problems, hint=_HINT) from error
    if recipe.data.is_bytes and recipe.model.vocab_size < NUM_BYTE_TOKENS:
        what = f"{recipe.model.vocab_size}, need at least {NUM_BYTE_TOKENS} for byte tokens"
        raise config_error(path, [(("model", "vocab_size"), what)], hint=_HINT)
    if positions is not None and recipe.data.seq_len > positions:
        what = f"{recipe.data.seq_len}, the model's config has {positions} positions"
        raise config_error(path, [(("data", "seq_len"), what)], hint=_HINT)
    return recipe


def load_pins(path: Path) -> Pins:
    """Return what a file of pins says; the keys are those of `plan.pins` in a recipe.

    Raises:
        ConfigError: the file is missing or wrong; lists every wrong key with its path.
    """
    hint = "docs/recipes.md shows the pins: layers, order, roles, rows, tp, lanes"
    try:
        return to_noun(Pins, read_yaml(path, hint=hint))
    except BadKeysError as error:
        raise config_error(path, error.problems, hint=hint) from error


def _config_choice(path: Path, model: object) -> ConfigChoice | None:
    """Return which config `model` names; None where it has sizes."""
    if isinstance(model, str):
        return ConfigChoice(config=model)
    if not isinstance(model, dict) or "config" not in model:
        return None
    try:
        return to_noun(ConfigChoice, model)
    except BadKeysError as error:
        problems = [(("model", *keys), what) for keys, what in error.problems]
        raise config_error(path, problems, hint=_HINT) from error


def _read_config(folder: Path, choice: ConfigChoice) -> tuple[dict[str, Any], int | None]:
    """Return the model that a config.json describes, as a mapping, and how many positions it learns (None: any)."""
    hint = "model: takes a mapping of sizes, or the path of a Hugging Face config.json"
    path = folder / Path(choice.config).expanduser()
    if path.is_dir():
        path /= "config.json"
    text = read_text(path, max_bytes=_MAX_CONFIG_BYTES, hint=hint)
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}", hint=hint) from error
    if not isinstance(keys, Mapping):
        raise ConfigError(f"{path}: holds no JSON object", hint=hint)
    try:
        return asdict(from_config(keys, transformers=choice.transformers)), learned_positions(keys)
    except BadConfigError as error:
        raise ConfigError(f"{path}: {error}", hint="docs/recipes.md lists the families") from error


def _refuse_counts(path: Path, model: dict[str, Any]) -> None:
    """Counts come from a config, never from a hand: a wrong one would plan a model that nobody has."""
    wrong = [key for key in ("counts", "family") if key in model]
    if wrong:
        what = "is counted from a config.json: write model: PATH instead"
        raise config_error(path, [(("model", key), what) for key in wrong], hint=_HINT)
