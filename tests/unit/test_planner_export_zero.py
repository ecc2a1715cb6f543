"""Shared updates in the words of other trainers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrun.model import Plan
from hetrun.planner.export import export
from tests.unit.test_planner_export import flags_of, pipeline_plan


def shared(plan: Plan, *, tied: bool = False) -> Plan:
    replicas = tuple(replace(replica, zero=1) for replica in plan.split.replicas)
    model = replace(plan.recipe.model, tied_embeddings=tied)
    return replace(
        plan,
        split=replace(plan.split, replicas=replicas),
        recipe=replace(plan.recipe, model=model),
    )


@pytest.mark.parametrize("target", ["megatron", "synerfuse"])
def test_shared_updates_are_the_distributed_optimizer_of_megatron(target: str) -> None:
    assert "--use-distributed-optimizer" not in flags_of(export(pipeline_plan(2), target).text)
    result = export(shared(pipeline_plan(2)), target)
    assert flags_of(result.text)["--use-distributed-optimizer"] == []
    assert not any("optimizer states" in line for line in result.lost)


@pytest.mark.parametrize("target", ["megatron", "synerfuse", "flagscale"])
def test_a_tied_matrix_takes_more_elsewhere_and_that_is_named(target: str) -> None:
    lost = export(shared(pipeline_plan(2), tied=True), target).lost
    assert any("tied matrix" in line and "more memory than planned" in line for line in lost)
