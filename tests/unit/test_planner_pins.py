"""Pinned plans: the pins are kept, their price is named, and a pin that cannot be kept is named too."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.errors import ConfigError, NoPlanError
from hetrun.model import Pins, Plan, PlanLimits, Role
from hetrun.recipe import load_pins
from tests.unit.planner_lab import FREE_LINKS, Chips, Lab, small_model

pytestmark = pytest.mark.slow

MODEL = small_model(8)
CHIPS = (
    Chips(vendor="emu-a", num_devices=2, layer_s=1.0),
    Chips(vendor="emu-b", num_devices=2, layer_s=3.0),
)


def planned(pins: Pins | None, chips: tuple[Chips, ...] = CHIPS) -> Plan:
    limits = PlanLimits(pins=pins)
    lab = Lab(chips=chips, model=MODEL, batch=24, rows=(1, 2), links=FREE_LINKS, limits=limits)
    return lab.plan()


def vendors_of(plan: Plan) -> list[list[str]]:
    """Vendor per stage of each replica."""
    return [
        [plan.split.ranks[stage.ranks[0]].vendor for stage in replica.stages]
        for replica in plan.split.replicas
    ]


def layers_of(plan: Plan) -> list[list[int]]:
    return [[stage.num_layers for stage in replica.stages] for replica in plan.split.replicas]


def test_pinned_layers_are_those_of_every_replica() -> None:
    plan = planned(Pins(layers=(6, 2)))
    assert layers_of(plan) == [[6, 2]] * len(plan.split.replicas)


@pytest.mark.parametrize(("role", "place"), [(Role.FIRST, 0), (Role.LAST, -1)])
@pytest.mark.parametrize("vendor", ["emu-a", "emu-b"])
def test_vendor_stands_where_its_role_says(vendor: str, role: Role, place: int) -> None:
    assert {line[place] for line in vendors_of(planned(Pins(roles={vendor: role})))} == {vendor}


def test_idle_vendor_works_nowhere_and_is_named_idle() -> None:
    plan = planned(Pins(roles={"emu-b": Role.IDLE}))
    assert {vendor for line in vendors_of(plan) for vendor in line} == {"emu-a"}
    assert plan.idle_devices == ("emu-b-0/0", "emu-b-0/1")


def test_a_vendor_that_pins_leave_alone_is_not_said_to_be_quickest() -> None:
    """Mixing pays here: the pins are why it is not done."""
    assert "Mixing pays" in planned(None).verdict
    verdict = planned(Pins(roles={"emu-b": Role.IDLE})).verdict
    assert verdict.startswith("The pins leave emu-a alone")
    assert "does not pay" not in verdict


@pytest.mark.parametrize("order", [("emu-a", "emu-b"), ("emu-b", "emu-a")])
def test_order_is_kept_where_vendors_share_a_pipeline(order: tuple[str, ...]) -> None:
    """One device of each and two stages: they have to share."""
    one_each = tuple(replace(chips, num_devices=1) for chips in CHIPS)
    plan = planned(Pins(order=order, layers=(5, 3)), one_each)
    assert vendors_of(plan) == [list(order)]


def test_rows_per_replica_are_those_pinned() -> None:
    plan = planned(Pins(rows=(8, 16)))
    assert sorted(replica.num_rows for replica in plan.split.replicas) == [8, 16]


def with_tp(pins: Pins | None) -> Lab:
    limits = PlanLimits(tp=(1, 2), pins=pins)
    return Lab(chips=CHIPS, model=MODEL, batch=24, rows=(1, 2), links=FREE_LINKS, limits=limits)


def test_pinned_tp_is_that_of_every_stage_of_the_vendor_and_has_its_price() -> None:
    free, plan = with_tp(None).plan(), with_tp(Pins(tp={"emu-a": 2})).plan()
    stages = [stage for replica in plan.split.replicas for stage in replica.stages]
    sizes = {(plan.split.ranks[s.ranks[0]].vendor, len(s.ranks)) for s in stages}
    assert {size for vendor, size in sizes if vendor == "emu-a"} == {2}
    price = plan.split.cost.step_s / free.split.cost.step_s - 1
    assert price > 0
    assert f"The pins cost {price:.2%}" in plan.verdict


def test_tp_is_pinned_together_with_layers() -> None:
    plan = with_tp(Pins(tp={"emu-a": 2, "emu-b": 1}, layers=(6, 2))).plan()
    assert layers_of(plan) == [[6, 2]] * len(plan.split.replicas)
    for replica in plan.split.replicas:
        for stage in replica.stages:
            vendor = plan.split.ranks[stage.ranks[0]].vendor
            assert len(stage.ranks) == {"emu-a": 2, "emu-b": 1}[vendor]


def test_tp_that_the_recipe_does_not_offer_is_named() -> None:
    with pytest.raises(NoPlanError, match="tp 4 of emu-a, and emu-a emu-a-chip is planned with 1"):
        with_tp(Pins(tp={"emu-a": 4})).plan()


def with_lanes(pins: Pins | None) -> Lab:
    """Three quick devices: two lanes leave one idle."""
    chips = (replace(CHIPS[0], num_devices=3), CHIPS[1])
    model, limits = small_model(4), PlanLimits(lanes=(1, 2), pins=pins)
    return Lab(chips=chips, model=model, batch=12, rows=(1,), links=FREE_LINKS, limits=limits)


def test_pinned_lanes_are_those_of_every_stage_of_the_vendor_and_have_their_price() -> None:
    wanted = {"emu-a": 2, "emu-b": 2}
    free, plan = with_lanes(None).plan(), with_lanes(Pins(lanes=wanted)).plan()
    stages = [stage for replica in plan.split.replicas for stage in replica.stages]
    assert {stage.lanes for stage in stages} == {2}
    price = plan.split.cost.step_s / free.split.cost.step_s - 1
    assert price > 0
    assert f"The pins cost {price:.2%}" in plan.verdict


def test_lanes_are_pinned_together_with_layers() -> None:
    plan = with_lanes(Pins(lanes={"emu-a": 1, "emu-b": 2}, layers=(3, 1))).plan()
    assert layers_of(plan) == [[3, 1]] * len(plan.split.replicas)
    lanes = {
        (plan.split.ranks[stage.ranks[0]].vendor, stage.lanes)
        for replica in plan.split.replicas
        for stage in replica.stages
    }
    assert lanes <= {("emu-a", 1), ("emu-b", 2)}


def test_lanes_that_cannot_be_had_are_named() -> None:
    """One device of each, and more lanes than that are not to be had."""
    one_each = tuple(replace(chips, num_devices=1) for chips in CHIPS)
    lab = replace(with_lanes(Pins(lanes={"emu-b": 2})), chips=one_each)
    with pytest.raises(
        NoPlanError, match="lanes 2 of emu-b, and emu-b emu-b-chip is planned with 1"
    ):
        lab.plan()


def test_price_is_the_step_against_the_free_optimum() -> None:
    free = planned(None)
    pinned = planned(Pins(layers=(1, 7)))
    ratio = pinned.split.cost.step_s / free.split.cost.step_s
    assert ratio > 1.1
    assert f"The pins cost {ratio - 1:.2%}" in pinned.verdict
    assert "pins" not in free.verdict


def test_pins_that_the_optimum_keeps_are_free() -> None:
    free = planned(None)
    rows = tuple(replica.num_rows for replica in free.split.replicas)
    pinned = planned(Pins(rows=rows))
    assert pinned.split.cost.step_s == pytest.approx(free.split.cost.step_s, rel=1e-9)
    assert "The pins cost 0.00%" in pinned.verdict


FOUR = Lab(
    chips=[
        Chips(vendor=f"emu-{name}", num_devices=4, layer_s=layer_s, memory=memory, per_host=4)
        for name, layer_s, memory in zip(
            "abcd", (1.0, 1.6, 2.9, 4.5), (6e6, 4e6, 4e6, 2e6), strict=True
        )
    ],
    model=small_model(20),
    batch=64,
    rows=(1,),
    links=FREE_LINKS,
)


def test_pins_that_the_free_plan_keeps_are_free_with_many_devices_too() -> None:
    """What keeps them is more than the shapes that pins enumerated: four vendors in a row."""
    free = FOUR.plan()
    line = tuple(dict.fromkeys(vendors_of(free)[0]))
    assert len(line) == 4
    pins = Pins(order=line, roles={line[0]: Role.FIRST, line[-1]: Role.LAST})
    pinned = replace(FOUR, limits=PlanLimits(pins=pins)).plan()
    assert pinned.split.cost.step_s == pytest.approx(free.split.cost.step_s)
    assert "The pins cost 0.00%" in pinned.verdict


def test_an_order_of_vendors_costs_no_more_than_to_leave_one_of_them_idle() -> None:
    line = tuple(dict.fromkeys(vendors_of(FOUR.plan())[0]))
    other = (line[1], line[0])  # not as the free plan has it
    steps = [
        replace(FOUR, limits=PlanLimits(pins=pins)).plan().split.cost.step_s
        for pins in (Pins(order=other), Pins(roles={line[0]: Role.IDLE}))
    ]
    assert steps[0] <= steps[1] * 1.001


def test_a_plan_with_pins_is_no_quicker_than_the_free_one_beside_it() -> None:
    """Four equal devices, few rows: with zero bubble two pipelines beat one stage each, which the search may miss."""
    chips = (replace(CHIPS[0], num_devices=1), Chips(vendor="emu-b", num_devices=3, layer_s=1.0))
    limits = PlanLimits(pins=Pins(layers=(3, 3)))
    lab = Lab(
        chips=chips, model=small_model(6), batch=6, rows=(1,), links=FREE_LINKS, limits=limits
    )
    plan = lab.plan()
    found = re.search(
        r"The pins cost ([\d.]+)%: ([\d.]+) s per step against ([\d.]+) s", plan.verdict
    )
    assert found is not None
    price, pinned_s, free_s = map(float, found.groups())
    assert pinned_s >= free_s
    assert price == pytest.approx(100 * (pinned_s / free_s - 1), abs=0.01)


def test_baselines_are_not_pinned() -> None:
    """What a vendor reaches alone is its best, whatever the user insists on for the mix."""
    one = (CHIPS[0],)
    assert planned(Pins(layers=(7, 1)), one).baselines == planned(None, one).baselines


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        (Pins(layers=(6, 3)), r"layers \[6, 3\] are 9, the model has 8"),
        (Pins(rows=(8, 8)), r"rows \[8, 8\] are 16, the batch has 24"),
        (Pins(roles={"emu-c": Role.IDLE}), "roles names emu-c"),
        (Pins(order=("emu-a", "emu-c")), "order names emu-c"),
        (Pins(roles={"emu-a": Role.IDLE, "emu-b": Role.IDLE}), "every vendor idle"),
        (Pins(layers=(2, 2, 2, 1, 1)), r"layers \[2, 2, 2, 1, 1\] fit no 5 devices"),
        (Pins(rows=(5, 5, 5, 5, 4)), "rows of 5 replicas, and there are 4 devices"),
        (Pins(rows=(8, 8, 8), layers=(4, 4)), "no replicas take rows"),
        (
            Pins(roles={"emu-a": Role.FIRST, "emu-b": Role.LAST}, layers=(8,)),
            "emu-b last leaves none of",
        ),
    ],
)
def test_pin_that_cannot_be_kept_is_named(pins: Pins, says: str) -> None:
    with pytest.raises(NoPlanError, match=says) as caught:
        planned(pins)
    assert caught.value.hint


def test_layers_that_memory_cannot_hold_are_named() -> None:
    small = tuple(replace(chips, memory=2.6e6) for chips in CHIPS)
    assert layers_of(planned(Pins(layers=(2, 2, 2, 2)), small)) == [[2, 2, 2, 2]]
    with pytest.raises(NoPlanError, match=r"layers \[5, 1, 1, 1\] fit no 4"):
        planned(Pins(layers=(5, 1, 1, 1)), small)


def test_pins_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "pins.yaml"
    path.write_text("layers: [6, 2]\norder: [emu-a, emu-b]\nroles: {emu-b: last}\nrows: [24]\n")
    assert load_pins(path) == Pins(
        layers=(6, 2), order=("emu-a", "emu-b"), roles={"emu-b": Role.LAST}, rows=(24,)
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layer: [1]\n", "did you mean layers?"),
        ("layers: [0, 8]\n", "need 1 each"),
        ("order: [a, a]\n", "need each vendor once"),
        ("roles: {a: first, b: first}\n", "cannot both be first"),
        ("roles: {a: leading}\n", "idle"),
    ],
)
def test_wrong_pins_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "pins.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_pins(path)


def test_pinned_layers_go_with_shared_layers_and_recomputation() -> None:
    """Devices of one vendor share layers alike in a pipeline, whatever else may be chosen."""
    chips = tuple(replace(chips, num_devices=4, per_host=4, layer_s=None) for chips in CHIPS)
    limits = PlanLimits(tp=(1, 2), recompute=True, pins=Pins(layers=(3, 3, 2)))
    plan = Lab(chips=chips, model=MODEL, batch=24, rows=(1,), limits=limits).plan()
    assert layers_of(plan) == [[3, 3, 2]] * len(plan.split.replicas)
    for replica in plan.split.replicas:
        shared: dict[str, set[int]] = {}
        for stage in replica.stages:
            vendor = plan.split.ranks[stage.ranks[0]].vendor
            shared.setdefault(vendor, set()).add(len(stage.ranks))
        assert all(len(sizes) == 1 for sizes in shared.values())
