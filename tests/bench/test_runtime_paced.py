"""Real time of a paced run beside its modelled time, lateness stated. Prints a line for docs/benchmarks.md."""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetrun.model import LaunchSpec, Plan, StepEvent
from hetrun.runtime.loop import join
from hetrun.runtime.trainer import Trainer
from tests.dist.chips import UNIT_S, mixed
from tests.dist.plans import with_train
from tests.dist.ranks import run_ranks
from tests.dist.training import open_test_stream

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

PACE = 4.0  # a layer's forward at speed 1.0 takes 40 ms then
STEPS = 5
LIMIT = 0.01


def test_paced_steps_take_the_modelled_time_within_one_percent(tmp_path: Path) -> None:
    """The median of the steps after the first, which pays for set-up."""
    plan = with_train(mixed((2.0, 1.2), (24,)), steps=STEPS)
    plan = replace(plan, recipe=replace(plan.recipe, launch=LaunchSpec(pace=PACE)))
    answers = run_ranks(_train, len(plan.split.ranks), tmp_path, plan, timeout_s=400.0)
    errors, late_s = [], 0.0
    for events in zip(*answers, strict=True):
        real_s = max(event.real_s for event in events)
        errors.append(real_s / (PACE * events[0].step_s) - 1)
        if events[0].step:
            late_s = max(late_s, *(event.late_s for event in events))
    error = statistics.median(errors[1:])
    sys.stdout.write(
        f"\npace {PACE:g} ({PACE * UNIT_S * 1e3:.0f} ms per layer forward at speed 1.0): step {answers[0][0].step_s:.4f} s modelled;"
        f" real time off by {error:+.3%} (steps {', '.join(f'{e:+.3%}' for e in errors)}), late by"
        f" {late_s * 1e3:.1f} ms at most, load average {os.getloadavg()[0]:.1f}"
    )
    assert abs(error) <= LIMIT


def _train(rank: int, store_path: Path, plan: Plan) -> list[StepEvent]:
    join(plan, plan.split.ranks[rank], dist.FileStore(str(store_path), len(plan.split.ranks)))
    trainer = Trainer(plan, rank, stream=open_test_stream(plan, False), device=torch.device("cpu"))
    return [trainer.step(step).event for step in range(plan.recipe.train.steps)]
