"""When a failed run is started again, how long nothing may move, and what is kept of an attempt."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from hetrun.errors import ExitCode
from hetrun.launch.diagnose import Kind
from hetrun.launch.patience import Pace, hang_limit_s
from hetrun.launch.restart import Ending, judge
from hetrun.launch.rundir import RunDir
from hetrun.model import HostSpec, LaunchSpec, RunOutcome
from hetrun.runtime.heartbeat import Heartbeat
from hetrun.transport.guard_progress import Progress
from tests.ssh.plans import make_plan

LIMITS = LaunchSpec()
DIED = Ending(exit_code=ExitCode.JOB_FAILED, kind=Kind.DIED, what="killed by signal 9", step=7)
RAISED = replace(DIED, kind=Kind.RAISED, what="raised ValueError: at 0x7f12")
SAVED = replace(DIED, checkpoint_step=4)
LOST = replace(SAVED, exit_code=ExitCode.LOST_CONTACT, kind=Kind.LOST)


def test_restarts_wait_1_5_and_15_seconds() -> None:
    waits = [judge([SAVED] * n, LIMITS, has_checkpoints=True).wait_s for n in (1, 2, 3)]
    assert waits == [1.0, 5.0, 15.0]


def test_the_budget_of_restarts_ends_with_the_code_of_the_failure() -> None:
    verdict = judge([SAVED] * 4, LIMITS, has_checkpoints=True)
    assert (verdict.again, verdict.exit_code) == (False, ExitCode.JOB_FAILED)
    assert verdict.why == "failed after 3 restarts, launch.max_restarts allows no more"


def test_a_first_restart_needs_no_checkpoint_a_second_one_does() -> None:
    assert judge([DIED], LIMITS, has_checkpoints=True).again
    verdict = judge([SAVED, DIED], LIMITS, has_checkpoints=True)
    assert (verdict.again, verdict.exit_code) == (False, ExitCode.NO_PROGRESS)


@pytest.mark.parametrize(
    ("again", "before", "last"),
    [
        (False, RAISED, replace(RAISED, what="raised ValueError: at 0x7f99", checkpoint_step=4)),
        (True, RAISED, replace(RAISED, step=8, checkpoint_step=8)),
        (True, RAISED, replace(RAISED, what="raised KeyError: 'x'", checkpoint_step=4)),
        (True, DIED, replace(DIED, checkpoint_step=4)),
    ],
)
def test_the_same_error_in_the_same_step_is_one_of_the_code(
    again: bool, before: Ending, last: Ending
) -> None:
    assert judge([before, last], LIMITS, has_checkpoints=True).again is again


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.INTERRUPTED, ExitCode.NOT_CLEAN])
def test_only_failures_are_tried_again(code: ExitCode) -> None:
    assert not judge([replace(SAVED, exit_code=code)], LIMITS, has_checkpoints=True).again


def test_without_checkpoints_or_memory_nothing_is_tried_again() -> None:
    assert not judge([SAVED], LIMITS, has_checkpoints=False).again
    verdict = judge([replace(SAVED, out_of_memory=True)], LIMITS, has_checkpoints=True)
    assert not verdict.again
    assert "memory ran out" in verdict.why


def test_what_was_lost_has_ended_by_its_lease_before_the_next_attempt() -> None:
    limits = replace(LIMITS, lease_s=30.0)
    assert judge([LOST], limits, has_checkpoints=True).wait_s == 35.0
    unsure = replace(SAVED, unsure=True)
    assert judge([unsure], limits, has_checkpoints=True).wait_s == 35.0


def test_a_hang_is_a_minute_or_five_steps() -> None:
    pace = Pace()
    for wall_s in (0.0, 20.0, 40.0, 140.0):  # one of them saved for long
        pace.step_ended(0, wall_s)
    assert pace.step_s == 20.0
    limit = {"all_started": True, "in_steps": True}
    assert hang_limit_s(LIMITS, **limit, step_s=20.0) == 100.0
    assert hang_limit_s(LIMITS, **limit, step_s=1.0) == 60.0
    assert hang_limit_s(LIMITS, **limit, step_s=None) == 300.0  # the first one may compile
    assert hang_limit_s(LIMITS, all_started=True, in_steps=False, step_s=1.0) == 300.0
    assert hang_limit_s(LIMITS, all_started=False, in_steps=False, step_s=None) == 120.0
    assert hang_limit_s(replace(LIMITS, step_timeout_s=9.0), **limit, step_s=20.0) == 9.0


def test_a_guard_sees_each_beat_of_its_ranks_once(tmp_path: Path) -> None:
    beats = [Heartbeat(tmp_path / f"rank-{rank:04d}") for rank in (4, 5)]
    progress = Progress(tmp_path, [4, 5, 6])  # 6 has not begun
    assert progress.news(10.0) == [[4, -1, 0, 1], [5, -1, 0, 1]]
    beats[1].step(3)
    beats[1].tick()
    assert progress.news(10.1) == []
    assert progress.news(11.0) == [[5, 3, 2, 0]]
    beats[1].outside()
    assert progress.news(12.0) == [[5, 3, 3, 1]]
    assert progress.news(13.0) == []


def test_what_an_attempt_left_is_kept_aside(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "tiny", datetime(2030, 1, 2, tzinfo=timezone.utc), [])
    run_dir.append("events/rank-0000.jsonl", b"first")
    run_dir.finish(
        RunOutcome(run_id="r", plan_sha="", started="", wall_s=0, exit_code=1, status="failed")
    )
    run_dir.save_plan(make_plan([(HostSpec(name="a"), 1)]))
    run_dir.begin_again(1)
    run_dir.append("events/rank-0000.jsonl", b"second")
    run_dir.close()
    assert (run_dir.path / "attempts/1/events/rank-0000.jsonl").read_text() == "first\n"
    assert (run_dir.path / "events/rank-0000.jsonl").read_text() == "second\n"
    for name in ("launch.json", "plan.json"):
        assert (run_dir.path / "attempts/1" / name).exists()
    assert (run_dir.path / "plan.json").exists()  # until there is another one
    assert not (run_dir.path / "launch.json").exists()
    assert (run_dir.path / ".reserve").stat().st_size > 0
