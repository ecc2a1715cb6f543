"""Modelled time of a real multi-process run is that of the simulator, whatever the host is doing meanwhile."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.model import ModelSpec, Plan, Span
from hetrun.schedule import simulate_step
from tests.dist.plans import MODEL, Pipeline, make_plan
from tests.dist.training import RankAnswer, train_all

pytestmark = pytest.mark.dist

TOLERANCE = 1e-6


@pytest.mark.parametrize(
    ("pipelines", "model"),
    [
        pytest.param((Pipeline((5, 2, 1), 1, 9),), MODEL, id="one-pipeline"),
        pytest.param(
            (Pipeline((5, 3), 2, 6), Pipeline((2, 3, 3), 1, 4), Pipeline((8,), 2, 3)),
            replace(MODEL, tied_embeddings=True),
            id="three-replicas-tied",
        ),
    ],
)
def test_step_lasts_as_simulated(
    pipelines: tuple[Pipeline, ...], model: ModelSpec, tmp_path: Path
) -> None:
    plan = make_plan(pipelines, model=model, steps=2)
    answers = train_all(plan, tmp_path, is_ragged=False)
    step_s, spans = _simulated(plan)
    assert _difference(answers, step_s) < TOLERANCE
    for answer, expected in zip(answers, spans, strict=True):
        for done in answer.spans:
            assert [_name(span) for span in done] == [_name(span) for span in expected]
            assert _times(done) == pytest.approx(_times(expected), rel=TOLERANCE)


def test_wider_window_hides_a_slow_link_in_modelled_time(tmp_path: Path) -> None:
    plan = _with_windows(make_plan((Pipeline((4, 4), 1, 12),), steps=1), send_s=0.05, extra=0)
    wide = _with_windows(plan, send_s=0.05, extra=1)
    plain_s = train_all(plan, tmp_path, is_ragged=False)[0].step_s[0]
    wide_s = train_all(wide, tmp_path, is_ragged=False)[0].step_s[0]
    assert wide_s == pytest.approx(_simulated(wide)[0], rel=TOLERANCE)
    assert wide_s < 0.95 * plain_s


def _simulated(plan: Plan) -> tuple[float, tuple[tuple[Span, ...], ...]]:
    split, recipe = plan.split, plan.recipe
    run = simulate_step(split.ranks, split.replicas, plan.links, recipe.model, recipe.train.dtype)
    return run.cost.step_s, run.rank_spans


def _with_windows(plan: Plan, *, send_s: float, extra: int) -> Plan:
    (replica,) = plan.split.replicas
    first, last = replica.stages
    first = replace(first, send_s=send_s, window=2 + extra)
    last = replace(last, forward_s=first.forward_s, backward_s=first.backward_s)
    split = replace(plan.split, replicas=(replace(replica, stages=(first, last)),))
    return replace(plan, split=split)


def _difference(answers: list[RankAnswer], step_s: float) -> float:
    measured = itertools.chain.from_iterable(answer.step_s for answer in answers)
    return max(abs(value / step_s - 1) for value in measured)


def _name(span: Span) -> tuple[str, int | None]:
    return span.kind, span.microbatch


def _times(spans: tuple[Span, ...]) -> list[float]:
    return [time_s for span in spans for time_s in (span.start_s, span.end_s)]
