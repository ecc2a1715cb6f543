"""Where the best plan needs what a target has no words for, the best within its words is written and its price said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from hetrun.errors import ConfigError
from hetrun.model import Dtype, Pins, Plan, PlanLimits, Recipe, ReplicaPlan, Role
from hetrun.planner import plan
from hetrun.planner.export import export
from hetrun.planner.export.common import plain_step_s
from hetrun.planner.export.within import export_within
from hetrun.schedule import StageTimes, pipeline_ends, replica_ends
from tests.unit.planner_lab import FREE_LINKS, WHOLE, Chips, Lab, small_model

CHIPS = (
    Chips(vendor="emu-a", num_devices=2, layer_s=1.0),
    Chips(vendor="emu-b", num_devices=2, layer_s=3.0),
)
LAB = Lab(chips=CHIPS, model=small_model(5), batch=12, rows=(1, 2), links=FREE_LINKS)


def again_in(lab: Lab) -> Callable[[Recipe], Plan]:
    return lambda recipe: plan(lab.facts, lab.profile, recipe, targets={})


@pytest.mark.parametrize("target", ["megatron", "flagscale", "synerfuse"])
def test_a_recipe_that_allows_everything_is_exported_and_says_what_that_costs(target: str) -> None:
    best = LAB.plan()
    own = export_within(best, target, again_in(LAB))
    assert own.export == replace(
        export(own.plan, target), text=own.export.text, lost=own.export.lost
    )
    ratio = plain_step_s(own.plan) / best.split.cost.step_s
    assert ratio > 1
    assert f"{ratio - 1:.2%} slower" in own.export.lost[0]
    assert own.export.text.split("\n")[1] == f"# lost: {own.export.lost[0]}"
    assert all(replica.way == "1F1B" for replica in own.plan.split.replicas)


def test_wider_windows_than_a_target_runs_are_priced_as_plain_ones() -> None:
    """Slow sends: wider windows hide them, and the target has none."""
    slow = tuple(replace(link, latency_s=1.0) for link in FREE_LINKS)
    limits = replace(WHOLE, pins=Pins(layers=(3, 2), rows=(12,)))
    plan = replace(LAB, links=slow, limits=limits, rows=(1,)).plan()
    (replica,) = plan.split.replicas
    first = replica.stages[0]
    assert first.window > 2
    plain = [
        StageTimes(forward_s=s.forward_s, backward_s=s.backward_s, send_s=s.send_s, window=2 - i)
        for i, s in enumerate(replica.stages)
    ]
    after_s = plan.split.cost.step_s - pipeline_s(plan.split.replicas)
    assert plain_step_s(plan) == pytest.approx(max(pipeline_ends(plain, 12)) + after_s)
    more = plain_step_s(plan) / plan.split.cost.step_s - 1
    assert more > 0
    assert any(f"{more:.2%} slower" in line for line in export(plan, "megatron").lost)


def pipeline_s(replicas: Sequence[ReplicaPlan]) -> float:
    return max(end_s for r in replicas for lanes in replica_ends(r) for end_s in lanes)


def test_a_plan_that_the_target_can_read_is_not_planned_again() -> None:
    lab = replace(LAB, chips=CHIPS[:1])
    best = lab.plan()

    def never(recipe: Recipe) -> Plan:
        raise AssertionError(recipe)

    own = export_within(best, "megatron", never)
    assert own.plan is best
    assert own.export == export(best, "megatron")


def test_a_batch_that_all_replicas_cannot_share_is_shared_by_fewer() -> None:
    """Ten microbatches for four devices: Megatron takes the same from each, so two pipelines of two devices have five."""
    lab = replace(LAB, chips=(replace(CHIPS[0], num_devices=4),), batch=10, rows=(1,))
    own = export_within(lab.plan(), "megatron", again_in(lab))
    rows = {replica.num_rows for replica in own.plan.split.replicas}
    assert len(rows) == 1
    assert "--global-batch-size 10" in own.export.text


def test_one_size_of_tp_is_found_for_a_target_that_knows_no_more() -> None:
    limits = PlanLimits(tp=(1, 2), pins=Pins(layers=(3, 2), roles={"emu-a": Role.FIRST}))
    lab = replace(LAB, limits=limits)
    own = export_within(lab.plan(), "megatron", again_in(lab))
    sizes = {len(stage.ranks) for replica in own.plan.split.replicas for stage in replica.stages}
    assert len(sizes) == 1


def test_what_cannot_be_written_at_all_is_refused_with_the_reason() -> None:
    """A vendor alone with one device, and pins that keep replicas of other kinds."""
    lab = replace(LAB, limits=PlanLimits(pins=Pins(rows=(9, 3))))
    with pytest.raises(ConfigError, match="megatron cannot express this plan"):
        export_within(lab.plan(), "megatron", again_in(lab))


@pytest.mark.parametrize(("memory", "says"), [(None, "it fits"), (1e6, "on 1 of 2 devices")])
def test_fp32_masters_of_a_target_are_said_with_the_devices_too_small_for_them(
    memory: float | None, says: str
) -> None:
    lab = replace(LAB, chips=(replace(CHIPS[0], memory=memory),), dtype=Dtype.BF16, limits=WHOLE)
    (line,) = [line for line in export(lab.plan(), "megatron").lost if "masters" in line]
    assert "18 bytes per parameter instead of 8" in line
    assert says in line
    plain = export(replace(lab, dtype=Dtype.FP32, chips=CHIPS[:1]).plan(), "megatron")
    assert not any("masters" in line for line in plain.lost)


def test_fewer_groups_of_queries_than_devices_that_share_them_are_said() -> None:
    model = replace(LAB.model, num_heads=2, num_kv_heads=1)
    lab = replace(LAB, chips=CHIPS[:1], model=model, limits=PlanLimits(tp=(2,)))
    assert any("1 groups of queries over 2" in x for x in export(lab.plan(), "megatron").lost)
    lab = replace(lab, limits=PlanLimits(tp=(1,)))
    assert not any("groups of queries" in x for x in export(lab.plan(), "megatron").lost)


def test_where_nothing_fits_within_the_words_of_a_target_that_is_said() -> None:
    """Here since it is planned again for smaller devices; in truth since lanes or zero bubble were what made it fit."""
    best = LAB.plan()
    other = replace(LAB, chips=tuple(replace(chips, memory=1e5) for chips in CHIPS))
    with pytest.raises(ConfigError, match="within its words no split fits") as caught:
        export_within(best, "megatron", again_in(other))
    assert caught.value.hint


def test_shared_updates_are_the_targets_distributed_optimizer() -> None:
    best = replace(LAB, chips=CHIPS[:1], limits=PlanLimits(zero=(1,))).plan()
    assert "--use-distributed-optimizer\n" in export(best, "megatron").text
    assert "use_distributed_optimizer: true\n" in export(best, "flagscale").text
    whole = replace(LAB, chips=CHIPS[:1]).plan()
    assert "distributed" not in export(whole, "megatron").text
