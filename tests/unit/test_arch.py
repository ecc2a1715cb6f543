"""Counted parameters against what the makers of well-known models publish."""

from __future__ import annotations

from itertools import product

import pytest

from hetrun import arch
from hetrun.arch.hf import BadConfigError, from_config, learned_positions
from hetrun.errors import ConfigError
from hetrun.model import GIB, Dtype, ModelSpec
from tests.unit import arch_configs as configs
from tests.unit.arch_configs import Keys
from tests.unit.planner_lab import Chips, Lab

# Exact: from the checkpoint's index or the card's table. DeepSeek's 671,026,419,200 holds 58 x 256
# correction biases of its routers, which are no parameters but set by a rule.
EXACT = [
    ("Llama-2-7B", configs.LLAMA_2_7B, 6_738_415_616),
    ("Llama-3-8B", configs.LLAMA_3_8B, 8_030_261_248),
    ("Llama-2-70B", configs.LLAMA_2_70B, 68_976_648_192),
    ("Llama-3.2-1B", configs.LLAMA_32_1B, 1_235_814_400),
    ("Mistral-7B-v0.1", configs.MISTRAL_7B, 7_241_732_096),
    ("Mixtral-8x7B", configs.MIXTRAL_8X7B, 46_702_792_704),
    ("GPT-2", configs.GPT2, 124_439_808),
    ("GPT-2 XL", configs.GPT2_XL, 1_557_611_200),
    ("Pythia-6.9B", configs.PYTHIA_69B, 6_857_302_016),
    ("Phi-3-mini", configs.PHI_3_MINI, 3_821_079_552),
    ("Gemma-2-9B", configs.GEMMA_2_9B, 9_241_705_984),
    ("BLOOM-7B1", configs.BLOOM_7B1, 7_069_016_064),
    ("Falcon-7B", configs.FALCON_7B, 6_921_720_704),
    ("StableLM-3B-4E1T", configs.STABLELM_3B, 2_795_443_200),
    ("StarCoder2-3B", configs.STARCODER2_3B, 3_030_371_328),
    ("DeepSeek-V3", configs.DEEPSEEK_V3, 671_026_419_200 - 58 * 256),
]
SHORT = {"num_hidden_layers": 2}
# What the model classes of transformers 5 build from these configs, counted on torch's meta device: options
# of the families that no well-known model above uses.
BUILT = [
    ("falcon, two norms", configs.FALCON_40B, 41_303_293_952),
    (
        "falcon, one after the other, biased",
        {
            **configs.FALCON_7B,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_hidden_layers": 3,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
        },
        284_248_064,
    ),
    ("olmo2", configs.OLMO_2_7B, 7_298_617_344),
    ("gemma3 of pictures and text", configs.GEMMA_3_4B, 3_880_263_168),
    (
        "stablelm, one norm",
        {**configs.STABLELM_3B, **SHORT, "use_parallel_residual": True},
        416_168_960,
    ),
    (
        "stablelm, biased",
        {
            **configs.STABLELM_3B,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "use_qkv_bias": True,
            "vocab_size": 100352,
        },
        1_644_515_328,
    ),
    (
        "llama, biased",
        {**configs.LLAMA_3_8B, **SHORT, "attention_bias": True, "mlp_bias": True},
        1_486_987_264,
    ),
    (
        "qwen3_moe, some layers dense",
        {
            **configs.QWEN3_30B_A3B,
            "num_hidden_layers": 6,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
        2_095_083_008,
    ),
    (
        "mistral, wide heads",
        {**configs.MISTRAL_7B, **SHORT, "hidden_size": 5120, "head_dim": 128},
        872_965_120,
    ),
    (
        "gpt_neox without biases",
        {**configs.PYTHIA_69B, **SHORT, "attention_bias": False},
        815_874_048,
    ),
    ("granite", {**configs.LLAMA_3_8B, **SHORT, "model_type": "granite"}, 1_486_901_248),
    ("smollm3", {**configs.LLAMA_3_8B, **SHORT, "model_type": "smollm3"}, 1_486_901_248),
    (
        "deepseek_v3 without query latents",
        {
            **configs.DEEPSEEK_V3,
            "num_hidden_layers": 4,
            "q_lora_rank": None,
            "n_routed_experts": 16,
        },
        5_049_336_832,
    ),
    ("gpt2 with its own ffn", {**configs.GPT2, "n_inner": 1000}, 86_223_840),
    ("opt without biases", {**configs.OPT_125M, "enable_bias": False}, 125_156_352),
    (
        "starcoder2 without biases",
        {**configs.STARCODER2_3B, **SHORT, "use_bias": False},
        342_915_072,
    ),
]
# Rounded: as the card says, in billions; what the card rounds away is the tolerance.
ROUNDED = [
    ("Mixtral-8x7B", configs.MIXTRAL_8X7B, 46.7, 0.05),
    ("Qwen2.5-7B", configs.QWEN25_7B, 7.62, 0.005),
    ("Qwen2.5-0.5B", configs.QWEN25_05B, 0.49, 0.005),
    ("Qwen3-8B", configs.QWEN3_8B, 8.2, 0.05),
    ("Qwen3-30B-A3B", configs.QWEN3_30B_A3B, 30.5, 0.05),
    ("OPT-125M", configs.OPT_125M, 0.125, 0.0005),
    ("OLMo-2-7B", configs.OLMO_2_7B, 7.3, 0.05),
    ("Falcon-40B", configs.FALCON_40B, 41.3, 0.05),
    ("Gemma-3-1B", configs.GEMMA_3_1B, 1.0, 0.05),
    ("Gemma-3-4B, text only", configs.GEMMA_3_4B, 3.88, 0.005),
    ("DeepSeek-V3", configs.DEEPSEEK_V3, 671, 0.5),
]


@pytest.mark.parametrize(("name", "keys", "published"), EXACT, ids=[row[0] for row in EXACT])
def test_parameters_are_exactly_the_published_ones(name: str, keys: Keys, published: int) -> None:
    assert arch.total_parameters(from_config(keys)) == published


@pytest.mark.parametrize(("name", "keys", "built"), BUILT, ids=[row[0] for row in BUILT])
def test_parameters_are_those_of_the_reference_model_classes(
    name: str, keys: Keys, built: int
) -> None:
    assert arch.total_parameters(from_config(keys)) == built


@pytest.mark.parametrize(
    ("name", "keys", "billions", "rounding"), ROUNDED, ids=[row[0] for row in ROUNDED]
)
def test_parameters_round_to_those_of_the_card(
    name: str, keys: Keys, billions: float, rounding: float
) -> None:
    assert arch.total_parameters(from_config(keys)) / 1e9 == pytest.approx(billions, abs=rounding)


@pytest.mark.parametrize(
    ("keys", "billions", "rounding"),
    [
        (configs.MIXTRAL_8X7B, 12.9, 0.05),
        (configs.QWEN3_30B_A3B, 3.3, 0.06),
        (configs.DEEPSEEK_V3, 37.5, 0.1),
    ],
    ids=["Mixtral-8x7B", "Qwen3-30B-A3B", "DeepSeek-V3"],
)
def test_active_parameters_are_those_of_the_card(
    keys: Keys, billions: float, rounding: float
) -> None:
    """Cards count the embedding's table and the norms as active too."""
    model = from_config(keys)
    active = arch.active_parameters(model) + arch.embedding_parameters(model)
    assert active / 1e9 == pytest.approx(billions, abs=rounding)


def test_non_embedding_parameters_of_gemma_2_9b_are_those_of_its_report() -> None:
    model = from_config(configs.GEMMA_2_9B)
    assert arch.total_parameters(model) - arch.embedding_parameters(model) == 8_324_201_984


def test_a_plain_config_is_the_same_model_as_its_sizes() -> None:
    assert from_config(configs.LLAMA_3_8B) == ModelSpec(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_size=14336,
        vocab_size=128256,
        rope_theta=500000.0,
    )


def test_newer_configs_keep_the_rotary_base_one_level_deeper() -> None:
    keys = {**configs.LLAMA_2_7B, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert from_config(keys).rope_theta == 5e5


def test_llama_counted_either_way_costs_the_same() -> None:
    """The same layer as sizes and as counts: attention_bias off and on differ by the biases alone."""
    plain = from_config(configs.LLAMA_3_8B)
    biased = from_config({**configs.LLAMA_3_8B, "attention_bias": True})
    hidden, kv = 4096, 1024
    assert arch.layer_parameters(biased) == arch.layer_parameters(plain) + 2 * hidden + 2 * kv
    assert arch.layer_forward_flops(biased, 2, 512) == arch.layer_forward_flops(plain, 2, 512)
    for dtype, tp in product(Dtype, (1, 2, 8)):
        held = [
            arch.layer_activation_bytes(arch.layer_at(m, 0), dtype, rows=2, seq_len=512, tp=tp)
            for m in (biased, plain)
        ]
        assert held[0] == held[1]


def test_forward_flops_are_two_per_active_parameter_and_attention_on_top() -> None:
    model = from_config(configs.MIXTRAL_8X7B)
    expert = 3 * 4096 * 14336
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    router = 4096 * 8
    matrices = 2 * 3 * (attention + router + 2 * expert)  # 3 tokens
    products = 2 * 3 * 3 * 4096  # queries x keys and scores x values, the upper half masked
    assert arch.layer_forward_flops(model, 1, 3) == matrices + products


def test_layers_before_the_experts_are_counted_apart() -> None:
    model = from_config(configs.DEEPSEEK_V3)
    dense, sparse = arch.layer_runs(model)
    assert (dense.num_layers, sparse.num_layers) == (3, 58)
    assert arch.layers_differ(model)
    assert arch.layer_at(model, 2) == dense
    assert arch.layer_at(model, 3) == sparse == arch.layer_at(model, 60)
    assert sparse.parameters > 19 * dense.parameters
    with pytest.raises(IndexError):
        arch.layer_at(model, 61)
    with pytest.raises(ConfigError, match=r"differ \(3 \+ 58\)"):
        arch.layer_parameters(model)


def test_experts_every_other_layer_are_runs_of_one() -> None:
    model = from_config(
        {
            **configs.QWEN3_30B_A3B,
            "num_hidden_layers": 6,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        }
    )
    sparse = [arch.layer_at(model, layer).parameters > 10**8 for layer in range(6)]
    assert sparse == [False, True, False, False, False, True]


def test_windows_of_attention_change_no_count() -> None:
    free = {**configs.GEMMA_2_9B, "sliding_window": None}
    assert from_config(free).counts == from_config(configs.GEMMA_2_9B).counts


def test_learned_positions_bound_the_row() -> None:
    assert learned_positions(configs.GPT2) == 1024
    assert learned_positions(configs.OPT_125M) == 2048
    assert learned_positions(configs.LLAMA_2_7B) is None


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "model_type: is missing"),
        ({"model_type": "lama"}, "nearest is llama"),
        ({"model_type": "t5-like-thing"}, "known are bloom"),
        ({"model_type": "llama", "hidden_size": 8}, "num_attention_heads: is missing"),
        ({**configs.LLAMA_2_7B, "hidden_size": "4096"}, "hidden_size: need a whole number"),
        ({**configs.LLAMA_2_7B, "hidden_size": True}, "hidden_size: need a whole number"),
        ({**configs.LLAMA_2_7B, "vocab_size": 0}, "vocab_size: need a whole number of at least 1"),
        ({**configs.LLAMA_2_7B, "num_key_value_heads": 5}, "need a divisor of 32"),
        ({**configs.LLAMA_2_7B, "attention_bias": "no"}, "attention_bias: need true or false"),
        ({**configs.LLAMA_2_7B, "rope_theta": "big"}, "rope_theta: need a number"),
        ({**configs.LLAMA_2_7B, "rope_theta": float("nan")}, "rope_theta: need a finite number"),
        ({**configs.LLAMA_2_7B, "rope_theta": 10**400}, "rope_theta: need a finite number"),
        ({**configs.LLAMA_2_7B, "rope_theta": 0}, "rope_theta: need a finite number above 0"),
        ({**configs.LLAMA_2_7B, "num_hidden_layers": 10**9}, "need at most 10000"),
        ({**configs.LLAMA_2_7B, "num_attention_heads": 31}, "31, need a divisor of 4096"),
        ({**configs.GPT2, "n_head": 7}, "num_attention_heads: 7, need a divisor of 768"),
        ({**configs.MIXTRAL_8X7B, "num_experts_per_tok": 9}, "there are 8 experts"),
        ({**configs.QWEN3_30B_A3B, "mlp_only_layers": 3}, "mlp_only_layers: need a list"),
        ({**configs.OPT_125M, "word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        ({**configs.OPT_125M, "do_layer_norm_before": False}, "do_layer_norm_before"),
        ({**configs.STABLELM_3B, "qk_layernorm": True}, "qk_layernorm"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_key(keys: Keys, says: str) -> None:
    with pytest.raises(BadConfigError, match=says):
        from_config(keys)


@pytest.mark.parametrize(
    "keys", [configs.GPT2, configs.MIXTRAL_8X7B, configs.QWEN25_7B], ids=["tied", "moe", "biased"]
)
def test_counted_models_are_planned_and_both_evaluators_agree(keys: Keys) -> None:
    """`plan` proves its own figures with a second evaluator; two vendors make pipelines and replicas."""
    model = from_config(keys)
    chips = [
        Chips(vendor="emu-a", num_devices=2, gflops=1e6, memory=1000 * GIB),
        Chips(vendor="emu-b", num_devices=3, gflops=4e5, memory=1000 * GIB),
    ]
    lab = Lab(chips=chips, model=model, batch=16, dtype=Dtype.BF16)
    split = lab.plan().split
    for replica in split.replicas:
        assert sum(stage.num_layers for stage in replica.stages) == model.num_layers


def test_what_experts_got_and_gave_is_held_by_each_of_those_that_share_a_layer() -> None:
    def held(keys: Keys, tp: int) -> int:
        run = arch.layer_at(from_config(keys), 0)
        return arch.layer_activation_bytes(run, Dtype.BF16, rows=1, seq_len=8, tp=tp)

    fewer: Keys = {**configs.MIXTRAL_8X7B, "num_experts_per_tok": 1}
    for tp in (1, 2, 4):
        one_expert = 8 * 2 * (4 * 14336 // tp + 2 * 4096)
        assert held(configs.MIXTRAL_8X7B, tp) - held(fewer, tp) == one_expert


def test_latent_attention_is_shared_by_its_heads_and_not_by_what_is_latent() -> None:
    dense, _ = arch.layer_runs(from_config(configs.DEEPSEEK_V3))
    latent = 1536 + 512 + 64
    assert dense.elements - dense.shared_elements == 2 * 7168 + (1536 + 512) + latent
    assert dense.shared_wide_elements == 128
