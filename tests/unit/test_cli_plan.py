"""`hetrun plan` and its questions, from files to files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hetrun import store
from hetrun.cli.app import app
from hetrun.cli.plan import replanner
from hetrun.errors import ConfigError, HetrunError, NoPlanError
from hetrun.model import Plan
from tests.unit.planner_lab import Chips, Lab, small_model

MODEL = small_model(6, vocab_size=257)
LAB = Lab(
    chips=(
        Chips(vendor="emu-a", num_devices=2, gflops=4.0),
        Chips(vendor="emu-b", num_devices=2, gflops=1.0),
    ),
    model=MODEL,
    batch=12,
)
RECIPE = """\
name: lab
model: {num_layers: 6, hidden_size: 32, num_heads: 2, ffn_size: 64, vocab_size: 257}
data: {seq_len: 64}
train: {steps: 1, global_batch_rows: 12, microbatch_rows: [1, 2, 4]}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    store.save(LAB.facts, tmp_path / "facts.json")
    store.save(LAB.profile, tmp_path / "profile.json")
    (tmp_path / "lab.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hetrun(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["plan", "lab.yaml", *arguments])
    if isinstance(result.exception, HetrunError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_plan_is_saved_and_its_page_beside_it(here: Path) -> None:
    hetrun("--html", "plan.html")
    assert store.load(Plan, here / "plan.json").recipe.name == "lab"
    assert (here / "plan.html").read_text().startswith("<!doctype html>")


def test_what_if_saves_nothing_unless_told(here: Path) -> None:
    found = json.loads(hetrun("--what-if", "plus 2 of emu-b", "--json").stdout)
    assert (found["before"]["num_devices"], found["after"]["num_devices"]) == (4, 6)
    assert found["changes"] == ["plus 2 of emu-b"]
    assert not (here / "plan.json").exists()
    hetrun("--what-if", "without emu-b", "-o", "other.json")
    assert {r.vendor for r in store.load(Plan, here / "other.json").split.ranks} == {"emu-a"}


def test_explanation_is_data_and_the_plan_is_saved(here: Path) -> None:
    found = json.loads(hetrun("--explain", "--json").stdout)
    plan = store.load(Plan, here / "plan.json")
    steps = [t["value"] for t in found["terms"] if (t["what"], t["of"]) == ("step", "step")]
    assert steps == [plan.split.cost.step_s]


def test_export_goes_to_stdout_or_to_a_file(here: Path) -> None:
    (here / "pins.yaml").write_text("layers: [4, 2]\nrows: [12]\n")
    (here / "lab.yaml").write_text(RECIPE + "plan: {orders: [1f1b]}\n")
    result = hetrun("--export", "megatron", "--pin", "pins.yaml")
    assert "--pipeline-model-parallel-layout 'Et*4|t*2,L'" in result.stdout
    assert "not in it: " in result.stderr
    assert not (here / "plan.json").exists()
    hetrun("--export", "megatron", "--pin", "pins.yaml", "-o", "flags.sh")
    assert (here / "flags.sh").read_text() == result.stdout


def test_pins_come_from_the_recipe_too(here: Path) -> None:
    (here / "lab.yaml").write_text(RECIPE + "plan: {pins: {layers: [5, 1], rows: [12]}}\n")
    hetrun()
    plan = store.load(Plan, here / "plan.json")
    layers = [[stage.num_layers for stage in r.stages] for r in plan.split.replicas]
    assert layers == [[5, 1]]
    assert "The pins cost" in plan.verdict


def test_a_run_that_may_shrink_gets_plans_without_lost_hosts_from_what_it_was_planned_from(
    here: Path,
) -> None:
    hetrun()
    chosen = store.load(Plan, here / "plan.json")
    assert replanner(chosen, here / "absent.json", here / "absent.json") is None
    (here / "lab.yaml").write_text(
        RECIPE + "launch: {on_lost_host: replan}\ncheckpoint: {dir: /saved, every_steps: 1}\n"
    )
    hetrun()
    chosen = store.load(Plan, here / "plan.json")
    assert {spec.name for spec in chosen.hosts} == {"emu-a-0", "emu-b-0"}
    replan = replanner(chosen, here / "facts.json", here / "profile.json")
    assert replan is not None
    smaller = replan(("emu-a-0",))
    assert [spec.name for spec in smaller.hosts] == ["emu-b-0"]
    assert smaller.recipe == chosen.recipe
    with pytest.raises(NoPlanError):
        replan(("emu-a-0", "emu-b-0"))
    store.save(replace(LAB.facts, hosts=LAB.facts.hosts[1:]), here / "facts.json")
    found = CliRunner().invoke(app, ["launch", "--dry-run"])
    assert isinstance(found.exception, ConfigError)
    assert "host emu-a-0 is not as the plan has it" in found.exception.message
    assert "--facts" in (found.exception.hint or "")


def test_one_question_at_a_time(here: Path) -> None:
    with pytest.raises(HetrunError, match="--what-if and --export at once"):
        hetrun("--what-if", "without emu-b", "--export", "megatron")


def test_tables_of_what_if_and_explain_are_shown(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = hetrun("--what-if", "1 Gb/s across").stderr
    assert "What if 1 Gb/s across" in shown
    assert "As it is" in shown
    shown = hetrun("--explain").stderr
    assert "where the plan's numbers come from" in shown
    assert "memory: states" in shown


def test_help_says_where_a_plan_and_an_export_go_when_out_is_left_out() -> None:
    shown = " ".join(CliRunner().invoke(app, ["plan", "--help"]).stdout.split())
    assert "plan.json; for" in shown
    assert "stdout)" in shown
