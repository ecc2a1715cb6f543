"""Runs that go on without a lost host: under a new plan, where the others have the checkpoints, recorded and said."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from hetrun.errors import AuthError, ConfigError, ExitCode, HetrunError, HostError, NoPlanError
from hetrun.launch.attempts import Attempts
from hetrun.launch.diagnose import Kind
from hetrun.launch.remaining import Remaining, Replan
from hetrun.launch.restart import Ending
from hetrun.launch.rundir import RunDir
from hetrun.launch.runs import hosts
from hetrun.launch.supervise import Signals
from hetrun.model import CheckpointSpec, HostSpec, LostHost, Plan, RunOutcome, plan_sha
from hetrun.store import load
from tests.ssh.plans import Recorder, make_plan

SHARED = CheckpointSpec(dir="/checkpoints", every_steps=1, shared=True)
LOST = Ending(exit_code=ExitCode.LOST_CONTACT, kind=Kind.LOST, checkpoint_step=2)
DONE = Ending(exit_code=ExitCode.DONE)


def plan_over(*names: str, checkpoint: CheckpointSpec = SHARED) -> Plan:
    return make_plan(
        [(HostSpec(name=name), 1) for name in names],
        checkpoint=checkpoint,
        on_lost_host=LostHost.REPLAN,
        host_wait_s=0.0,
    )


def over_the_others(plan: Plan) -> Replan:
    def replan(gone: tuple[str, ...]) -> Plan:
        names = [spec.name for spec in plan.hosts if spec.name not in gone]
        if not names:
            raise NoPlanError("no host is left")
        assert plan.recipe.checkpoint is not None
        return plan_over(*names, checkpoint=plan.recipe.checkpoint)

    return replan


class Lab:
    """Attempts of which each is played: an ending, or an error that kept it from starting."""

    def __init__(self, folder: Path, plan: Plan, *played: Ending | HetrunError) -> None:
        self.plan, self.played = plan, list(played)
        self.recorder = Recorder()
        now = datetime(2030, 1, 2, tzinfo=timezone.utc)
        self.run_dir = RunDir(folder, "tiny", now, [])
        self.started: list[tuple[tuple[str, ...], int]] = []

    def start(self, plan: Plan, number: int) -> tuple[RunOutcome, Ending]:
        self.started.append((tuple(spec.name for spec in plan.hosts), number))
        self.run_dir.save_plan(plan)
        found = self.played.pop(0)
        code = found.exit_code
        outcome = RunOutcome(
            run_id="r", plan_sha=plan_sha(plan), started="", wall_s=0, exit_code=code, status="s"
        )
        self.run_dir.finish(outcome)
        if isinstance(found, HetrunError):
            raise found
        return outcome, found

    def run(self, monkeypatch: pytest.MonkeyPatch) -> RunOutcome:
        monkeypatch.setattr(Attempts, "_wait", lambda self, seconds: True)
        replan = over_the_others(self.plan)
        attempts = Attempts(
            self.plan, self.run_dir, self.recorder, signals=Signals(), replan=replan
        )
        return attempts.run(self.start)


def silent(*names: str) -> HostError:
    error = HostError("did not answer", host=names[0])
    error.away = names
    return error


def test_hosts_that_stay_away_are_left_out_of_a_new_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, plan_over("a", "b", "c", "d"), LOST, silent("b", "d"), DONE)
    outcome = lab.run(monkeypatch)
    assert lab.started == [(tuple("abcd"), 1), (tuple("abcd"), 2), (("a", "c"), 2)]
    assert (outcome.exit_code, outcome.plan_sha) == (0, plan_sha(plan_over("a", "c")))
    (restart,) = outcome.restarts
    assert restart.left_out == ("b", "d")
    assert restart.origin == "the checkpoint of step 2 without b, d"
    assert any(
        "left out, planned again over a, c: 1 s per step" in t for _, t in lab.recorder.status
    )
    assert "b, d: lost, and left out" in outcome.warnings[-1]
    folder = lab.run_dir.path
    assert load(RunOutcome, folder / "launch.json") == outcome
    assert {spec.name for spec in load(Plan, folder / "plan.json").hosts} == {"a", "c"}
    assert {spec.name for spec in hosts(folder)} == set("abcd")  # `hetrun clean` looks on all


def test_a_host_that_is_back_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, plan_over("a", "b"), LOST, DONE)
    assert lab.run(monkeypatch).restarts[0].left_out == ()
    assert lab.started[-1] == (("a", "b"), 2)


def test_each_lost_host_costs_one_restart_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Ending | HetrunError] = [
        LOST,
        silent("a"),
        LOST,
        silent("b"),
        LOST,
        silent("c"),
        LOST,
    ]
    lab = Lab(tmp_path, plan_over(*"abcde"), *played)
    outcome = lab.run(monkeypatch)
    assert lab.started[-1] == (("d", "e"), 4)
    assert [restart.left_out for restart in outcome.restarts] == [("a",), ("b",), ("c",)]
    assert outcome.exit_code == 5
    assert "max_restarts allows no more" in outcome.warnings[-1]


@pytest.mark.parametrize(
    ("checkpoint", "error", "why"),
    [
        (replace(SHARED, shared=False), silent("b"), "no other host has head, layer.1 of the chec"),
        (SHARED, silent("a", "b"), "no host is left"),
    ],
)
def test_where_no_plan_can_do_without_a_host_it_is_waited_for_and_that_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: CheckpointSpec,
    error: HostError,
    why: str,
) -> None:
    plan = plan_over("a", "b", checkpoint=checkpoint)
    limits = replace(plan.recipe.launch, host_wait_s=0.2)
    plan = replace(plan, recipe=replace(plan.recipe, launch=limits))
    lab = Lab(tmp_path, plan, LOST, error, error, DONE)
    outcome = lab.run(monkeypatch)
    assert lab.started[1:] == [(("a", "b"), 2)] * 3
    assert [warning for warning in outcome.warnings if why in warning] == [outcome.warnings[0]]
    assert outcome.exit_code == 0


def test_a_host_that_refuses_us_is_no_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, plan_over("a", "b"), LOST, AuthError("refused the key", host="b"))
    outcome = lab.run(monkeypatch)
    assert outcome.exit_code == 5
    assert "not started again within launch.host_wait_s: b: refused the key" in outcome.warnings[-1]


def test_what_nobody_saved_yet_is_not_asked_for() -> None:
    plan = plan_over("a", "b", checkpoint=replace(SHARED, shared=False))
    remaining = Remaining(plan, over_the_others(plan))
    assert "planned again over a" in remaining.leave_out(("b",))
    remaining = Remaining(plan, over_the_others(plan))
    remaining.saved()
    with pytest.raises(ConfigError, match="shared file system keeps them"):
        remaining.leave_out(("b",))
    assert (remaining.plan, remaining.left_out) == (plan, ())
