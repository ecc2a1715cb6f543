"""Weights that transformers saved are those that training begins from, and an exported checkpoint is a model for transformers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetrun.errors import ConfigError, HetrunError, StorageError
from hetrun.model import Dtype, ModelSpec
from hetrun.runtime.checkpoint_files import read_shard, write_shard
from hetrun.runtime.export_hf import export
from hetrun.runtime.hf_names import in_class, published
from hetrun.runtime.hf_stage import build_stage
from hetrun.runtime.hf_weights import INDEX, SINGLE, first_values
from hetrun.runtime.network import Stage
from tests.unit import checkpoint_lab
from tests.unit.checkpoint_lab import an_index, tensors_of, write_folder
from tests.unit.hf_lab import (
    NUM_LAYERS,
    SEQ_LEN,
    keys_of,
    some_tokens,
    stage_plan,
    tiny,
    uncut,
    whole,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are too small to share their work out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stage_from(model: ModelSpec, layers: range, weights: Path) -> Stage:
    stage = build_stage(model, stage_plan(layers), seq_len=SEQ_LEN)
    values = first_values(stage, str(weights))
    return stage.initialise(seed=3, device=CPU, dtype=torch.float64, weights=values)


def random_one(kind: str) -> Any:
    """A model of the library with values of its own, constants too."""
    built = uncut(tiny(kind), [whole(tiny(kind))], torch.float32)
    generator = torch.Generator().manual_seed(11)
    constants = [b for n, b in built.named_buffers() if n in built.state_dict()]
    for value in [*built.parameters(), *constants]:
        value.data.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    return built


def rename(folder: Path, change: Any) -> None:
    """Write a folder's only file again under other names, or without some tensors."""
    tensors = {piece.name: piece.read() for piece in read_shard(folder / SINGLE)}
    kept = {change(name): value for name, value in tensors.items() if change(name)}
    write_shard(folder / SINGLE, kept, metadata={"format": "pt"})


def load(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        from transformers import AutoModelForCausalLM

        built, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True
        )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    built.set_experts_implementation("eager")
    return built.eval()


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize(
    "kind", ["bloom", "deepseek_v3", "gpt2", "gpt_neox", "mixtral", "qwen2", "qwen3_moe"]
)
def test_what_transformers_saved_is_read_by_the_stages_that_hold_it(
    kind: str, tmp_path: Path
) -> None:
    """Several shards with an index; experts one by one; constants that no gradient changes; tied matrices."""
    built = random_one(kind)
    built.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / INDEX).is_file()
    expected = dict(built.named_parameters())
    seen = set()
    for layers in (range(3), range(3, NUM_LAYERS)):
        stage = stage_from(tiny(kind), layers, tmp_path)
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, expected[in_class(name)].double()), name
            seen.add(in_class(name))
    assert seen == expected.keys()
    both = stage_from(tiny(kind), range(NUM_LAYERS), tmp_path)
    for parameter in built.parameters():
        parameter.data = parameter.data.double()
    tokens = some_tokens()
    assert torch.equal(both(tokens), built(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "prefix"),
    [("gpt2", ("transformer.", "")), ("gemma3_text", ("model.", "language_model.model."))],
    ids=["without its prefix", "in a picture-and-text model"],
)
def test_prefixes_of_files_may_differ(kind: str, prefix: tuple[str, str], tmp_path: Path) -> None:
    built = random_one(kind)
    built.save_pretrained(tmp_path)
    rename(tmp_path, lambda name: name.replace(*prefix, 1))
    tensors = {piece.name: piece.read() for piece in read_shard(tmp_path / SINGLE)}
    noise = "vision_tower.weight" if kind == "gemma3_text" else "h.0.attn.bias"
    write_shard(tmp_path / SINGLE, {**tensors, noise: torch.ones(2)})
    stage = stage_from(tiny(kind), range(3), tmp_path)
    expected = dict(built.named_parameters())
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, expected[in_class(name)].double()), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt2", "gpt_neox", "mixtral", "gemma2"])
def test_exported_checkpoint_is_a_model_for_transformers(kind: str, tmp_path: Path) -> None:
    """The checkpoint of a run that began from weights, so that constants come from there."""
    random_one(kind).save_pretrained(tmp_path / "weights")
    model = tiny(kind)
    stage = stage_from(model, range(NUM_LAYERS), tmp_path / "weights").to(torch.float32)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.mul_(1.5)  # trained
    index = an_index(model, Dtype.FP32, weights=str(tmp_path / "weights"))
    saved = write_folder(tmp_path / "step-6", tensors_of(stage), index)
    export([saved], tmp_path / "out")
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    names = {piece.name for piece in read_shard(tmp_path / "out" / SINGLE)}
    theirs = {piece.name for piece in read_shard(tmp_path / "weights" / SINGLE)}
    assert names == theirs  # as transformers publishes them
    built = load(tmp_path / "out")
    assert told["architectures"] == [type(built).__name__]
    tokens = some_tokens()
    with torch.no_grad():
        assert (built(tokens).logits - stage(tokens)).abs().max().item() < 1e-6


@pytest.mark.slow
def test_export_names_what_no_folder_has(tmp_path: Path) -> None:
    tensors = tensors_of(whole(tiny("gpt2")))
    low = {name: value for name, value in tensors.items() if not name.startswith("layer.2")}
    saved = write_folder(tmp_path / "step-6", low, an_index(tiny("gpt2")))
    with pytest.raises(HetrunError, match=r"layer\.2\.transformer\.h\.2\.ln_1\.weight and 11 more"):
        export([saved], tmp_path / "out")


