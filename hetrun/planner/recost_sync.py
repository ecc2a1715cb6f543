"""Who sums up which gradients, for the second evaluator: found anew from who holds what, without the first one's code."""

from __future__ import annotations

from math import ceil, gcd

from hetrun import arch
from hetrun.model import ModelSpec, Split, StagePlan


def owner_sets(split: Split, model: ModelSpec) -> list[tuple[tuple[int, ...], int, int]]:
    """Return ranks that sum up gradients (of those that do alike, the first), parameters per device, how many do alike."""
    matrix = model.vocab_size * model.hidden_size
    table, norm = arch.embedding_parameters(model), arch.final_norm_parameters(model)
    tied = model.tied_embeddings
    stages = [stage for replica in split.replicas for stage in replica.stages]
    heads = {rank for stage in stages if stage.has_head for rank in _firsts(stage)}
    tables = {rank for stage in stages if stage.has_embedding for rank in _firsts(stage)}
    lanes = {lane[0]: lane for stage in stages for lane in _lanes(stage)}
    sets: dict[tuple[int, ...], list[int]] = {}  # parameters of matrices in layers, others
    sets.setdefault(tuple(sorted(heads)), [0, 0])[1] += norm + (0 if tied else matrix)
    for layer in reversed(range(model.num_layers)):
        holders = {
            rank
            for stage in stages
            if stage.first_layer <= layer < stage.first_layer + stage.num_layers
            for rank in _firsts(stage)
        }
        numbers = sets.setdefault(tuple(sorted(holders)), [0, 0])
        count = arch.layer_at(model, layer)
        numbers[0] += count.parameters - count.copied_parameters
        numbers[1] += count.copied_parameters
    sets.setdefault(tuple(sorted(tables | heads if tied else tables)), [0, 0])[1] += table
    found = []
    for members, (layers, whole) in sets.items():
        widths = [len(lanes[rank]) for rank in members]
        least, both = min(widths), gcd(*widths)
        if len(members) > 1 and least == max(widths):
            found.append((members, ceil(layers / least) + whole, least))
        elif len(members) > 1:
            holders = {r for n in members for r in lanes[n][: len(lanes[n]) // both]}
            found += [(members, ceil(layers / least), least)] if layers else []
            found.append((tuple(holders), whole, both))
    return found


def _lanes(stage: StagePlan) -> list[tuple[int, ...]]:
    """Return the ranks of each lane."""
    tp = len(stage.ranks) // stage.lanes
    return [stage.ranks[place : place + tp] for place in range(0, len(stage.ranks), tp)]


def _firsts(stage: StagePlan) -> tuple[int, ...]:
    """Return the first rank of each lane."""
    return stage.ranks[:: len(stage.ranks) // stage.lanes]
