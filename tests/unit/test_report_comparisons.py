"""Comparisons of shared parameters: counted in the report, told on the page and in the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hetrun.cli.results import report_view
from hetrun.model import ComparisonEvent, Drift, RunReport, StepEvent, WarningEvent
from hetrun.report import build_report, to_html
from tests.unit.report_factory import Event, make_outcome, make_plan, write_run

PLAN = make_plan()
DRIFT = Drift(unit="layer.3", groups=((0,), (2,)), largest=1e-7)
SAID = "layer.3 differs between rank 0 (a) and rank 2 (b) by up to 1e-07"


def _text(report: RunReport) -> str:
    console = Console(width=200)
    with console.capture() as caught:
        console.print(report_view(report))
    return caught.get()


def _with_comparisons(rank: int, events: list[Event]) -> list[Event]:
    """Ranks 0 and 1 tell of a comparison after every fourth step; once there is a difference."""
    told: list[Event] = []
    for event in events:
        told.append(event)
        if not isinstance(event, StepEvent) or event.step % 4 != 3 or rank > 1:
            continue
        drifts = (DRIFT,) if (rank, event.step) == (0, 7) else ()
        told.append(
            ComparisonEvent(  # type: ignore[arg-type]
                rank=rank, step=event.step, wall_s=1.0, compared_s=0.1, num_parts=4,
                drifts=drifts, repaired=False,
            )
        )  # fmt: skip
        if drifts:
            warning = WarningEvent(rank=rank, wall_s=1.0, step=8, message=SAID)
            told.append(warning)  # type: ignore[arg-type]
    return told


def test_comparisons_and_differences_are_counted_and_told(tmp_path: Path) -> None:
    write_run(tmp_path, PLAN, outcome=make_outcome(PLAN), change=_with_comparisons)
    report = build_report(tmp_path)
    assert (report.num_comparisons, report.num_drifts) == (3, 1)
    assert report.warnings == (f"rank 0 after step 8: {SAID}",)
    words = "Parameters that several ranks hold were compared 3 times: 1 difference"
    assert words in to_html(report)
    assert words in _text(report)
    equal = replace(report, num_drifts=0)
    assert "compared 3 times: all equal" in to_html(equal)
    never = replace(report, num_comparisons=0, num_drifts=0)
    assert "compared" not in _text(never)
