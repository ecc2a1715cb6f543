"""Parameters, FLOPs and bytes of a decoder, counted from its shape. What they cost in seconds is decided in `planner/cost.py`.

`hf.py` beside this reads other shapes than llama's from Hugging Face configs.
"""

from __future__ import annotations

from functools import lru_cache

from hetrun.errors import ConfigError
from hetrun.model import Dtype, LayerCount, ModelSpec, Plan

BYTES_PER_ELEMENT = {  # of activations and messages
    Dtype.FP64: 8,
    Dtype.FP32: 4,
    Dtype.BF16: 2,
    Dtype.BF16_MIXED: 2,
}
BYTES_PER_PARAMETER = {**BYTES_PER_ELEMENT, Dtype.BF16_MIXED: 4}  # each of it, gradient, moments
COPY_BYTES_PER_PARAMETER = {  # of matrices in the format of the arithmetic, where that is another one
    **dict.fromkeys(Dtype, 0),
    Dtype.BF16_MIXED: 2,
}
WIDE_BYTES = 4  # norms and loss compute in fp32 at least


def num_kv_heads(model: ModelSpec) -> int:
    """Key/value heads; as many as query heads unless the recipe says fewer."""
    return model.num_kv_heads or model.num_heads


@lru_cache(maxsize=64)
def layer_runs(model: ModelSpec) -> tuple[LayerCount, ...]:
    """Runs of equal layers, in order: one for most models, two where the first layers are dense and the rest are not."""
    return (_llama_layers(model),) if model.counts is None else model.counts.layers


def layer_at(model: ModelSpec, layer: int) -> LayerCount:
    """Return what layer `layer` (from 0) holds and computes."""
    end = 0
    for run in layer_runs(model):
        end += run.num_layers
        if 0 <= layer < end:
            return run
    raise IndexError(f"layer {layer} of {end}")


def runs_between(model: ModelSpec, first: int, end: int) -> tuple[tuple[LayerCount, int], ...]:
    """Return the runs of layers [first, end) with how many layers of each are in it."""
    found = []
    begin = 0
    for run in layer_runs(model):
        count = min(end, begin + run.num_layers) - max(first, begin)
        if count > 0:
            found.append((run, count))
        begin += run.num_layers
    return tuple(found)


def layers_parameters(model: ModelSpec, first: int, end: int) -> int:
    """Parameters of layers [first, end)."""
    return sum(count * run.parameters for run, count in runs_between(model, first, end))


def layers_differ(model: ModelSpec) -> bool:
    """Whether some layers hold or compute something else than others."""
    return len(layer_runs(model)) > 1


def need_trainable(plan: Plan) -> None:
    """Refuse what hetrun's own runtime cannot run; counting and planning need no such thing.

    Raises:
        ConfigError: devices share layers that transformers builds.
    """
    model = plan.recipe.model
    if model.config is None:
        return
    for replica in plan.split.replicas:
        for stage in replica.stages:
            if len(stage.ranks) != stage.lanes:
                raise ConfigError(
                    f"the plan shares each layer of this {model.family} model among"
                    f" {len(stage.ranks) // stage.lanes} devices; hetrun's runtime cannot do that with models that"
                    " transformers builds",
                    hint="set plan.tp: [1] in the recipe, or take the plan elsewhere (hetrun plan --export)",
                )


def layer_parameters(model: ModelSpec) -> int:
    """Parameters of one decoder layer.

    Llama's: q, o (h*h), k, v (h*kv), gate, up, down (h*ffn), two norms (h).

    Raises:
        ConfigError: layers differ, so that there is no such number; see `layer_runs`.
    """
    return _any_layer(model).parameters


def mean_layer_parameters(model: ModelSpec) -> float:
    """Parameters of one decoder layer, on average: exactly those of each where layers are alike."""
    return layers_parameters(model, 0, model.num_layers) / model.num_layers


def embedding_parameters(model: ModelSpec) -> int:
    """Parameters of the token embedding, and of learned positions where a family has them."""
    if model.counts is not None:
        return model.counts.embedding_parameters
    return model.vocab_size * model.hidden_size


def head_parameters(model: ModelSpec) -> int:
    """Parameters that the head holds: final norm and output projection (the embedding's own matrix if tied)."""
    if model.counts is not None:
        return model.counts.head_parameters
    return model.hidden_size + model.vocab_size * model.hidden_size


