import json
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from hetrun import arch, store
from hetrun.arch.families import FAMILIES
from hetrun.errors import ConfigError
from hetrun.model import (
    CheckpointSpec,
    DataKind,
    DataSpec,
    Dtype,
    LaunchSpec,
    ModelSpec,
    Pins,
    PlanLimits,
    Recipe,
    Role,
    TrainSpec,
)
from hetrun.recipe import load_recipe
from hetrun.runtime.job import decode

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
        (MODEL + TRAIN + "data: {seq_len: 8, kind: text}\n", "path None with kind text"),
        (
            MODEL.replace("257", "255") + DATA + TRAIN,
            "model.vocab_size: 255, need at least 256 for byte tokens",
        ),
        (MODEL + DATA + TRAIN + "name: a b\n", "recipe 'a b'"),
        (
            MODEL + DATA + TRAIN + "plan: {memory_fraction: 2}\n",
            "tiny.yaml: plan: memory_fraction 2.0",
        ),
        (
            MODEL + DATA + TRAIN + "launch: {on_lost_host: replan}\n",
            "on_lost_host replan without checkpoint",
        ),
        (
            MODEL + DATA + TRAIN + "launch: {on_lost_host: replan, max_restarts: 0}\n",
            "on_lost_host replan with max_restarts 0",
        ),
        ("model: [1]\n" + DATA + TRAIN, "model: need a mapping with keys num_layers"),
    ],
)
def test_wrong_key_is_named(write: Write, text: str, says: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert caught.value.message.startswith(str(path))
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("checkpoint", "says"),
    [
        ("{every_steps: 5}", "checkpoint.dir"),
        ("{dir: /ckpt}", "checkpoint.every_steps"),
        ("{dir: ckpt, every_steps: 5}", "checkpoint: dir 'ckpt', need an absolute path"),
        ("{dir: /ckpt, every_steps: 0}", "checkpoint: every_steps 0"),
        ("{dir: /ckpt, every_steps: 5, keep: 0}", "checkpoint: keep 0"),
        ("{dir: /ckpt, every_steps: 5, resume: newest}", "checkpoint: resume 'newest', need auto"),
        ("{dir: /ckpt, every_steps: 5, shard: true}", "checkpoint.shard"),
    ],
)
def test_wrong_checkpoint_is_named(write: Write, checkpoint: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(f"{MODEL}{DATA}{TRAIN}checkpoint: {checkpoint}\n"))
    assert says in caught.value.message


def test_nothing_is_saved_unless_the_recipe_says_so(write: Write) -> None:
    assert load_recipe(write(MODEL + DATA + TRAIN)).checkpoint is None


def test_missing_recipe_has_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file") as caught:
        load_recipe(tmp_path / "none.yaml")
    assert "tiny-llama" in (caught.value.hint or "")


CONFIG = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 2,
    "n_positions": 16,
    "vocab_size": 300,
}


def write_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def test_model_may_be_a_config_beside_the_recipe(write: Write, tmp_path: Path) -> None:
    write_config(tmp_path)
    model = load_recipe(write("model: config.json\n" + DATA + TRAIN)).model
    assert (model.family, model.num_layers, model.hidden_size) == ("gpt2", 3, 32)
    assert arch.total_parameters(model) == (300 + 16) * 32 + 3 * (12 * 32 * 32 + 13 * 32) + 2 * 32


