"""What check_split refuses: each rule is broken once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hetrun.model import GIB, LinkKind, Plan, RankPlan, ReplicaPlan, Split, StagePlan
from hetrun.planner.check import check_split
from hetrun.planner.recost import recost
from tests.unit.planner_lab import LINKS, MODEL, WHOLE, Chips, Lab

LAB = Lab(
    chips=[
        Chips(vendor="x", num_devices=2, gflops=2.0, memory=16 * GIB),
        Chips(vendor="y", num_devices=2, gflops=1.2, memory=32 * GIB),
    ],
    batch=24,
    rows=(1,),
    limits=WHOLE,
    links=tuple(
        replace(link, bytes_per_s=4e6) if link.kind is LinkKind.ACROSS else link for link in LINKS
    ),
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two replicas of two stages (the narrow link makes pipelines worth while)."""
    result = LAB.plan()
    assert [len(replica.stages) for replica in result.split.replicas] == [2, 2]
    return result


def with_rank(split: Split, number: int, **changes: object) -> Split:
    ranks: list[RankPlan] = list(split.ranks)
    ranks[number] = replace(ranks[number], **changes)  # type: ignore[arg-type]
    return replace(split, ranks=tuple(ranks))


def with_replica(split: Split, number: int, **changes: object) -> Split:
    replicas: list[ReplicaPlan] = list(split.replicas)
    replicas[number] = replace(replicas[number], **changes)  # type: ignore[arg-type]
    return replace(split, replicas=tuple(replicas))


def with_stage(split: Split, number: int, index: int, **changes: object) -> Split:
    stages: list[StagePlan] = list(split.replicas[number].stages)
    stages[index] = replace(stages[index], **changes)  # type: ignore[arg-type]
    return with_replica(split, number, stages=tuple(stages))


BROKEN: list[tuple[str, Callable[[Split], Split]]] = [
    ("rank 7 at place 1", lambda s: with_rank(s, 1, rank=7)),
    ("no device", lambda s: with_rank(s, 1, device_index=9)),
    ("is not", lambda s: with_rank(s, 1, vendor="y")),
    ("taken twice", lambda s: with_rank(s, 1, device_index=0)),
    ("local rank gap", lambda s: with_rank(s, 1, local_rank=2)),
    ("local rank not 0", lambda s: with_rank(s, 0, local_rank=1)),
    ("stages hold ranks", lambda s: with_stage(s, 0, 0, ranks=(0, 1))),
    ("first row", lambda s: with_replica(s, 1, first_row=0)),
    ("microbatches of 2 rows", lambda s: with_replica(s, 0, microbatch_rows=2)),
    ("replicas take 13 rows", lambda s: with_replica(s, 1, num_microbatches=1)),
    ("first layer", lambda s: with_stage(s, 0, 1, first_layer=0)),
    ("holds", lambda s: with_stage(s, 0, 1, num_layers=1)),
    ("embedding", lambda s: with_stage(s, 0, 1, has_embedding=True)),
    ("head", lambda s: with_stage(s, 0, 0, has_head=True)),
    ("bytes", lambda s: with_stage(s, 0, 0, memory_limit_bytes=1)),
    ("wider than upstream", lambda s: with_stage(s, 0, 1, window=9)),
    ("says", lambda s: with_rank(s, 0, replica=1, stage=1)),
    ("evaluated anew", lambda s: replace(s, cost=replace(s.cost, step_s=1.000001 * s.cost.step_s))),
]


@pytest.mark.parametrize(("text", "breaks"), BROKEN, ids=[text for text, _ in BROKEN])
def test_broken_plan_is_refused(plan: Plan, text: str, breaks: Callable[[Split], Split]) -> None:
    check_split(plan.split, LAB.facts, LAB.profile, LAB.recipe)
    with pytest.raises(ValueError, match=text):
        check_split(breaks(plan.split), LAB.facts, LAB.profile, LAB.recipe)


def test_host_in_two_places_is_refused(plan: Plan) -> None:
    ranks = list(plan.split.ranks)
    order = [ranks[0], ranks[2], ranks[1], ranks[3]]
    mixed = tuple(replace(rank, rank=i, local_rank=0) for i, rank in enumerate(order))
    with pytest.raises(ValueError, match="split up"):
        check_split(replace(plan.split, ranks=mixed), LAB.facts, LAB.profile, LAB.recipe)


def test_device_without_figures_cannot_be_evaluated(plan: Plan) -> None:
    profile = replace(LAB.profile, devices=LAB.profile.devices[1:])
    with pytest.raises(ValueError, match="no figures for x x-chip"):
        recost(plan.split, profile, LAB.recipe)


def test_link_without_figures_cannot_be_evaluated(plan: Plan) -> None:
    profile = replace(LAB.profile, links=LAB.profile.links[:2])
    with pytest.raises(ValueError, match="no link across"):
        recost(plan.split, profile, LAB.recipe)


def test_pipeline_whose_windows_stall_is_found() -> None:
    """A stage that wants two forwards first starves when upstream sends its second after a backward."""
    lab = Lab(chips=[LAB.chips[0]], batch=4, rows=(1,), model=MODEL)
    split = lab.plan().split
    stage = split.replicas[0].stages[0]
    assert stage.num_layers == 10
    first = replace(stage, num_layers=5, has_head=False, window=1)
    second = replace(stage, ranks=(1,), first_layer=5, num_layers=5, has_embedding=False, window=2)
    replica = replace(split.replicas[0], num_microbatches=4, stages=(first, second))
    with pytest.raises(ValueError, match="stalls"):
        recost(replace(split, replicas=(replica,)), lab.profile, lab.recipe)
