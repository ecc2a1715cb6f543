"""The held-out loss is that of one process over the same rows, whatever the plan, and changes no training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from hetrun.model import EvaluationEvent, Plan, StepEvent
from hetrun.runtime.loop import Hooks, join, train
from hetrun.runtime.trainer import Trainer
from tests.dist.jobs import kinds, read_events, run_torchrun, write_job
from tests.dist.plans import Pipeline, make_plan, with_train
from tests.dist.ranks import run_ranks
from tests.dist.training import open_test_stream, train_reference

pytestmark = pytest.mark.dist

STEPS, EVERY, HELD_OUT = 5, 2, 21
BATCH_16 = {
    "one-process": (Pipeline((8,), 16, 1),),
    "rows-10-4-2": (Pipeline((8,), 2, 5), Pipeline((8,), 1, 4), Pipeline((8,), 2, 1)),
    "layers-5-3-and-2-3-3": (Pipeline((5, 3), 2, 6), Pipeline((2, 3, 3), 1, 4)),
    "lanes-2-1-with-tp-1-2-and-real-cuts": (
        Pipeline((4, 5), 1, 16, cuts=(3.4,), lanes=(2, 1), tp=(1, 2)),
    ),
}


def _plan(pipelines: tuple[Pipeline, ...], *, every: int | None = EVERY) -> Plan:
    plan = with_train(make_plan(pipelines, steps=STEPS), eval_every=None)
    data = replace(plan.recipe.data, held_out_rows=HELD_OUT)
    return with_train(replace(plan, recipe=replace(plan.recipe, data=data)), eval_every=every)


def _losses(
    rank: int, store_path: Path, plan: Plan
) -> tuple[dict[int, float], list[float], list[float]]:
    """Held-out losses by step, losses of the steps, modelled seconds of the evaluations."""
    join(plan, plan.split.ranks[rank], dist.FileStore(str(store_path), len(plan.split.ranks)))
    stream = open_test_stream(plan, is_ragged=False)
    events: list[object] = []
    trainer = Trainer(plan, rank, stream=stream, device=torch.device("cpu"))
    train(trainer, Hooks(write=events.append))
    held_out = [event for event in events if isinstance(event, EvaluationEvent)]
    assert all(event.num_tokens == HELD_OUT * stream.seq_len for event in held_out)
    steps = [event.loss for event in events if isinstance(event, StepEvent)]
    return {e.step: e.loss for e in held_out}, steps, [e.evaluation_s for e in held_out]


def _reference(plan: Plan) -> dict[int, float]:
    """One whole model and one batch of all held-out rows, after as many steps."""
    losses = {}
    stream = open_test_stream(plan, is_ragged=False)
    rows = stream.held_out(0, HELD_OUT)
    for step in (1, 3, 4):
        model = train_reference(with_train(plan, steps=step + 1), is_ragged=False).model
        with torch.no_grad():
            logits = model(rows.inputs)
        losses[step] = functional.cross_entropy(logits.flatten(0, 1), rows.targets.flatten()).item()
    return losses


@pytest.mark.parametrize("name", BATCH_16)
def test_any_split_evaluates_like_one_process(name: str, tmp_path: Path) -> None:
    plan = _plan(BATCH_16[name])
    reference = _reference(plan)
    answers = run_ranks(_losses, len(plan.split.ranks), tmp_path, plan)
    for held_out, _, seconds in answers:
        assert held_out == pytest.approx(reference, rel=0, abs=1e-10)
        assert list(held_out) == [1, 3, 4]  # every second step, and the last
        assert all(second > 0 for second in seconds)


def test_evaluation_changes_no_training(tmp_path: Path) -> None:
    pipelines = BATCH_16["layers-5-3-and-2-3-3"]
    trained = []
    for every in (None, 1):
        plan = _plan(pipelines, every=every)
        answers = run_ranks(_losses, len(plan.split.ranks), tmp_path, plan)
        assert len(answers[0][0]) == (STEPS if every else 0)
        trained.append(answers[0][1])
    assert trained[0] == trained[1]


def test_a_job_writes_its_evaluations(tmp_path: Path) -> None:
    plan = _plan((Pipeline((5, 3), 2, 2),))
    job = write_job(tmp_path / "job", plan)
    ended = run_torchrun(job, 2)
    assert ended.code == 0, ended.output
    for rank in range(2):
        events = read_events(job, rank)
        assert kinds(events).count("evaluation") == 3
        assert kinds(events)[-1] == "end"
