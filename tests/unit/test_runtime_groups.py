"""How long a rank waits for others, and which device it opens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrun.model import Plan, RankPlan
from hetrun.runtime.device import local_index
from hetrun.runtime.groups import collective_timeout
from tests.dist.plans import Pipeline, make_plan

PIPELINES = (Pipeline((3, 3, 2), 1, 4),)


def _with_step(plan: Plan, step_s: float) -> Plan:
    cost = replace(plan.split.cost, step_s=step_s)
    return replace(plan, split=replace(plan.split, cost=cost))


@pytest.mark.parametrize(("step_s", "timeout_s"), [(0.1, 60.0), (3.0, 60.0), (7.5, 150.0)])
def test_real_plan_waits_twenty_steps_but_a_minute(step_s: float, timeout_s: float) -> None:
    plan = _with_step(make_plan(PIPELINES, emulated=False), step_s)
    assert collective_timeout(plan).total_seconds() == timeout_s


def test_emulated_plan_waits_as_the_recipe_says() -> None:
    plan = _with_step(make_plan(PIPELINES), 1e6)  # modelled seconds say nothing of real ones
    assert collective_timeout(plan).total_seconds() == 300
    launch = replace(plan.recipe.launch, step_timeout_s=400.0)
    plan = replace(plan, recipe=replace(plan.recipe, launch=launch))
    assert collective_timeout(plan).total_seconds() == 400


def _rank(rank: int, **changes: object) -> RankPlan:
    values = {**_BASE, "rank": rank, **changes}
    return RankPlan(**values)  # type: ignore[arg-type]


_BASE = {
    "host": "a", "local_rank": 0, "device_index": 0, "vendor": "red", "model": "r1",
    "replica": 0, "stage": 0, "torch_device": "xpu",
}  # fmt: skip


def test_hidden_devices_leave_number_zero() -> None:
    ranks = [_rank(0, visible_env="X", visible_id="0"), _rank(1, visible_env="X", visible_id="1")]
    assert [local_index(ranks, rank) for rank in ranks] == [0, 0]


def test_open_devices_are_counted_by_host_and_kind() -> None:
    ranks = [
        _rank(0),
        _rank(1, torch_device="cpu", emulated=True),
        _rank(2),
        _rank(3, host="b"),
        _rank(4, host="b", torch_device="npu"),
        _rank(5, host="b"),
    ]
    assert [local_index(ranks, rank) for rank in ranks] == [0, 0, 1, 0, 0, 1]
