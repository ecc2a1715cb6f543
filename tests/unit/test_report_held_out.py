"""Held-out losses get from the ranks' events into progress, report, table and page."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from hetrun import store
from hetrun.cli import results
from hetrun.cli.progress import LaunchView
from hetrun.errors import ConfigError
from hetrun.launch import monitor
from hetrun.model import EvaluationEvent, HeldOutLoss, RunReport, StepEvent
from hetrun.report import build_report, to_html
from hetrun.report.svg import loss_chart
from tests.unit.report_factory import Event, make_outcome, make_plan, write_run

PLAN = make_plan()
LOSSES = {3: 6.5, 7: 1.25, 11: 2.75}  # above and below all losses of the steps


def _event(rank: int, step: int) -> EvaluationEvent:
    return EvaluationEvent(
        rank=rank, step=step, wall_s=1.0, loss=LOSSES[step], num_tokens=64, evaluation_s=0.5
    )


def _with_evaluations(rank: int, events: list[Event]) -> list[Event]:
    """Events of a rank that evaluates after some steps; the last rank stops before the last time."""
    told: list[Event] = []
    for event in events:
        told.append(event)
        if isinstance(event, StepEvent) and event.step in LOSSES and (rank, event.step) != (3, 11):
            told.append(_event(rank, event.step))  # type: ignore[arg-type]
    return told


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, PLAN, outcome=make_outcome(PLAN), change=_with_evaluations)
    return build_report(folder)


def test_the_report_has_each_held_out_loss_once(report: RunReport, tmp_path: Path) -> None:
    assert report.held_out == tuple(HeldOutLoss(step=s, loss=x) for s, x in LOSSES.items())
    assert report.warnings == ()
    store.save(report, tmp_path / "report.json")
    assert store.load(RunReport, tmp_path / "report.json") == report


def test_the_page_rings_them_on_one_scale_with_the_steps(report: RunReport) -> None:
    text = to_html(report)
    rings = re.findall(r'<circle[^>]*class="ring"[^>]*><title>([^<]*)', text)
    assert rings == [f"held out, after step {step}: {loss:.4g}" for step, loss in LOSSES.items()]
    heights = re.findall(r'<circle[^>]*cy="([-.\d]+)"[^>]*class="ring"', text)
    assert len(heights) == len(LOSSES)
    assert all(0 <= float(height) <= 220 for height in heights)
    assert "held-out rows, after that step" in text
    assert 'class="ring"' not in to_html(replace(report, held_out=()))


def test_many_held_out_losses_are_thinned() -> None:
    values = [1.0] * 5000
    rings = [HeldOutLoss(step=step, loss=2.0) for step in range(100, 5200)]
    text = str(loss_chart(values, 100, rings))
    assert 10 < text.count('class="ring"') <= 200


def test_the_table_says_the_last_one(report: RunReport) -> None:
    assert results._losses(report).endswith("(held out 2.75)")
    assert "held out" not in results._losses(replace(report, held_out=()))


def test_progress_says_each_once() -> None:
    file = io.StringIO()
    view = LaunchView(Console(file=file, width=200), PLAN, clock=lambda: 0.0)
    with view:
        for rank in (1, 0):
            for step in LOSSES:
                view.on_event(_event(rank, step))
    assert re.findall(r"held-out loss (\S+) after step (\d+)", file.getvalue()) == [
        ("6.5", "4"), ("1.25", "8"), ("2.75", "12"),
    ]  # fmt: skip


def test_launch_knows_the_event() -> None:
    fields = json.loads(json.dumps(asdict(_event(0, 3))))
    assert monitor._KINDS[fields["event"]].validate_python(fields) == _event(0, 3)


def test_a_step_below_zero_is_refused(tmp_path: Path) -> None:
    def spoil(rank: int, events: list[Event]) -> list[Event]:
        return [*events, replace(_event(rank, 3), step=-1)]  # type: ignore[list-item]

    write_run(tmp_path, PLAN, outcome=make_outcome(PLAN), change=spoil)
    with pytest.raises(ConfigError, match="step is -1, need 0 or more"):
        build_report(tmp_path)
