"""What the command line itself promises: help with an example, exit codes, two lines for an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetrun.cli.app import app

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


def test_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    line = f"{sys.executable} -m hetrun --help | head -1"
    result = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert result.stderr == ""
