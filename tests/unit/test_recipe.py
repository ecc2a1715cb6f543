from collections.abc import Callable
from pathlib import Path

import pytest

from hetrun.errors import ConfigError
from hetrun.model import DataKind, Dtype
from hetrun.recipe import load_recipe

MODEL = "model: {num_layers: 2, hidden_size: 16, num_heads: 2, ffn_size: 32, vocab_size: 257}\n"
DATA = "data: {seq_len: 8}\n"
TRAIN = "train: {steps: 3, global_batch_rows: 4}\n"


Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "tiny.yaml"
        path.write_text(text)
        return path

    return write_file


def test_what_is_left_out_has_its_default(write: Write) -> None:
    recipe = load_recipe(write(MODEL + DATA + TRAIN))
    assert recipe.name == "tiny"
    assert recipe.data.kind is DataKind.STDLIB_SOURCE
    assert (recipe.train.dtype, recipe.train.microbatch_rows) == (Dtype.FP32, (1,))
    assert recipe.train.clip_norm == 1.0


def test_numbers_lists_and_switches_are_typed(write: Write) -> None:
    recipe = load_recipe(
        write(
            "name: other\n"
            "model: {num_layers: 2, hidden_size: 16, num_heads: 2, ffn_size: 32, vocab_size: 300, tied_embeddings: on}\n"
            "data: {seq_len: 8, kind: text, path: /data}\n"
            "train: {steps: 3, global_batch_rows: 8, microbatch_rows: [1, 2], learning_rate: 3e-3, clip_norm: null}\n"
            "launch: {env: {A: 022}, secrets: [TOKEN]}\n"
        )
    )
    assert recipe.name == "other"
    assert recipe.model.tied_embeddings is True
    assert (recipe.train.microbatch_rows, recipe.train.learning_rate) == ((1, 2), 0.003)
    assert recipe.train.clip_norm is None
    assert (recipe.launch.env, recipe.launch.secrets) == ({"A": "022"}, ("TOKEN",))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (DATA + TRAIN, "model: is missing"),
        (MODEL + DATA + "train: {step: 3, global_batch_rows: 4}\n", "did you mean steps?"),
        (MODEL + TRAIN + "data: {seq_len: 8, kind: text}\n", "kind text needs a path"),
        (
            MODEL.replace("257", "255") + DATA + TRAIN,
            "model.vocab_size: 255, need at least 256 for byte tokens",
        ),
        (MODEL + DATA + TRAIN + "name: a b\n", "recipe 'a b'"),
        (MODEL + DATA + TRAIN + "plan: {memory_fraction: 2}\n", "plan: plan: memory_fraction 2.0"),
        ("model: [1]\n" + DATA + TRAIN, "model: need a mapping with keys num_layers"),
    ],
)
def test_wrong_key_is_named(write: Write, text: str, says: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert caught.value.message.startswith(str(path))
    assert says in caught.value.message


def test_missing_recipe_has_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file") as caught:
        load_recipe(tmp_path / "none.yaml")
    assert "tiny-llama" in (caught.value.hint or "")
