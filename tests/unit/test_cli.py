"""What the command line itself promises: help with an example, exit codes, two lines for an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetrun import launch as launcher
from hetrun import store
from hetrun.cli.app import app, main
from hetrun.errors import ConfigError, HostError, PreflightError
from hetrun.model import HostSpec
from tests.ssh.plans import make_plan

COMMANDS = ("probe", "profile", "plan", "launch", "report")


def run_cli(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hetrun", *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=30,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_says_json(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert f"Example: hetrun {command}" in result.output
    assert "--json" in result.output


def test_missing_file_is_two_lines_and_exit_code_2(tmp_path: Path) -> None:
    result = run_cli("probe", "nowhere.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "hint: " in result.stderr
    assert "nowhere.yaml" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hosts: {a1: {prot: 22}}", ["hosts.a1.prot", "port"]),
        ("hosts: {a1: {port: many}}", ["hosts.a1.port", "many"]),
        ("hosts:\n  a1: {}\n  a1: {}\n", ["a1", "line 3"]),
        ("hosts: {a1: {password: hunter2}}", ["hosts.a1.password"]),
        ("hosts: {}", ["hosts"]),
        ("hosts: [", ["line"]),
    ],
)
def test_bad_inventory_names_the_wrong_key(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "lab.yaml").write_text(text)
    result = run_cli("probe", "lab.yaml", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "lab.yaml" in result.stderr
    for word in words:
        assert word in result.stderr
    assert "hunter2" not in result.stderr
    assert "Traceback" not in result.stderr


def test_report_without_any_run_says_what_to_do(tmp_path: Path) -> None:
    result = run_cli("report", cwd=tmp_path)
    assert result.returncode == 2
    assert "hint: hetrun launch" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("secret T is not set"), 2, "secret T is not set"),
        (PreflightError("no torch", host="a1"), 3, "a1: no torch"),
        (HostError("did not answer", host="a1"), 4, "a1: did not answer"),
        (RuntimeError("ours"), 9, "this is a bug in hetrun: RuntimeError: ours"),
    ],
)
def test_a_launch_that_does_not_start_says_why_by_its_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    words: str,
) -> None:
    def launch(*args: object, **more: object) -> None:
        raise error

    store.save(make_plan([(HostSpec(name="a1"), 1)]), tmp_path / "plan.json")
    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(sys, "argv", ["hetrun", "launch", str(tmp_path / "plan.json")])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    assert (left.value.code, said.out) == (code, "")
    assert f"error: {words}\n" in said.err


def test_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    line = f"{sys.executable} -m hetrun --help | head -1"
    result = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert result.stderr == ""