def own_folder(tmp_path: Path, model: ModelSpec = checkpoint_lab.MODEL) -> tuple[Path, Stage]:
    """Files of a llama-shaped model, as our own export writes them."""
    stage = checkpoint_lab.whole_stage(model)
    saved = write_folder(tmp_path / "step-6", tensors_of(stage), an_index(model))
    export([saved], tmp_path / "hf")
    return tmp_path / "hf", stage


def ours_from(weights: Path, model: ModelSpec = checkpoint_lab.MODEL) -> Stage:
    plan = stage_plan(range(model.num_layers))
    stage = Stage(model, plan, seq_len=SEQ_LEN)
    stage.has_head = True
    return stage.initialise(
        seed=1, device=CPU, dtype=torch.float64, weights=first_values(stage, str(weights))
    )


def test_own_decoder_begins_from_published_names_too(tmp_path: Path) -> None:
    folder, stage = own_folder(tmp_path)
    values = dict(stage.named_parameters())
    found = dict(ours_from(folder).named_parameters())
    assert found.keys() <= values.keys()
    assert len(found) == 1 + 9 * 3
    for name, parameter in found.items():
        assert torch.equal(parameter, values[name]), name


def without(name: str) -> Any:
    return lambda other: "" if other == name else other


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("model.norm.weight"), r"lacks model\.norm\.weight$"),
        (lambda n: n.replace("layers.2", "layers.7"), r"lacks model\.layers\.2\..* and 6 more"),
        (lambda n: f"other.{n}", r"has none of this model's tensors, such as model\.embed"),
    ],
)
def test_missing_tensors_are_named(change: Any, says: str, tmp_path: Path) -> None:
    folder, _ = own_folder(tmp_path)
    rename(folder, change)
    with pytest.raises(ConfigError, match=says):
        ours_from(folder)


def test_tensors_that_the_model_has_not_are_named(tmp_path: Path) -> None:
    folder, _ = own_folder(tmp_path)
    tensors = {piece.name: piece.read() for piece in read_shard(folder / SINGLE)}
    more = {f"model.layers.{n}.mlp.up_proj.weight": torch.ones(48, 32) for n in range(3, 8)}
    frequencies = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.attention.bias": torch.ones(2, 2, dtype=torch.bool),
    }
    write_shard(folder / SINGLE, {**tensors, **frequencies})
    ours_from(folder)  # older files have those
    write_shard(folder / SINGLE, {**tensors, **more})
    with pytest.raises(ConfigError, match=r"has model\.layers\.3\.mlp.* and 2 more, which the"):
        ours_from(folder)


def test_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    folder, _ = own_folder(tmp_path)
    tensors = {piece.name: piece.read() for piece in read_shard(folder / SINGLE)}
    name = "model.layers.1.self_attn.k_proj.weight"
    write_shard(folder / SINGLE, {**tensors, name: torch.ones(32, 32)})
    with pytest.raises(
        ConfigError, match=r"1\.self_attn\.k_proj\.weight as \(32, 32\), .*\(16, 32\)"
    ):
        ours_from(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_numbers_are_not_taken_for_others(dtype: torch.dtype, tmp_path: Path) -> None:
    folder, _ = own_folder(tmp_path)
    tensors = {piece.name: piece.read() for piece in read_shard(folder / SINGLE)}
    name = "model.layers.1.self_attn.k_proj.weight"
    write_shard(folder / SINGLE, {**tensors, name: torch.ones(16, 32).to(dtype)})
    with pytest.raises(ConfigError, match=r"1\.self_attn\.k_proj\.weight as torch\..*8") as caught:
        ours_from(folder)
    assert "quantised" in (caught.value.hint or "")


def test_a_shard_that_its_index_names_and_nobody_has_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(StorageError, match=r"cannot read .*model-1\.safetensors"):
        ours_from(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        {},
        [],
        {"weight_map": []},
        {"weight_map": {"a": "../x.safetensors"}},
        {"weight_map": {"a": 3}},
    ],
)
def test_index_that_leads_elsewhere_is_refused(index: object, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="need names of safetensors files beside it"):
        ours_from(tmp_path)


def test_no_folder_and_no_safetensors_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no folder"):
        ours_from(tmp_path / "none")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="has neither") as caught:
        ours_from(tmp_path)
    assert "pickles" in (caught.value.hint or "")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        write_shard(tmp_path / f"m-{number}.safetensors", {"a": torch.ones(2)})
    files = {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ConfigError, match=r"a is in .*m-2.* and .*m-1"):
        ours_from(tmp_path)


def test_experts_stand_one_by_one_in_files() -> None:
    def names(kind: str, name: str, shape: tuple[int, ...]) -> list[str]:
        return [part.name for part in published(name, shape, kind)]

    up = "model.layers.1.mlp.experts.gate_up_proj"
    assert names("mixtral", up, (2, 8, 4)) == [
        f"model.layers.1.block_sparse_moe.experts.{e}.{w}.weight"
        for e in (0, 1)
        for w in ("w1", "w3")
    ]
    assert names("qwen3_moe", up.replace("gate_up", "down"), (2, 4, 4)) == [
        f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in (0, 1)
    ]
    whole_one = torch.arange(2 * 8 * 4).reshape(2, 8, 4)
    parts: list[Tensor] = [whole_one[part.index] for part in published(up, (2, 8, 4), "mixtral")]
    assert torch.equal(torch.cat(parts).reshape(2, 8, 4), whole_one)
    assert names("gpt_neox", "lm_head.weight", (3, 3)) == ["embed_out.weight"]
    assert names("llama", "lm_head.weight", (3, 3)) == ["lm_head.weight"]


def test_config_of_a_tiny_model_says_its_family() -> None:
    assert json.loads(tiny("opt").config or "")["model_type"] == keys_of("opt")["model_type"]
