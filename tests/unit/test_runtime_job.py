"""The worker's decoder takes what launch writes and nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hetrun.errors import ConfigError, StorageError
from hetrun.model import EmulatedChip, Link, LinkKind, Plan, plan_sha
from hetrun.runtime.job import decode, env_path, read_env, read_json, read_plan
from tests.dist.plans import Pipeline, make_plan

PLAN = make_plan((Pipeline((5, 3), 2, 6), Pipeline((2, 3, 3), 1, 4)))
CHIP = {"vendor": "red", "model": "r1", "num_devices": 2, "flops_per_s": 1e9, "memory_bytes": 99}


def _plan_data(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(asdict(PLAN)))
    return {**data, **changes}


def _write(folder: Path, data: object) -> Path:
    (folder / "plan.json").write_text(json.dumps(data))
    return folder


def test_plan_survives_the_way_to_the_worker(tmp_path: Path) -> None:
    plan = read_plan(_write(tmp_path, _plan_data()))
    assert plan == PLAN
    assert plan_sha(plan) == plan_sha(PLAN)


def test_another_schema_version_names_the_command_that_rewrites(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="schema_version 99") as caught:
        read_plan(_write(tmp_path, _plan_data(schema_version=99)))
    assert "hetrun plan" in str(caught.value.hint)


@pytest.mark.parametrize("data", [[], 3, None, "text"])
def test_plan_that_is_no_object_is_refused(data: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="schema_version None"):
        read_plan(_write(tmp_path, data))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_device": 1}, "here: unknown key 'num_device', known are vendor, "),
        ({"num_devices": True}, "here.num_devices: got true, need int"),
        ({"num_devices": "2"}, 'here.num_devices: got "2", need int'),
        ({"num_devices": 2.0}, "here.num_devices: got 2.0, need int"),
        ({"flops_per_s": None}, "here.flops_per_s: got null, need float"),
        ({"flops_per_s": True}, "here.flops_per_s: got true, need float"),
        ({"vendor": 1}, "here.vendor: got 1, need str"),
        ({"num_devices": 0}, "here: emulated r1: num_devices 0, need 1 to 1024"),
    ],
)
def test_wrong_value_is_refused_with_its_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(EmulatedChip, {**CHIP, **changes}, where="here")
    assert str(caught.value).startswith(message)


def test_missing_key_is_refused() -> None:
    data = {key: value for key, value in CHIP.items() if key != "model"}
    with pytest.raises(ConfigError, match="here: key 'model' is missing"):
        decode(EmulatedChip, data, where="here")


def test_integer_passes_for_a_float() -> None:
    chip = decode(EmulatedChip, {**CHIP, "flops_per_s": 5}, where="here")
    assert chip.flops_per_s == 5.0
    assert isinstance(chip.flops_per_s, float)


def test_enum_and_default_and_null_are_understood() -> None:
    data = {"kind": "across", "latency_s": 0, "bytes_per_s": 1, "a": None, "b": "red"}
    link = decode(Link, data, where="here")
    assert link == Link(kind=LinkKind.ACROSS, latency_s=0, bytes_per_s=1, b="red")


@pytest.mark.parametrize("kind", ["sideways", 3, None, ["across"]])
def test_value_outside_a_closed_set_lists_the_set(kind: object) -> None:
    with pytest.raises(ConfigError, match="one of 'inside_host', 'inside_island', 'across'"):
        decode(Link, {"kind": kind, "latency_s": 0, "bytes_per_s": 1}, where="here")


def test_list_where_an_object_belongs_is_refused_with_its_index() -> None:
    data = _plan_data()
    data["split"]["replicas"][1]["stages"][2] = []
    with pytest.raises(
        ConfigError, match=r"split\.replicas\[1\]\.stages\[2\]: got \[\], need an obj"
    ):
        decode(Plan, data, where="plan")


@pytest.mark.parametrize("text", ["{", "", '{"a": NaN}', '{"a": -Infinity}'])
def test_broken_json_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not JSON"):
        read_json(path)


def test_missing_file_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        read_plan(tmp_path)


def test_environment_holds_text_only(tmp_path: Path) -> None:
    path = env_path(tmp_path, 12)
    assert path == tmp_path / "env" / "rank-0012.json"
    path.parent.mkdir()
    path.write_text('{"A": "1", "B": "x y"}')
    assert read_env(tmp_path, 12) == {"A": "1", "B": "x y"}
    path.write_text('{"A": 1}')
    with pytest.raises(ConfigError, match=r"json\.A: got 1, need str"):
        read_env(tmp_path, 12)