def final_norm_parameters(model: ModelSpec) -> int:
    """Parameters of the head without its output matrix: all of its own where that is tied."""
    return head_parameters(model) - model.vocab_size * model.hidden_size


def total_parameters(model: ModelSpec) -> int:
    """Parameters of the whole model; a tied matrix counts once."""
    tied = model.vocab_size * model.hidden_size if model.tied_embeddings else 0
    layers = sum(run.num_layers * run.parameters for run in layer_runs(model))
    return embedding_parameters(model) + layers + head_parameters(model) - tied


def active_parameters(model: ModelSpec) -> int:
    """Matrix parameters that one token passes: layers (its own experts only) and output projection."""
    layers = sum(run.num_layers * run.active_parameters for run in layer_runs(model))
    return layers + model.vocab_size * model.hidden_size


def layer_forward_flops(model: ModelSpec, rows: int, seq_len: int) -> float:
    """FLOPs of one layer's forward on rows x seq_len tokens; backward costs twice that.

    2 FLOPs per matrix parameter and token, plus causal attention: two products of
    (seq_len x head_dim) x (head_dim x seq_len) per head, half of it masked away. Windows of attention
    shorter than seq_len are not counted off.

    Raises:
        ConfigError: layers differ; see `run_forward_flops`.
    """
    return run_forward_flops(_any_layer(model), rows, seq_len)


def run_forward_flops(layer: LayerCount, rows: int, seq_len: int) -> float:
    """FLOPs of the forward of one layer of a run, as `layer_forward_flops`."""
    tokens = rows * seq_len
    return 2.0 * layer.active_parameters * tokens + 1.0 * tokens * seq_len * layer.attention_width


def head_forward_flops(model: ModelSpec, rows: int, seq_len: int) -> float:
    """FLOPs of the output projection on rows x seq_len tokens; backward costs twice that."""
    return 2.0 * model.vocab_size * model.hidden_size * rows * seq_len


def boundary_bytes(model: ModelSpec, dtype: Dtype, rows: int, seq_len: int) -> int:
    """Bytes that one microbatch sends over a cut, one way: rows x seq_len x hidden_size elements."""
    return rows * seq_len * model.hidden_size * BYTES_PER_ELEMENT[dtype]


def layer_activation_bytes(
    layer: LayerCount, dtype: Dtype, *, rows: int, seq_len: int, tp: int = 1
) -> int:
    """Bytes that one layer of a run holds of one microbatch between forward and backward, on each of `tp` devices.

    They share attention and the feed-forward part; norms, what is sent to experts and what is latent each has whole.
    """
    element = BYTES_PER_ELEMENT[dtype]
    wide = max(element, WIDE_BYTES)
    shared = layer.shared_wide_elements * wide + layer.shared_elements * element
    whole = layer.wide_elements * wide + layer.elements * element - shared
    return rows * seq_len * (whole + -(-shared // tp))


def _any_layer(model: ModelSpec) -> LayerCount:
    """Return the one kind of layer that a model has."""
    runs = layer_runs(model)
    if layers_differ(model):
        kinds = " + ".join(str(run.num_layers) for run in runs)
        raise ConfigError(
            f"the layers of this {model.family} differ ({kinds}): no one of them stands for all",
            hint="count each run of equal layers by itself (hetrun.arch.layer_runs)",
        )
    return runs[0]


def _llama_layers(model: ModelSpec) -> LayerCount:
    """Count a llama-shaped layer.

    Held per token: two norms (input and scaled input in fp32 at least, output), rotated q and repeated k
    and v, attention's output twice, its row sums per head, and four vectors of ffn_size (gate, its silu,
    up, product); attention is fused, so there is no score matrix. Devices that share the layer hold the norms whole.
    """
    hidden = model.hidden_size
    kv_size = hidden // model.num_heads * num_kv_heads(model)
    matrices = 2 * hidden * hidden + 2 * hidden * kv_size + 3 * hidden * model.ffn_size
    return LayerCount(
        num_layers=model.num_layers,
        parameters=matrices + 2 * hidden,
        active_parameters=matrices,
        attention_width=2 * hidden,
        wide_elements=4 * hidden + model.num_heads,
        elements=7 * hidden + 4 * model.ffn_size,
        shared_wide_elements=model.num_heads,
        shared_elements=5 * hidden + 4 * model.ffn_size,
        copied_parameters=2 * hidden,
    )
