"""Ranks that hold the same parameters notice when one of them is not the same any more, and can be made equal again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetrun.model import ComparisonEvent, Event, Plan, WarningEvent
from hetrun.runtime.loop import Hooks, join, train
from hetrun.runtime.trainer import Trainer
from tests.dist.plans import Pipeline, make_plan, with_train
from tests.dist.ranks import run_ranks
from tests.dist.training import open_test_stream

pytestmark = pytest.mark.dist

# Layer 3 on ranks 0 and 1 (a real cut) and on 2; the others on two ranks each.
PLAN = with_train(
    make_plan((Pipeline((4, 5), 1, 3, cuts=(3.4,), more_window=1), Pipeline((8,), 1, 2)), steps=7),
    compare_every=2,
)


def _train(rank: int, store_path: Path, plan: Plan) -> tuple[list[Event], list[str]]:
    """Train with rank 2 nudging two parameters before step 3; return events, and the sum of bits of each unit."""
    join(plan, plan.split.ranks[rank], dist.FileStore(str(store_path), len(plan.split.ranks)))
    trainer = Trainer(plan, rank, stream=open_test_stream(plan, False), device=torch.device("cpu"))
    events: list[Event] = []

    def before_step(step: int) -> None:
        if (rank, step) == (2, 3):
            named = dict(trainer.stage.named_parameters())
            named["layer.3.q.weight"].data[0, 0] += 0.25
            named["head.norm.weight"].data[3] -= 0.125

    train(trainer, Hooks(write=events.append, before_step=before_step))
    held = [f"{name} {p.tolist()}" for name, p in trainer.stage.named_parameters()]
    return events, held


def _comparisons(events: list[Event]) -> dict[int, list[tuple[str, tuple[tuple[int, ...], ...]]]]:
    return {
        event.step: [(one.unit, one.groups) for one in event.drifts]
        for event in events
        if isinstance(event, ComparisonEvent)
    }


def test_a_rank_that_differs_is_named_with_unit_and_size(tmp_path: Path) -> None:
    (zero, _), (one, _), (two, _) = run_ranks(_train, 3, tmp_path, PLAN)
    differs = _comparisons(zero)
    assert sorted(differs) == [1, 3, 5, 6]
    assert differs[1] == []
    assert differs[3] == [("layer.3", ((0, 1), (2,)))]
    assert _comparisons(one)[3] == [("head", ((1,), (2,)))]  # rank 0 does not hold it
    assert _comparisons(two) == {}  # the lowest of no part
    largest = [d.largest for e in one if isinstance(e, ComparisonEvent) for d in e.drifts]
    assert largest[0] == pytest.approx(0.125, rel=0.1)  # one step of training lies between
    (warning, *_) = [event for event in zero if isinstance(event, WarningEvent)]
    assert warning.step == 4
    assert warning.message.startswith(
        "layer.3 differs between ranks 0, 1 (green, red) and rank 2 (blue)"
    )
    parts = {e.num_parts for e in zero if isinstance(e, ComparisonEvent)}
    assert parts == {5}  # embedding, layers 0 to 3


def test_repair_makes_ranks_equal_to_the_bit(tmp_path: Path) -> None:
    answers = run_ranks(_train, 3, tmp_path, with_train(PLAN, repair=True))
    (zero, first), (_, second), (_, whole) = answers
    differs = _comparisons(zero)
    assert [unit for unit, _ in differs[3]] == ["layer.3"]
    assert differs[6] == []
    assert sorted({*first, *second}) == sorted(whole)
    said = [event.message for event in zero if isinstance(event, WarningEvent)]
    assert said[0].endswith("; all took the values of rank 0")


def _broken(rank: int, store_path: Path, plan: Plan) -> list[Event]:
    join(plan, plan.split.ranks[rank], dist.FileStore(str(store_path), len(plan.split.ranks)))
    trainer = Trainer(plan, rank, stream=open_test_stream(plan, False), device=torch.device("cpu"))
    if rank == 1:
        dict(trainer.stage.named_parameters())["layer.5.up.weight"].data[0, 0] = math.nan
    return trainer.compare(0)


def test_a_slice_that_is_not_finite_is_told_by_those_that_hold_it(tmp_path: Path) -> None:
    """Ranks 0 and 2 hold one half of each matrix, 1 and 3 the other."""
    answers = run_ranks(_broken, 4, tmp_path, make_plan((Pipeline((8,), 1, 1, tp=(2,)),) * 2))
    (healthy,) = answers[0]
    assert isinstance(healthy, ComparisonEvent)
    assert healthy.drifts == ()
    (found, warning) = answers[1]
    assert isinstance(found, ComparisonEvent)
    assert [(one.unit, one.groups, one.largest) for one in found.drifts] == [
        ("layer.5", ((1,), (3,)), None)
    ]
    assert isinstance(warning, WarningEvent)
    assert warning.message.endswith("and is not finite")
    assert answers[2:] == [[], []]
