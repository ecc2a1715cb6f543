"""What ranks say of checkpoints gets into launch and report, and breaks neither."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

from hetrun.launch.monitor import Monitor
from hetrun.launch.rundir import RunDir
from hetrun.model import CheckpointEvent, HostSpec, StepEvent, WarningEvent
from hetrun.report import build_report
from hetrun.report.words import ending
from tests.ssh.plans import Recorder
from tests.ssh.plans import make_plan as make_ssh_plan
from tests.unit.report_factory import Event, make_outcome, make_plan, write_run

PLAN = make_plan()
SAVED = CheckpointEvent(rank=0, step=4, wall_s=1.0, blocked_s=0.1, saved_s=0.5, num_bytes=9)
WARNING = WarningEvent(rank=0, wall_s=1.0, step=4, message="no checkpoint\x1b[31m of step 4")


def _resumed(rank: int, events: list[Event]) -> list[Event]:
    """Events of a rank that went on at step 4 and saved there."""
    kept = [e for e in events if not isinstance(e, StepEvent) or e.step >= 4]
    more: list[Event] = [replace(SAVED, rank=rank)]  # type: ignore[list-item]
    if rank == 0:
        more.append(WARNING)  # type: ignore[arg-type]
    return [*kept, *more]


def test_report_has_the_warning_and_says_where_the_run_went_on(tmp_path: Path) -> None:
    write_run(tmp_path, PLAN, outcome=make_outcome(PLAN), change=_resumed)
    report = build_report(tmp_path)
    assert "rank 0 after step 4: no checkpoint\ufffd[31m of step 4" in report.warnings
    assert report.first_step == 4
    assert "from the checkpoint of step 4 on" in ending(report)
    assert "checkpoint" not in ending(replace(report, first_step=0))


def test_floods_of_warnings_are_cut(tmp_path: Path) -> None:
    def flood(rank: int, events: list[Event]) -> list[Event]:
        more = [replace(WARNING, rank=rank, message=f"word {n}") for n in range(300)]
        return [*events, *more]  # type: ignore[list-item]

    write_run(tmp_path, PLAN, outcome=make_outcome(PLAN), change=flood)
    assert sum("word" in text for text in build_report(tmp_path).warnings) == 100


def test_launch_keeps_a_rank_s_warning_without_its_escapes(tmp_path: Path) -> None:
    plan = make_ssh_plan([(HostSpec(name="a1"), 1)])
    run_dir = RunDir(tmp_path, "tiny", datetime(2030, 1, 2, tzinfo=timezone.utc), [])
    monitor = Monitor(plan, run_dir, Recorder())
    meta = {"t": "chunk", "file": "events/rank-0000.jsonl", "dropped": 0}
    for event in (SAVED, WARNING, WARNING):
        monitor.on_frame("a1", meta, json.dumps(asdict(event)).encode() + b"\n", 0.0)
    run_dir.close()
    assert monitor.warnings == ["a1: no checkpoint of step 4"]
    assert monitor.progressed
    assert monitor.evidence == []
