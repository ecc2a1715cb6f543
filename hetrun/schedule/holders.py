"""Which ranks and hosts hold which units (embedding, layers, head), and what the loss of hosts takes from checkpoints.

Writing and reading the checkpoints is left to `runtime/`. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from hetrun.model import CheckpointSpec, ModelSpec, Plan, StagePlan
from hetrun.schedule.step import shares_update


def held_units(plan: Plan) -> list[frozenset[str]]:
    """Return the units that each rank holds, in order of rank."""
    held: list[frozenset[str]] = [frozenset()] * len(plan.split.ranks)
    for replica in plan.split.replicas:
        for stage in replica.stages:
            units = _units(stage, plan.recipe.model)
            for rank in stage.ranks:
                held[rank] = units
    return held


def _units(stage: StagePlan, model: ModelSpec) -> frozenset[str]:
    layers = range(stage.first_layer, stage.first_layer + stage.num_layers)
    units = {f"layer.{layer}" for layer in layers}
    if stage.has_embedding or (stage.has_head and model.tied_embeddings):
        units.add("embedding")
    if stage.has_head:
        units.add("head")
    return frozenset(units)


def lost_with(plan: Plan, spec: CheckpointSpec, hosts: Collection[str]) -> list[str]:
    """Return the units of which no other host has all: what the loss of these hosts takes from all checkpoints of the plan.

    Where updates are shared out, that is every unit of a host: it alone has its part of the moments.
    """
    if spec.shared:
        return []
    gone: set[str] = set()
    kept: set[str] = set()
    for rank, units in zip(plan.split.ranks, held_units(plan), strict=True):
        (gone if rank.host in hosts else kept).update(units)
    return sorted(gone if shares_update(plan.split.replicas) else gone - kept)
