"""bf16-mixed beside everything that moves parameters, gradients or activations: shared layers, shared updates, recomputation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.model import Dtype, ModelSpec, Order, Plan
from hetrun.schedule import simulate_step
from tests.dist.plans import Pipeline, make_plan, with_train
from tests.dist.training import train_all, train_reference

pytestmark = pytest.mark.dist

FOUR = ModelSpec(
    num_layers=4, hidden_size=16, num_heads=4, ffn_size=24, vocab_size=257, tied_embeddings=True
)


def _recomputing_and_sharing_updates(plan: Plan) -> Plan:
    """The first replica computes its forwards again; all share out updates."""
    first, *others = plan.split.replicas
    stages = tuple(replace(stage, recompute=True) for stage in first.stages)
    replicas = [replace(first, stages=stages), *others]
    zero = tuple(replace(replica, zero=1) for replica in replicas)
    return replace(plan, split=replace(plan.split, replicas=zero))


def test_mixed_precision_with_shared_layers_and_updates_trains_like_one_process(
    tmp_path: Path,
) -> None:
    pipelines = (
        Pipeline((4,), 1, 3, tp=(2,)),
        Pipeline((2, 2), 1, 4, order=Order.ZERO_BUBBLE, more_window=2),
    )
    plan = _recomputing_and_sharing_updates(
        make_plan(pipelines, model=FOUR, dtype=Dtype.BF16_MIXED, steps=5)
    )
    reference = train_reference(plan, is_ragged=True)
    exact = train_reference(with_train(plan, dtype=Dtype.FP32), is_ragged=True)
    answers = train_all(plan, tmp_path, is_ragged=True)
    for answer in answers:
        assert answer.losses == pytest.approx(reference.losses, rel=2e-3)
        assert answer.losses == pytest.approx(exact.losses, rel=1e-2)
        assert answer.losses != pytest.approx(exact.losses, rel=1e-6)
    run = simulate_step(plan.split.ranks, plan.split.replicas, plan.links, FOUR, Dtype.BF16_MIXED)
    assert answers[0].step_s == pytest.approx([run.cost.step_s] * 5, rel=1e-6)
