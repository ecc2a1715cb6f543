"""Shared updates give what whole ones give, with each moment on one rank, and last as long as simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrun import arch
from hetrun.model import ModelSpec, Order, Plan
from hetrun.schedule import simulate_step
from tests.dist.plans import Pipeline, make_plan
from tests.dist.training import largest_difference, train_all, train_reference

pytestmark = pytest.mark.dist

FOUR = ModelSpec(num_layers=4, hidden_size=16, num_heads=4, ffn_size=24, vocab_size=257)
TIED = replace(FOUR, tied_embeddings=True)
PLANS = {
    "unequal-depth": (
        Pipeline((3, 1), 2, 4, order=Order.ZERO_BUBBLE, more_window=1),
        Pipeline((4,), 1, 3),
        Pipeline((4,), 2, 1),
    ),
    "real-cut-lanes-and-unequal-tp": (
        Pipeline((2, 3), 1, 6, cuts=(1.4,), lanes=(2, 1), more_window=1),
        Pipeline((4,), 1, 2, tp=(2,)),
    ),
}


def shared(plan: Plan) -> Plan:
    """The same plan with shared updates."""
    replicas = tuple(replace(replica, zero=1) for replica in plan.split.replicas)
    return replace(plan, split=replace(plan.split, replicas=replicas))


@pytest.mark.parametrize(
    ("name", "model"), [("unequal-depth", TIED), ("real-cut-lanes-and-unequal-tp", FOUR)]
)
def test_shared_updates_train_like_one_process_and_last_as_simulated(
    name: str, model: ModelSpec, tmp_path: Path
) -> None:
    plan = shared(make_plan(PLANS[name], model=model))
    reference = train_reference(plan, is_ragged=True)
    answers = train_all(plan, tmp_path, is_ragged=True)
    assert max(reference.gradient_norms) > 0.5  # clipping was at work
    for answer in answers:
        assert answer.losses == pytest.approx(reference.losses, rel=1e-11)
        assert answer.gradient_norms == pytest.approx(reference.gradient_norms, rel=1e-9)
    assert largest_difference(answers, reference) < 1e-10
    assert sum(answer.num_moments for answer in answers) == arch.total_parameters(model)
    run = simulate_step(
        plan.split.ranks, plan.split.replicas, plan.links, model, plan.recipe.train.dtype
    )
    for answer, expected in zip(answers, run.rank_spans, strict=True):
        assert answer.step_s == pytest.approx([run.cost.step_s] * 20, rel=1e-6)
        for done in (answer.spans[0], answer.spans[-1]):
            assert [(s.kind, s.microbatch) for s in done] == [
                (s.kind, s.microbatch) for s in expected
            ]
            times = [(s.start_s, s.end_s) for s in expected]
            for span, (start_s, end_s) in zip(done, times, strict=True):
                assert (span.start_s, span.end_s) == pytest.approx((start_s, end_s), rel=1e-6)
