"""The five commands as a user runs them, on this machine, with emulated chips and real training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chain import ROOT, done, hetrun, plan_chain, short_recipe

pytestmark = pytest.mark.dist


def processes_in(folder: Path) -> list[str]:
    """Return the command lines of processes that work for runs in this folder, other than this test."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(folder) in line and process.pid != psutil.Process().pid:
            found.append(line)
    return found


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chain")
    plan_chain(folder, ROOT / "inventories" / "localhost.yaml")
    return folder


@pytest.fixture(scope="module")
def finished(planned: Path) -> tuple[Path, Path]:
    result = done("launch", cwd=planned)
    run_dir = planned / result.stdout.strip().splitlines()[-1]
    done("report", run_dir, cwd=planned)
    return planned, run_dir


def test_default_file_names_carry_the_chain(planned: Path) -> None:
    for name in ("facts.json", "profile.json", "plan.json"):
        assert json.loads((planned / name).read_text())["schema_version"] == 1


def test_json_flag_prints_what_was_saved_and_nothing_else(planned: Path) -> None:
    result = done("plan", "tiny-llama.yaml", "--json", "-o", "again.json", cwd=planned)
    assert result.stdout == (planned / "again.json").read_text()
    assert json.loads(result.stdout)["split"]["efficiency"]["e1"]["kind"] == "modelled"


def test_launch_prints_the_run_directory_and_report_fills_it(finished: tuple[Path, Path]) -> None:
    _, run_dir = finished
    names = {path.name for path in run_dir.iterdir()}
    assert {"plan.json", "launch.json", "events", "logs", "report.json", "report.html"} <= names


def test_loss_falls_and_modelled_e1_beats_the_even_split(finished: tuple[Path, Path]) -> None:
    _, run_dir = finished
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    assert report["steps"] == 12
    assert report["loss"]["last"] < 0.8 * report["loss"]["first"]
    assert report["tokens_per_s"] > 0
    for name in ("e1", "e2", "u"):
        assert report["efficiency"][name]["kind"] == "modelled"
    e1, even = (
        report["efficiency"]["e1"]["value"],
        report["even_split"]["efficiency"]["e1"]["value"],
    )
    assert e1 > even + 0.15, (e1, even)


def test_run_on_the_modelled_clock_takes_as_long_as_the_plan_says(
    finished: tuple[Path, Path],
) -> None:
    _, run_dir = finished
    report = json.loads((run_dir / "report.json").read_text())
    assert abs(report["prediction_error"]) < 1e-6


def test_report_page_needs_nothing_from_outside(finished: tuple[Path, Path]) -> None:
    page = (finished[1] / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert "modelled" in page


def test_a_detached_run_goes_on_without_who_started_it(planned: Path, tmp_path: Path) -> None:
    root = ("--run-root", tmp_path / "runs")
    began = done("launch", "--detach", *root, cwd=planned)
    run_dir = Path(began.stdout.strip())
    record = json.loads((run_dir / "controller.json").read_text())
    assert os.getsid(record["pid"]) == record["pid"]  # no terminal's end reaches it
    listed = done("ps", *root, cwd=planned).stdout
    assert f"{run_dir.name}  running, process {record['pid']}, step " in listed
    attached = done("attach", run_dir.name, *root, cwd=planned)
    assert attached.stdout.strip() == str(run_dir)
    assert json.loads((run_dir / "launch.json").read_text())["status"] == "done"
    assert "done after" in (run_dir / "controller.log").read_text()
    assert "done" in done("ps", *root, cwd=planned).stdout


def test_a_detached_start_that_fails_says_why(planned: Path, tmp_path: Path) -> None:
    plan = json.loads((planned / "plan.json").read_text())
    plan["recipe"]["launch"]["secrets"] = ["HETRUN_NOT_SET_HERE"]  # read by the controller itself
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    failed = hetrun("launch", "plan.json", "--detach", cwd=tmp_path)
    assert (failed.returncode, list((tmp_path / "runs").iterdir())) == (2, [])
    assert "secret HETRUN_NOT_SET_HERE is not set in the environment" in failed.stderr


def test_nothing_is_left_running(finished: tuple[Path, Path]) -> None:
    assert processes_in(finished[1]) == []


def test_report_without_a_name_takes_the_newest_run(finished: tuple[Path, Path]) -> None:
    folder, run_dir = finished
    result = done("report", "--json", cwd=folder)
    assert json.loads(result.stdout)["run_id"] == run_dir.name


def test_layers_that_two_chips_share_train_as_predicted(planned: Path, tmp_path: Path) -> None:
    recipe = short_recipe(tmp_path, steps=3)
    text = recipe.read_text()
    for old, new in (
        ("plan:\n", "plan:\n  tp: [1, 2]\n  pins: { tp: { emu-a: 2, emu-b: 1 } }\n"),
        ("num_layers: 8", "num_layers: 2"),
        ("global_batch_rows: 32", "global_batch_rows: 8"),
    ):
        assert old in text
        text = text.replace(old, new)
    recipe.write_text(text)
    done("profile", recipe, "--facts", planned / "facts.json", cwd=tmp_path)
    done("plan", recipe, "--facts", planned / "facts.json", cwd=tmp_path)
    split = json.loads((tmp_path / "plan.json").read_text())["split"]
    stages = [stage for replica in split["replicas"] for stage in replica["stages"]]
    assert (2, 1) in [(len(stage["ranks"]), stage["lanes"]) for stage in stages]
    result = done("launch", cwd=tmp_path)
    run_dir = tmp_path / result.stdout.strip().splitlines()[-1]
    lines = [path.read_text().splitlines() for path in (run_dir / "events").glob("rank-*.jsonl")]
    assert len(lines) == 4
    for events in (list(map(json.loads, rank)) for rank in lines):
        steps = [event for event in events if event["event"] == "step"]
        assert [event["step_s"] for event in steps] == pytest.approx(
            [split["cost"]["step_s"]] * 3, rel=1e-6
        )
        assert steps[-1]["loss"] < steps[0]["loss"]
