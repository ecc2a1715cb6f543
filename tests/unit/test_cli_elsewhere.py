"""Commands about a run that one of its hosts controls are passed on to it, and its answer is shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetrun.cli import elsewhere
from hetrun.cli.app import app
from hetrun.errors import StorageError
from hetrun.launch.move import note_moved
from hetrun.model import HostSpec, Moved
from hetrun.transport.script import Listeners
from tests.ssh.plans import make_plan

PLAN = make_plan([(HostSpec(name="a1"), 1)])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return note_moved(tmp_path / "runs", PLAN, "a1", "runs/r1")


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        (["logs", "r1", "-f", "--rank", "3"], ["logs", "--rank", "3", "--follow"]),
        (["attach", "r1", "--json"], ["attach", "--json"]),
        (["stop", "r1", "--force"], ["stop", "--force"]),
        (["clean", "r1"], ["clean"]),
        (["report", "runs/r1", "--share", "--json"], ["report", "--share", "--json"]),
    ],
)
def test_a_command_is_answered_by_the_host_that_controls_the_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], passed: list[str]
) -> None:
    asked: list[tuple[Path, Moved, Sequence[str]]] = []

    def pass_on(run_dir: Path, where: Moved, args: Sequence[str], listeners: Listeners) -> int:
        asked.append((run_dir.resolve(), where, args))
        for data in (b"line 1\nli", b"ne 2 \x1b[31mred\x1b[0m\nrest"):
            listeners.stdout(data)
        listeners.stderr(b"talk\n")
        return 5

    monkeypatch.setattr(elsewhere, "pass_on", pass_on)
    monkeypatch.chdir(run_dir.parents[1])
    found = CliRunner().invoke(app, arguments)
    assert asked == [(run_dir, Moved(host="a1", folder="runs/r1"), passed)]
    assert (found.exit_code, found.stdout) == (5, "line 1\nline 2 red\nrest\n")
    assert found.stderr == "talk\n"


def test_a_run_elsewhere_is_listed_with_its_host(run_dir: Path) -> None:
    found = CliRunner().invoke(app, ["ps", "--run-root", str(run_dir.parent)])
    assert "r1  on a1, " in found.stdout


def test_a_folder_of_the_same_name_is_not_overwritten(run_dir: Path) -> None:
    with pytest.raises(StorageError, match="File exists"):
        note_moved(run_dir.parent, PLAN, "a1", "runs/r1")
