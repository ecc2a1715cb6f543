"""Ranks that share layers compute what one rank would, whatever stands beside or behind them, and as long as simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.model import ModelSpec, Order, Plan, StagePlan
from hetrun.schedule import simulate_step
from tests.dist.plans import Pipeline, make_plan
from tests.dist.training import largest_difference, train_all, train_reference

pytestmark = pytest.mark.dist

FOUR = ModelSpec(num_layers=4, hidden_size=16, num_heads=4, ffn_size=24, vocab_size=257)
TIED = replace(FOUR, tied_embeddings=True)
ZERO = Order.ZERO_BUBBLE
PLANS = {
    "tp-2-1-4-over-replicas": (
        Pipeline((4,), 2, 2, tp=(2,)),
        Pipeline((4,), 1, 3),
        Pipeline((4,), 1, 2, tp=(4,)),
    ),
    "tp-1-4-2-along-a-pipeline": (
        Pipeline((1, 2, 1), 1, 6, order=ZERO, tp=(1, 4, 2), more_window=2),
    ),
    "real-cut-and-lanes": (
        Pipeline((2, 3), 1, 6, cuts=(1.4,), lanes=(2, 1), tp=(2, 1), more_window=1),
        Pipeline((4,), 1, 2, tp=(2,)),
    ),
}


def recomputing(plan: Plan) -> Plan:
    """The same plan; all stages run their forwards again."""

    def again(stage: StagePlan) -> StagePlan:
        return replace(stage, recompute=True)

    replicas = [replace(r, stages=tuple(map(again, r.stages))) for r in plan.split.replicas]
    return replace(plan, split=replace(plan.split, replicas=tuple(replicas)))


@pytest.mark.parametrize(
    ("name", "model", "again"),
    [
        ("tp-2-1-4-over-replicas", FOUR, False),
        ("tp-1-4-2-along-a-pipeline", TIED, False),
        ("real-cut-and-lanes", TIED, True),
    ],
)
def test_shared_layers_train_like_one_process_and_last_as_simulated(
    name: str, model: ModelSpec, again: bool, tmp_path: Path
) -> None:
    plan = make_plan(PLANS[name], model=model, steps=8)
    plan = recomputing(plan) if again else plan
    reference = train_reference(plan, is_ragged=True)
    answers = train_all(plan, tmp_path, is_ragged=True)
    assert max(reference.gradient_norms) > 0.5  # clipping was at work
    for answer in answers:
        assert answer.losses == pytest.approx(reference.losses, rel=1e-11)
        assert answer.gradient_norms == pytest.approx(reference.gradient_norms, rel=1e-9)
    assert largest_difference(answers, reference) < 1e-10
    run = simulate_step(
        plan.split.ranks, plan.split.replicas, plan.links, model, plan.recipe.train.dtype
    )
    for answer, expected in zip(answers, run.rank_spans, strict=True):
        assert answer.step_s == pytest.approx([run.cost.step_s] * 8, rel=1e-6)
        for done in answer.spans:
            assert [(s.kind, s.microbatch) for s in done] == [
                (s.kind, s.microbatch) for s in expected
            ]
            times = [(s.start_s, s.end_s) for s in expected]
            for span, (start_s, end_s) in zip(done, times, strict=True):
                assert (span.start_s, span.end_s) == pytest.approx((start_s, end_s), rel=1e-6)
