"""Where vendors have several holders of a gradient, it crosses between vendors once; sums and modelled time stay right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hetrun.model import Plan
from hetrun.runtime.trainer import per_valid_token
from hetrun.schedule import simulate_step
from tests.dist.plans import MODEL, Pipeline, make_plan
from tests.dist.ranks import run_ranks
from tests.dist.training import RankAnswer, largest_difference, train_rank, train_reference

pytestmark = pytest.mark.dist

STEPS = 5
Crossed = list[tuple[tuple[int, ...], int]]  # ranks and elements of each sum between vendors


def train_and_watch(rank: int, store_path: Path, plan: Plan) -> tuple[RankAnswer, Crossed]:
    """Train one rank; note its all-reduces."""
    crossed: Crossed = []
    plain = dist.all_reduce

    def watched(tensor: Any, *, group: Any, **options: Any) -> Any:
        crossed.append((tuple(dist.get_process_group_ranks(group)), tensor.numel()))
        return plain(tensor, group=group, **options)

    dist.all_reduce = watched
    return train_rank(rank, store_path, plan, True, per_valid_token), crossed


def _plan(pipelines: tuple[Pipeline, ...], vendors: str) -> Plan:
    plan = make_plan(pipelines, model=replace(MODEL, tied_embeddings=True), steps=STEPS)
    ranks = zip(plan.split.ranks, vendors, strict=True)
    named = tuple(replace(rank, vendor=vendor) for rank, vendor in ranks)
    return replace(plan, split=replace(plan.split, ranks=named))


@pytest.mark.parametrize(
    ("pipelines", "vendors"),
    [
        pytest.param(
            (*(Pipeline((8,), 2, 2),) * 2, *(Pipeline((8,), 1, 3),) * 3), "rgrgg", id="2-and-3"
        ),
        pytest.param(
            (Pipeline((5, 3), 2, 3), Pipeline((2, 6), 1, 4)), "rrrg", id="3-and-1-of-pipelines"
        ),
        pytest.param(
            (Pipeline((8,), 2, 2, tp=(2,)), Pipeline((8,), 1, 3), Pipeline((8,), 1, 2)),
            "rrrg",
            id="shared-layers",
        ),
    ],
)
def test_gradients_cross_between_vendors_once(
    pipelines: tuple[Pipeline, ...], vendors: str, tmp_path: Path
) -> None:
    plan = _plan(pipelines, vendors)
    split, recipe = plan.split, plan.recipe
    reference = train_reference(plan, is_ragged=True)
    replies = run_ranks(train_and_watch, len(vendors), tmp_path, plan)
    answers = [answer for answer, _ in replies]
    assert largest_difference(answers, reference) < 1e-10
    run = simulate_step(split.ranks, split.replicas, plan.links, recipe.model, recipe.train.dtype)
    for answer in answers:
        assert answer.losses == pytest.approx(reference.losses, rel=1e-11)
        assert answer.step_s == pytest.approx([run.cost.step_s] * STEPS, rel=1e-6)
    groups = {ranks for _, crossed in replies for ranks, _ in crossed}
    between = [[vendors[rank] for rank in ranks] for ranks in groups]
    assert ["g", "r"] in map(sorted, between)
    assert all(len(set(names)) in (1, len(names)) for names in between)


def test_each_element_crosses_once_whatever_the_number_of_holders(tmp_path: Path) -> None:
    plan = _plan((Pipeline((8,), 1, 2),) * 4, "rrgg")
    replies = run_ranks(train_and_watch, 4, tmp_path, plan)
    elements = sum(map(len, replies[0][0].parameters.values()))
    sent = [sum(size for _, size in crossed) for _, crossed in replies]
    assert sum(sent[:2]) == sum(sent[2:])
    assert STEPS * elements <= sum(sent[:2]) < 1.01 * STEPS * elements
