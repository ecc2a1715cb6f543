"""Recomputation in the words of other trainers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from hetrun.errors import ConfigError
from hetrun.model import Plan
from hetrun.planner.export import export
from tests.unit.test_planner_export import flags_of, pipeline_plan


def recomputed(plan: Plan, which: list[bool]) -> Plan:
    replicas = tuple(
        replace(
            replica,
            stages=tuple(
                replace(stage, recompute=again)
                for stage, again in zip(replica.stages, which, strict=True)
            ),
        )
        for replica in plan.split.replicas
    )
    return replace(plan, split=replace(plan.split, replicas=replicas))


@pytest.mark.parametrize("target", ["megatron", "synerfuse"])
def test_recomputation_of_some_stages_becomes_that_of_all_and_is_named(target: str) -> None:
    result = export(recomputed(pipeline_plan(2), [True, False]), target)
    assert flags_of(result.text)["--recompute-granularity"] == ["full"]
    assert any("stages [0] only" in line for line in result.lost)
    whole = export(recomputed(pipeline_plan(2), [True, True]), target)
    assert not any("recomputation" in line for line in whole.lost)
    assert "--recompute-granularity" not in flags_of(export(pipeline_plan(2), target).text)


def test_flagscale_recomputes_per_stage() -> None:
    plan = recomputed(pipeline_plan(2), [True, False])
    found = yaml.safe_load(export(plan, "flagscale").text)["system"]["recompute"]
    count = plan.split.replicas[0].num_microbatches
    per_stage = found["recompute_granularity_per_stage_micro_batch"]
    assert per_stage == [f"[1, {count}, 1]", f"[1, {count}, 0]"]
    assert found["recompute_granularity"] == "full"
    assert "recompute" not in yaml.safe_load(export(pipeline_plan(2), "flagscale").text)["system"]


def test_replicas_that_recompute_differently_differ() -> None:
    plan = pipeline_plan(2)
    first, second = recomputed(plan, [True, False]).split.replicas[0], plan.split.replicas[1]
    plan = replace(plan, split=replace(plan.split, replicas=(first, second)))
    with pytest.raises(ConfigError, match="recomputed"):
        export(plan, "megatron")
