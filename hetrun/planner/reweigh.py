"""A second evaluator of what stages hold and update, from split and recipe alone. Shares no code with the first."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from hetrun import arch
from hetrun.model import ModelSpec, Recipe, ReplicaPlan, Split, StagePlan

_WIDTHS = {  # bytes: activation, weight (with its copy for the arithmetic), gradient, moments
    "fp64": (8, 8, 8, 16),
    "fp32": (4, 4, 4, 8),
    "bf16": (2, 2, 2, 4),
    "bf16-mixed": (2, 6, 4, 8),
}


class Reweigh:
    """Parameters and bytes of the stages of one split; equal stages are looked at once."""

    def __init__(self, split: Split, recipe: Recipe) -> None:
        self._recipe = recipe
        self._shares = split.replicas[0].zero == 1
        self._known: dict[tuple[object, ...], tuple[int, int]] = {}
        self._bytes: dict[tuple[object, ...], int] = {}
        model = recipe.model
        self._copies = dict.fromkeys([*range(model.num_layers), "head", "table"], 0)
        alike: dict[tuple[int, int, bool, bool], int] = {}
        for replica in split.replicas:
            for s in replica.stages:
                key = (s.first_layer, s.num_layers, s.has_embedding, s.has_head)
                alike[key] = alike.get(key, 0) + s.lanes
        for (first, count, embeds, heads), lanes in alike.items():
            for layer in range(first, first + count):
                self._copies[layer] += lanes
            self._copies["head"] += lanes * heads
            self._copies["table"] += lanes * (embeds or (heads and model.tied_embeddings))

    def parameters(self, stage: StagePlan) -> tuple[int, int]:
        """Return what each device of a stage holds, and what it updates of that."""
        tp = len(stage.ranks) // stage.lanes
        key = (stage.first_layer, stage.num_layers, stage.has_embedding, stage.has_head, tp)
        if key not in self._known:
            held: dict[int, list[int]] = {}  # by copies: parameters of layers, others
            for copies, of_layers, parameters in self._parts(stage):
                held.setdefault(copies, [0, 0])[not of_layers] += parameters
            layers = sum(own for own, _ in held.values())
            whole = sum(other for _, other in held.values())
            holds = ceil(layers / tp) + whole
            updates = sum(
                ceil((ceil(own / tp) + other) / copies) for copies, (own, other) in held.items()
            )
            self._known[key] = holds, (updates if self._shares else holds)
        return self._known[key]

    def num_bytes(self, replica: ReplicaPlan, stage: StagePlan) -> int:
        """Return the peak bytes of each device of a stage."""
        tp = len(stage.ranks) // stage.lanes
        held = stage.window if stage.most_held is None else stage.most_held
        place = (*self.parameters(stage), stage.first_layer, stage.num_layers, stage.has_head)
        key = (*place, tp, held, stage.recompute, replica.microbatch_rows)
        if key not in self._bytes:
            self._bytes[key] = self._count(replica.microbatch_rows, stage, held, tp)
        return self._bytes[key]

    def _parts(self, stage: StagePlan) -> Iterator[tuple[int, bool, int]]:
        """Yield lanes that hold a part of a stage, whether it is a layer, and its parameters."""
        model = self._recipe.model
        for layer in range(stage.first_layer, stage.first_layer + stage.num_layers):
            yield self._copies[layer], True, arch.layer_at(model, layer).parameters
        matrix = model.vocab_size * model.hidden_size
        if stage.has_head:
            norm = arch.final_norm_parameters(model)
            yield self._copies["head"], False, norm + (0 if model.tied_embeddings else matrix)
        if stage.has_embedding or (stage.has_head and model.tied_embeddings):
            yield self._copies["table"], False, arch.embedding_parameters(model)

    def _count(self, rows: int, stage: StagePlan, held: int, tp: int) -> int:
        model = self._recipe.model
        dtype = self._recipe.train.dtype
        width, weight, gradient, moments = _WIDTHS[dtype.value]
        wide = max(width, 4)
        tokens = rows * self._recipe.data.seq_len
        holds, updates = self.parameters(stage)
        total = holds * (weight + gradient) + updates * moments
        message = tokens * model.hidden_size * width
        layers = range(stage.first_layer, stage.first_layer + stage.num_layers)
        each = [
            arch.layer_activation_bytes(
                arch.layer_at(model, layer), dtype, rows=rows, seq_len=self._recipe.data.seq_len, tp=tp
            )
            for layer in layers or range(model.num_layers)
        ]  # fmt: skip
        if stage.recompute:
            total += held * len(layers) * message + max(each)
        elif layers:
            total += held * sum(each)
        total += (held + 2) * message
        return total + held * stage.has_head * _head(model, tokens, width, wide)


def _head(model: ModelSpec, tokens: int, width: int, wide: int) -> int:
    """Bytes of norm (two wide vectors and its output), logits, log-softmax, its gradient, and logits widened."""
    norm = model.hidden_size * (2 * wide + width)
    copies = 3 if wide > width else 2
    return tokens * (norm + model.vocab_size * (width + copies * wide))
