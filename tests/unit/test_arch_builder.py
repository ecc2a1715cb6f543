"""What the runtime does with a model: whose decoder it is, and which config travels with it. Counting is tested in `test_arch.py`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.arch.hf import from_config
from hetrun.errors import ConfigError
from hetrun.launch import launch
from hetrun.model import Event, Plan
from hetrun.runtime.worker import Place, check_place
from tests.unit import arch_configs as configs
from tests.unit.arch_configs import Keys
from tests.unit.planner_lab import Chips, Lab


@pytest.mark.parametrize(
    ("keys", "plain"),
    [
        (configs.LLAMA_2_7B, True),
        (configs.LLAMA_3_8B, True),
        (configs.MISTRAL_7B, True),
        (configs.LLAMA_32_1B, False),  # scaled rotary positions
        ({**configs.LLAMA_2_7B, "attention_bias": True}, False),
        ({**configs.LLAMA_2_7B, "head_dim": 256}, False),
        ({**configs.LLAMA_2_7B, "hidden_act": "gelu"}, False),
        ({**configs.LLAMA_2_7B, "rope_parameters": {"rope_type": "yarn"}}, False),
        ({**configs.MISTRAL_7B, "sliding_window": 4096}, False),
        (configs.QWEN25_7B, False),
        (configs.PHI_3_MINI, False),
    ],
)
def test_only_what_our_own_decoder_computes_comes_without_its_config(
    keys: Keys, plain: bool
) -> None:
    model = from_config(keys)
    assert (model.counts is None) is plain
    assert (model.config is None) is plain


def test_a_plain_config_may_be_left_to_transformers() -> None:
    model = from_config(configs.LLAMA_3_8B, transformers=True)
    assert model.counts is None
    assert replace(model, config=None) == from_config(configs.LLAMA_3_8B)
    assert json.loads(model.config or "") == configs.LLAMA_3_8B


def test_what_a_config_says_of_code_and_files_travels_nowhere() -> None:
    noise = {
        "auto_map": {"AutoModelForCausalLM": "theirs--modeling.Model"},
        "_name_or_path": "somebody/something",
        "_attn_implementation": "somebody/kernels",
        "attn_implementation": "somebody/kernels",
        "quantization_config": {"quant_method": "fp8"},
        "torch_dtype": "float16",
        "id2label": {"0": "x" * 100_000},
    }
    model = from_config({**configs.QWEN3_8B, **noise})
    assert model == from_config(configs.QWEN3_8B)


def test_tied_embeddings_are_said_to_transformers_even_where_a_family_takes_them_for_granted() -> (
    None
):
    for keys in (configs.GEMMA_2_9B, configs.GEMMA_3_4B, configs.QWEN25_7B):
        model = from_config(keys)
        told = json.loads(model.config or "")
        assert told["tie_word_embeddings"] is model.tied_embeddings
    assert json.loads(from_config(configs.GEMMA_3_4B).config or "")["model_type"] == "gemma3_text"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "without its config"),
        ("{", "config is not JSON"),
        ("[]", "config without model_type"),
        ("{}", "config without model_type"),
        ("x" * (1 << 18) + "x", "need at most 262144"),
    ],
)
def test_a_model_of_another_family_needs_its_config(config: str | None, says: str) -> None:
    model = from_config(configs.GPT2)
    with pytest.raises(ValueError, match=says):
        replace(model, config=config)


def shared_plan() -> Plan:
    """Two devices share each layer."""
    keys = {"model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 257}
    chips = [Chips(vendor="emu-a", num_devices=2, per_host=2)]
    plan = Lab(chips=chips, model=from_config(keys), batch=4).plan()
    (first, *_), ranks = plan.split.replicas, plan.split.ranks
    stage = replace(
        first.stages[0],
        ranks=(0, 1),
        num_layers=4,
        first_layer=0,
        has_embedding=True,
        has_head=True,
    )
    replica = replace(
        first, first_row=0, microbatch_rows=1, num_microbatches=4, stages=(stage,), cuts=()
    )
    places = tuple(replace(rank, replica=0, stage=0) for rank in ranks)
    return replace(plan, split=replace(plan.split, replicas=(replica,), ranks=places))


class QuietObserver:
    """Whatever happens goes nowhere."""

    def on_status(self, host: str, text: str) -> None: ...

    def on_event(self, event: Event) -> None: ...

    def on_line(self, host: str, rank: int | None, line: str) -> None: ...


def test_launch_refuses_what_the_runtime_cannot_run_before_it_touches_anything(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="shares each layer of this gpt2 model among 2 devices"):
        launch(shared_plan(), run_root=tmp_path, observer=QuietObserver(), environ={})
    assert list(tmp_path.iterdir()) == []


def test_worker_refuses_it_too_before_the_first_collective() -> None:
    plan = shared_plan()
    rank = plan.split.ranks[0]
    place = Place(
        rank=0, local_rank=0, world_size=len(plan.split.ranks), host=rank.host, fault=None
    )
    with pytest.raises(ConfigError, match="shares each layer of this gpt2 model among 2 devices"):
        check_place(place, plan)
