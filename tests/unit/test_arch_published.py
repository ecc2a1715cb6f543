"""Published counts of parameters, all digits, of models whose configs differ in sizes only from those of `test_arch.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hetrun import arch
from hetrun.arch.hf import from_config

Keys = Mapping[str, Any]


def sizes(family: str, *numbers: int | None, **more: object) -> Keys:
    """Keys of a config from hidden size, layers, heads, key/value heads, feed-forward size and vocabulary."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keys = dict(zip((*names, "intermediate_size", "vocab_size"), numbers, strict=True))
    return {"model_type": family, **keys, **more}


PUBLISHED: list[tuple[str, Keys, int]] = [
    (
        "Qwen2.5-0.5B",
        sizes("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True),
        494032768,
    ),
    (
        "Qwen2.5-1.5B",
        sizes("qwen2", 1536, 28, 12, 2, 8960, 151936, tie_word_embeddings=True),
        1543714304,
    ),
    (
        "Qwen2.5-3B",
        sizes("qwen2", 2048, 36, 16, 2, 11008, 151936, tie_word_embeddings=True),
        3085938688,
    ),
    (
        "Qwen2.5-72B",
        sizes("qwen2", 8192, 80, 64, 8, 29568, 152064, tie_word_embeddings=False),
        72706203648,
    ),
    (
        "Llama-3.2-1B",
        sizes("llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
        1235814400,
    ),
    (
        "Llama-3.2-3B",
        sizes("llama", 3072, 28, 24, 8, 8192, 128256, head_dim=128, tie_word_embeddings=True),
        3212749824,
    ),
    ("Llama-3.1-70B", sizes("llama", 8192, 80, 64, 8, 28672, 128256), 70553706496),
    ("Llama-3.1-405B", sizes("llama", 16384, 126, 128, 8, 53248, 128256), 405853388800),
    ("TinyLlama", sizes("llama", 2048, 22, 32, 4, 5632, 32000), 1100048384),
    (
        "SmolLM2-135M",
        sizes("llama", 576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True),
        134515008,
    ),
    ("Yi-34B", sizes("llama", 7168, 60, 56, 8, 20480, 64000), 34388917248),
    ("CodeLlama-34B", sizes("llama", 8192, 48, 64, 8, 22016, 32000), 33743970304),
    (
        "Mixtral-8x22B",
        sizes("mixtral", 6144, 56, 48, 8, 16384, 32000, num_local_experts=8, num_experts_per_tok=2),
        140620634112,
    ),
    ("Gemma-2B", sizes("gemma", 2048, 18, 8, 1, 16384, 256000, head_dim=256), 2506172416),
    ("Gemma-7B", sizes("gemma", 3072, 28, 16, 16, 24576, 256000, head_dim=256), 8537680896),
    ("Gemma2-2B", sizes("gemma2", 2304, 26, 8, 4, 9216, 256000, head_dim=256), 2614341888),
    ("Gemma2-27B", sizes("gemma2", 4608, 46, 32, 16, 36864, 256000, head_dim=128), 27227128320),
    ("Gemma3-1B", sizes("gemma3_text", 1152, 26, 4, 1, 6912, 262144, head_dim=256), 999885952),
    (
        "Qwen3-0.6B",
        sizes("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True),
        596049920,
    ),
    (
        "Qwen3-1.7B",
        sizes("qwen3", 2048, 28, 16, 8, 6144, 151936, head_dim=128, tie_word_embeddings=True),
        1720574976,
    ),
    (
        "Qwen3-4B",
        sizes("qwen3", 2560, 36, 32, 8, 9728, 151936, head_dim=128, tie_word_embeddings=True),
        4022468096,
    ),
    (
        "Qwen3-14B",
        sizes("qwen3", 5120, 40, 40, 8, 17408, 151936, head_dim=128, tie_word_embeddings=False),
        14768307200,
    ),
    (
        "Qwen3-32B",
        sizes("qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128, tie_word_embeddings=False),
        32762123264,
    ),
    (
        "Qwen3-235B",
        sizes(
            "qwen3_moe",
            4096,
            94,
            64,
            4,
            12288,
            151936,
            head_dim=128,
            moe_intermediate_size=1536,
            num_experts=128,
            num_experts_per_tok=8,
            mlp_only_layers=[],
            decoder_sparse_step=1,
            tie_word_embeddings=False,
        ),
        235093634560,
    ),
    (
        "Phi-3-medium",
        sizes("phi3", 5120, 40, 40, 10, 17920, 32064, tie_word_embeddings=False),
        13960238080,
    ),
    (
        "Phi-4",
        sizes("phi3", 5120, 40, 40, 10, 17920, 100352, tie_word_embeddings=False),
        14659507200,
    ),
    (
        "OPT-1.3B",
        {
            "model_type": "opt",
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "ffn_dim": 8192,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 2048,
            "do_layer_norm_before": True,
        },
        1315758080,
    ),
    (
        "OPT-6.7B",
        {
            "model_type": "opt",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "ffn_dim": 16384,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 4096,
        },
        6658473984,
    ),
    (
        "GPT2-medium",
        {
            "model_type": "gpt2",
            "n_embd": 1024,
            "n_layer": 24,
            "n_head": 16,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
        354823168,
    ),
    (
        "GPT2-large",
        {
            "model_type": "gpt2",
            "n_embd": 1280,
            "n_layer": 36,
            "n_head": 20,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
        774030080,
    ),
    (
        "Pythia-160M",
        {
            "model_type": "gpt_neox",
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "vocab_size": 50304,
            "tie_word_embeddings": False,
        },
        162322944,
    ),
    (
        "Pythia-1B",
        {
            "model_type": "gpt_neox",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "intermediate_size": 8192,
            "vocab_size": 50304,
            "tie_word_embeddings": False,
        },
        1011781632,
    ),
    (
        "Pythia-12B",
        {
            "model_type": "gpt_neox",
            "hidden_size": 5120,
            "num_hidden_layers": 36,
            "num_attention_heads": 40,
            "intermediate_size": 20480,
            "vocab_size": 50688,
            "tie_word_embeddings": False,
        },
        11846072320,
    ),
    (
        "NeoX-20B",
        {
            "model_type": "gpt_neox",
            "hidden_size": 6144,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "vocab_size": 50432,
            "tie_word_embeddings": False,
        },
        20554567680,
    ),
    (
        "BLOOM-560m",
        {
            "model_type": "bloom",
            "hidden_size": 1024,
            "n_layer": 24,
            "n_head": 16,
            "vocab_size": 250880,
        },
        559214592,
    ),
    (
        "BLOOM-176B",
        {
            "model_type": "bloom",
            "n_embed": 14336,
            "n_layer": 70,
            "num_attention_heads": 112,
            "vocab_size": 250880,
        },
        176247271424,
    ),
    (
        "BLOOM-3b",
        {
            "model_type": "bloom",
            "n_embed": 2560,
            "n_layer": 30,
            "num_attention_heads": 32,
            "vocab_size": 250880,
        },
        3002557440,
    ),
    (
        "SmolLM3",
        sizes("smollm3", 2048, 36, 16, 4, 11008, 128256, tie_word_embeddings=True),
        3075098624,
    ),
    ("StarCoder2-7B", sizes("starcoder2", 4608, 32, 36, 4, 18432, 49152), 7173923840),
    (
        "StarCoder2-15B",
        sizes("starcoder2", 6144, 40, 48, 4, 24576, 49152, tie_word_embeddings=False),
        15957889024,
    ),
    (
        "OLMo2-13B",
        sizes("olmo2", 5120, 40, 40, 40, 13824, 100352, tie_word_embeddings=False),
        13716198400,
    ),
    (
        "OLMo2-32B",
        sizes("olmo2", 5120, 64, 40, 8, 27648, 100352, tie_word_embeddings=False),
        32234279936,
    ),
    (
        "OLMo2-1B",
        sizes("olmo2", 2048, 16, 16, 16, 8192, 100352, tie_word_embeddings=False),
        1484916736,
    ),
    (
        "Granite3.1-2b",
        sizes("granite", 2048, 40, 32, 8, 8192, 49155, tie_word_embeddings=True),
        2533531648,
    ),
    (
        "Granite3.1-8b",
        sizes("granite", 4096, 40, 32, 8, 12800, 49155, tie_word_embeddings=True),
        8170848256,
    ),
    (
        "StableLM2-1.6B",
        sizes(
            "stablelm", 2048, 24, 32, 32, 5632, 100352, use_qkv_bias=True, tie_word_embeddings=False
        ),
        1644515328,
    ),
    (
        "Falcon-rw-1b",
        {
            "model_type": "falcon",
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "vocab_size": 50304,
            "bias": True,
            "parallel_attn": False,
            "multi_query": False,
            "new_decoder_architecture": False,
            "alibi": True,
        },
        1311625216,
    ),
    (
        "Mistral-Nemo",
        sizes("mistral", 5120, 40, 32, 8, 14336, 131072, head_dim=128, tie_word_embeddings=False),
        12247782400,
    ),
    (
        "Mistral-Small-24B",
        sizes("mistral", 5120, 40, 32, 8, 32768, 131072, head_dim=128, tie_word_embeddings=False),
        23572403200,
    ),
    (
        "Mistral-Large",
        sizes("mistral", 12288, 88, 96, 8, 28672, 32768, tie_word_embeddings=False),
        122610069504,
    ),
    ("Llama-13B", sizes("llama", 5120, 40, 40, None, 13824, 32000), 13015864320),
    ("Llama-65B", sizes("llama", 8192, 80, 64, None, 22016, 32000), 65285660672),
]


@pytest.mark.parametrize(
    ("name", "keys", "published"), PUBLISHED, ids=[row[0] for row in PUBLISHED]
)
def test_parameters_are_the_published_ones(name: str, keys: Keys, published: int) -> None:
    assert arch.total_parameters(from_config(keys)) == published


def test_a_decoder_in_a_picture_model_takes_its_family_from_outside_where_it_names_none() -> None:
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    named = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **inner}}
    plain = {"model_type": "gemma3", "text_config": inner}
    counts = [arch.total_parameters(from_config(keys)) for keys in (named, plain)]
    assert counts[0] == counts[1]
