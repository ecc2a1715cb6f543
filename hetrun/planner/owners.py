"""On how many devices each parameter lives, and what a stage updates where these share that out. Bytes are left to `memory.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate

from hetrun import arch
from hetrun.model import ModelSpec, ReplicaPlan
from hetrun.planner.cost import Piece, stage_parameters


class Owners:
    """Lanes of all replicas that hold each layer, the embedding and the head."""

    def __init__(self, model: ModelSpec, lanes: Mapping[Piece, int]) -> None:
        """`lanes` are those of all replicas, by what they hold."""
        self._model = model
        steps = [0] * (model.num_layers + 1)
        self._embedding = self._head = 0
        for piece, count in lanes.items():
            steps[piece.first_layer] += count
            steps[piece.first_layer + piece.num_layers] -= count
            self._head += count * piece.has_head
            has_table = piece.has_embedding or (piece.has_head and model.tied_embeddings)
            self._embedding += count * has_table
        self._layers = list(accumulate(steps[:-1]))

    def updated(self, piece: Piece, *, tp: int) -> int:
        """Return the parameters that each of `tp` devices of a stage updates: of each that n lanes hold, one n-th."""
        model = self._model
        layers: Counter[int] = Counter()
        whole: Counter[int] = Counter()
        for layer in range(piece.first_layer, piece.first_layer + piece.num_layers):
            layers[self._layers[layer]] += arch.layer_at(model, layer).parameters
        ends = stage_parameters(model, _without_layers(piece))
        if piece.has_head:
            tied = model.tied_embeddings
            own = arch.final_norm_parameters(model) if tied else arch.head_parameters(model)
            whole[self._head] += own
            ends -= own
        if ends:
            whole[self._embedding] += ends
        return sum(
            -(-(-(-layers[count] // tp) + whole[count]) // count) for count in {*layers, *whole}
        )


def _without_layers(piece: Piece) -> Piece:
    return Piece(
        first_layer=0,
        num_layers=0,
        has_embedding=piece.has_embedding,
        has_head=piece.has_head,
    )


def owners_of(model: ModelSpec, replicas: Iterable[ReplicaPlan]) -> Owners:
    """Return who holds what in replicas that are planned."""
    lanes: Counter[Piece] = Counter()
    for replica in replicas:
        for stage in replica.stages:
            piece = Piece(
                first_layer=stage.first_layer,
                num_layers=stage.num_layers,
                has_embedding=stage.has_embedding,
                has_head=stage.has_head,
            )
            lanes[piece] += stage.lanes
    return Owners(model, lanes)
