"""Ranks that share layers compute what one rank would, whatever stands beside or behind them, and as long as simulated."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetrun.model import ModelSpec, Order, Plan, StagePlan
from hetrun.runtime.loop import join
from hetrun.runtime.trainer import Trainer
from hetrun.schedule import simulate_step
from tests.dist.plans import Pipeline, make_plan
from tests.dist.ranks import run_ranks
from tests.dist.training import (
    largest_difference,
    open_test_stream,
    train_all,
    train_reference,
)

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


def _gloo_by_another_name(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _train_with_a_library(rank: int, store_path: Path, plan: Plan) -> tuple[str, list[float]]:
    """Train where the ranks' device has a library of its own; return what adds up their shares, and the losses."""
    dist.Backend.register_backend("vendorccl", _gloo_by_another_name, devices=["cpu"])
    dist.Backend.default_device_backend_map["cpu"] = "vendorccl"
    join(plan, plan.split.ranks[rank], dist.FileStore(str(store_path), 3))
    stream = open_test_stream(plan, is_ragged=True)
    trainer = Trainer(plan, rank, stream=stream, device=torch.device("cpu"))
    losses = [trainer.step(step).event.loss for step in range(plan.recipe.train.steps)]
    layer = next(iter(trainer.stage.layer.values()))
    group = getattr(layer, "_group", None)
    return "none" if group is None else dist.get_backend(group), losses


def test_a_vendors_own_library_adds_up_the_shares_of_real_devices(tmp_path: Path) -> None:
    plan = make_plan((Pipeline((3, 1), 1, 4, tp=(2, 1)),), model=FOUR, steps=2, emulated=False)
    answers = run_ranks(_train_with_a_library, 3, tmp_path, plan)
    assert [used for used, _ in answers] == ["vendorccl", "vendorccl", "none"]
    reference = train_reference(plan, is_ragged=True)
    for _, losses in answers:
        assert losses == pytest.approx(reference.losses, rel=1e-11)
