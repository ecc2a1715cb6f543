"""What a recipe says of its data fits together, or the wrong key is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrun.errors import ConfigError
from hetrun.model import DataKind
from hetrun.recipe import load_recipe

MODEL = "model: {num_layers: 2, hidden_size: 8, num_heads: 2, ffn_size: 8, vocab_size: %d}\n"
TRAIN = "train: {steps: 3, global_batch_rows: 4%s}\n"


def _load(folder: Path, data: str, *, vocab_size: int = 300, train: str = "") -> object:
    path = folder / "r.yaml"
    path.write_text(f"{MODEL % vocab_size}{TRAIN % train}data: {{seq_len: 8{data}}}\n")
    return load_recipe(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (", kind: jsonl, path: /d", "data: field None with kind jsonl"),
        (", kind: text, path: /d, field: text", "data: field 'text' with kind text"),
        (", kind: tokens", "data: path None with kind tokens"),
        (", path: /d", "data: path '/d' with kind stdlib_source"),
        (", kind: text, path: d", "data: path 'd', need an absolute path"),
        (", kind: text, path: /d, token_dtype: uint16", "data: token_dtype with kind text"),
        (", kind: tokens, path: /d, token_dtype: int8", "data.token_dtype: "),
        (", kind: tokens, path: /d, tokenizer: /t.json", "data: tokenizer with kind tokens"),
        (", kind: text, path: /d, tokenizer: t.json", "data: tokenizer 't.json', need the abs"),
        (", kind: text, path: /d, tokenizer: /t.bin", "data: tokenizer '/t.bin', need the abs"),
        (", kind: text, path: /d, tokenizer: /t.json", "data: end_token is missing"),
        (", kind: text, path: /d, end_token: x", "data: end_token 'x' without a tokenizer"),
        (", held_out_rows: -1", "data: held_out_rows -1"),
        (", kind: csv", "data.kind: "),
    ],
)
def test_a_contradiction_is_named(data: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, data)
    assert says in str(caught.value)


def test_a_model_that_cannot_hold_bytes_is_fine_with_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size: 99, need at least 256 for byte"):
        _load(tmp_path, ", kind: text, path: /d", vocab_size=99)
    _load(tmp_path, ", kind: text, path: /d, tokenizer: /t.model", vocab_size=99)
    _load(tmp_path, ", kind: tokens, path: /d", vocab_size=99)


def test_evaluation_needs_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval_every 2 without data\.held_out_rows"):
        _load(tmp_path, "", train=", eval_every: 2")
    with pytest.raises(ConfigError, match="eval_every 0, need at least 1"):
        _load(tmp_path, ", held_out_rows: 3", train=", eval_every: 0")
    _load(tmp_path, ", held_out_rows: 3", train=", eval_every: 2")


def test_shipped_example_of_own_text_says_what_it_means() -> None:
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "own-text.yaml")
    assert recipe.data.kind is DataKind.JSONL
    assert recipe.train.eval_every is not None
