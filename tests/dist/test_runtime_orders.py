"""Zero bubble, real cuts and lanes change who computes what and when: not what, and as long as simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.model import ModelSpec, Order
from hetrun.schedule import simulate_step
from tests.dist.plans import MODEL, Pipeline, make_plan
from tests.dist.training import largest_difference, train_all, train_reference

pytestmark = pytest.mark.dist

TIED = replace(MODEL, tied_embeddings=True)
ZERO = Order.ZERO_BUBBLE
WHOLE = Pipeline((8,), 2, 3)
PLANS = {
    "zero-bubble-beside-a-replica": (Pipeline((5, 2, 1), 2, 7, order=ZERO, more_window=2), WHOLE),
    "zero-bubble-with-real-cuts": (
        Pipeline((4, 4, 2), 1, 9, order=ZERO, cuts=(3.4, 6.55), more_window=2),
    ),
    "1f1b-with-real-cuts": (Pipeline((4, 4, 2), 1, 9, cuts=(3.4, 6.55), more_window=1), WHOLE),
    "lanes-2-1-3": (Pipeline((3, 2, 3), 1, 10, lanes=(2, 1, 3)),),
    "zero-bubble-with-lanes-and-cuts": (
        Pipeline((4, 5), 2, 2, order=ZERO, cuts=(3.4,), lanes=(1, 3), more_window=1),
    ),
}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("zero-bubble-beside-a-replica", TIED),
        ("zero-bubble-with-real-cuts", MODEL),
        ("1f1b-with-real-cuts", MODEL),
        ("lanes-2-1-3", TIED),
        ("zero-bubble-with-lanes-and-cuts", MODEL),  # and a lane that gets no microbatch
    ],
)
def test_any_order_trains_like_one_process_and_lasts_as_simulated(
    name: str, model: ModelSpec, tmp_path: Path
) -> None:
    plan = make_plan(PLANS[name], model=model)
    reference = train_reference(plan, is_ragged=True)
    answers = train_all(plan, tmp_path, is_ragged=True)
    assert max(reference.gradient_norms) > 0.5  # clipping was at work
    assert reference.losses[-1] < reference.losses[0] - 0.5
    for answer in answers:
        assert answer.losses == pytest.approx(reference.losses, rel=1e-11)
        assert answer.gradient_norms == pytest.approx(reference.gradient_norms, rel=1e-9)
    assert largest_difference(answers, reference) < 1e-10
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
