"""How many devices can share one layer. What a share computes is in the runtime, what it costs in the planner."""

from __future__ import annotations

from hetrun.arch import num_kv_heads
from hetrun.errors import ConfigError
from hetrun.model import ModelSpec

SHARED_FAMILIES = (  # whose layers of transformers the runtime can share: what their configs say of it is done there
    *("gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "qwen2", "qwen3"),
    "smollm3",
)


def check_tp(model: ModelSpec, tp: int) -> None:
    """Refuse a number of devices that does not divide heads, key/value heads and inner width.

    Raises:
        ConfigError: names the part that it does not divide.
    """
    parts = {
        "num_heads": model.num_heads,
        "num_kv_heads": num_kv_heads(model),
        "ffn_size": model.ffn_size,
    }
    for name, size in parts.items():
        if size % tp:
            raise ConfigError(
                f"plan.tp: {tp} devices cannot share a layer evenly: {name} is {size}",
                hint=f"choose a tp that divides {', '.join(map(str, parts.values()))}",
            )