def test_model_may_be_the_folder_of_a_config(write: Write, tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    write_config(tmp_path / "gpt2")
    by_folder = load_recipe(write("model: gpt2\n" + DATA + TRAIN)).model
    by_key = load_recipe(write("model: {config: gpt2/config.json}\n" + DATA + TRAIN)).model
    assert by_folder == by_key
    assert json.loads(by_folder.config or "")["model_type"] == "gpt2"


def test_transformers_may_be_asked_for_a_llama_shaped_model(write: Write, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "vocab_size": 300,
        "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = load_recipe(write("model: {config: config.json}\n" + DATA + TRAIN)).model
    theirs = load_recipe(
        write("model: {config: config.json, transformers: true}\n" + DATA + TRAIN)
    ).model
    assert ours.config is None
    assert theirs.config is not None


def test_wrong_key_beside_a_config_is_named(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"model\.tranformers: .*did you mean transformers"):
        load_recipe(write("model: {config: c.json, tranformers: true}\n" + DATA + TRAIN))


def test_weights_are_a_folder_of_every_host(write: Write) -> None:
    recipe = load_recipe(write(MODEL + DATA + TRAIN + "weights: /data/qwen\n"))
    assert recipe.weights == "/data/qwen"
    with pytest.raises(ConfigError, match=r"weights: .*need an absolute path"):
        load_recipe(write(MODEL + DATA + TRAIN + "weights: data/qwen\n"))


def test_llama_config_is_the_model_that_its_sizes_say(write: Write, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 257,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "config.json").write_text(json.dumps(config))
    by_config = load_recipe(write("model: sub/config.json\n" + DATA + TRAIN)).model
    by_sizes = load_recipe(
        write(MODEL.replace("vocab", "num_kv_heads: 2, vocab") + DATA + TRAIN)
    ).model
    assert by_config == by_sizes


def test_counted_model_survives_a_file_and_the_workers_reader(write: Write, tmp_path: Path) -> None:
    write_config(tmp_path)
    model = load_recipe(write("model: config.json\n" + DATA + TRAIN)).model
    store.save(model, tmp_path / "model.json")
    assert store.load(ModelSpec, tmp_path / "model.json") == model
    text = (tmp_path / "model.json").read_text()
    assert decode(ModelSpec, json.loads(text), where="model") == model


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "config.json: no such file"),
        ("{", "config.json: not JSON"),
        ("[]", "config.json: holds no JSON object"),
        (json.dumps({**CONFIG, "model_type": "gpt3"}), "nearest is gpt2"),
        (json.dumps({**CONFIG, "n_embd": None}), "config.json: n_embd: is missing"),
    ],
)
def test_wrong_config_is_named(
    write: Write, tmp_path: Path, content: str | None, says: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=says):
        load_recipe(write("model: config.json\n" + DATA + TRAIN))


def test_rows_longer_than_learned_positions_are_refused(write: Write, tmp_path: Path) -> None:
    write_config(tmp_path)
    long = DATA.replace("8", "17")
    with pytest.raises(ConfigError, match=r"data\.seq_len: 17, the model's config has 16"):
        load_recipe(write("model: config.json\n" + long + TRAIN))


def test_counts_by_hand_are_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"model\.family: is counted from a config"):
        load_recipe(write(MODEL.replace("}", ", family: gpt2}") + DATA + TRAIN))


DOC = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL)


def test_documented_recipe_loads(write: Write) -> None:
    recipe = load_recipe(write(BLOCKS[0]))
    assert (recipe.name, recipe.plan.max_shapes, recipe.train.microbatch_rows) == (
        "my-run",
        2,
        (1, 2),
    )


def test_documented_defaults_are_the_defaults(write: Write) -> None:
    """Keys that the document calls defaults by showing them; those it shows filled in are named here."""
    filled = {"microbatch_rows", "dtype", "max_stages", "max_shapes", "env", "secrets"}
    shown = load_recipe(write(BLOCKS[0]))
    for part in (shown.train, shown.plan, shown.launch, shown.data):
        for key in fields(part):
            if key.default is not MISSING and key.name not in filled:
                assert getattr(part, key.name) == key.default, key.name


@pytest.mark.parametrize(
    "part",
    [Recipe, ModelSpec, DataSpec, TrainSpec, PlanLimits, LaunchSpec, CheckpointSpec, Pins],
)
def test_every_key_is_documented(part: Any) -> None:
    told = "\n".join(BLOCKS)
    keys = {key.name for key in fields(part)} - {
        "counts",
        "family",
        "config",
    }  # read from a config.json
    assert {key for key in keys if not re.search(rf"(?m)^ *{key}:", told)} == set()


def test_every_family_is_documented() -> None:
    (line,) = re.findall(r"Families: (.*?)\.\n", DOC, re.DOTALL)
    assert sorted(re.findall(r"`(\w+)`", line)) == sorted(FAMILIES)


def test_documented_pins_are_read(write: Write) -> None:
    (block,) = (text for text in BLOCKS if "pins:" in text)
    pins = load_recipe(write(MODEL + DATA + TRAIN + block)).plan.pins
    assert pins is not None
    assert (pins.layers, pins.roles) == ((20, 12), {"vendor-b": Role.LAST})
