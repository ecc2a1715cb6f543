"""An exported folder is a model for transformers, with the logits that were trained."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetrun.model import Dtype, ModelSpec
from hetrun.runtime.checkpoint_files import BadCheckpointError
from hetrun.runtime.export_hf import export, main
from hetrun.runtime.hf_names import llama_names
from tests.unit.checkpoint_lab import (
    MODEL,
    SEQ_LEN,
    an_index,
    tensors_of,
    whole_stage,
    write_folder,
)

TIED = replace(MODEL, tied_embeddings=True)


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize(
    ("model", "dtype"),
    [(MODEL, Dtype.FP32), (TIED, Dtype.FP32), (MODEL, Dtype.FP64), (MODEL, Dtype.BF16_MIXED)],
    ids=["fp32", "tied", "fp64", "bf16-mixed"],
)
def test_transformers_computes_our_logits(
    model: ModelSpec,
    dtype: Dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stage = whole_stage(model, dtype)
    saved = write_folder(tmp_path / "step-6", tensors_of(stage), an_index(model, dtype))
    export([saved], tmp_path / "hf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        from transformers import AutoModelForCausalLM

        theirs, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf", torch_dtype="auto", output_loading_info=True
        )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN) * 7 % model.vocab_size
    with torch.no_grad():
        ours = stage(tokens)
        logits = theirs(tokens).logits
    assert logits.dtype == ours.dtype
    assert ours.std() > 0.5
    assert (logits - ours).abs().max().item() < 1e-5  # its norms and rotations are in fp32 always


def test_folders_of_several_hosts_make_one_model(tmp_path: Path) -> None:
    tensors = tensors_of(whole_stage())
    low = {name: value for name, value in tensors.items() if "layer.2" not in name}
    high = {name: value for name, value in tensors.items() if name not in low}
    a = write_folder(tmp_path / "a", low, an_index())
    b = write_folder(tmp_path / "b", high, an_index(), rank=1)
    with pytest.raises(BadCheckpointError, match=r"layer\.2\.attention_norm\.weight and 8 more"):
        export([a], tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    export([a, b], tmp_path / "hf")
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_key_value_heads"] == 2


def test_folders_of_different_saves_are_not_joined(tmp_path: Path) -> None:
    tensors = tensors_of(whole_stage())
    a = write_folder(tmp_path / "a", tensors, an_index())
    b = write_folder(tmp_path / "b", tensors, an_index(run="other"))
    with pytest.raises(BadCheckpointError, match="of run other"):
        export([a, b], tmp_path / "hf")


def test_every_parameter_has_a_name_there() -> None:
    for model in (MODEL, TIED):
        assert set(llama_names(model)) == set(tensors_of(whole_stage(model)))


@pytest.mark.parametrize("arguments", [[], ["only-one"], ["no-such-folder", "out"]])
def test_command_line_says_what_it_needs(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["export_hf", *arguments])
    assert main() != 0
    assert "error: " in caplog.text


def test_command_line_never_writes_over_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = write_folder(tmp_path / "step-6", tensors_of(whole_stage()), an_index())
    monkeypatch.setattr(sys, "argv", ["export_hf", str(saved), str(tmp_path / "hf")])
    assert main() == 0
    assert main() != 0
