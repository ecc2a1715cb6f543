"""recipes/*.yaml -> Recipe. Whether a recipe fits the devices at hand is decided by `planner/`."""

from __future__ import annotations

from pathlib import Path

from hetrun.model import Recipe
from hetrun.strictyaml import BadKeysError, config_error, read_yaml, to_noun

_HINT = "recipes/tiny-llama.yaml shows the keys"
NUM_BYTE_TOKENS = 256  # text is cut into bytes, whatever its kind


def load_recipe(path: Path) -> Recipe:
    """Return what a recipe file says; its name is the file's unless it says another.

    Raises:
        ConfigError: the file is missing or wrong; lists every wrong key with its path.
    """
    content = read_yaml(path, hint=_HINT)
    if content.get("name") is None:
        content["name"] = path.stem
    try:
        recipe = to_noun(Recipe, content)
    except BadKeysError as error:
        raise config_error(path, error.problems, hint=_HINT) from error
    if recipe.model.vocab_size < NUM_BYTE_TOKENS:
        what = f"{recipe.model.vocab_size}, need at least {NUM_BYTE_TOKENS} for byte tokens"
        raise config_error(path, [(("model", "vocab_size"), what)], hint=_HINT)
    return recipe
