from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hetrun.errors import ConfigError, StorageError
from hetrun.model import StepEvent
from hetrun.report.events import read_events
from hetrun.report.gather import gather
from tests.unit.report_factory import make_plan, rank_events, write_events

PLAN = make_plan()


def lines_of(path: Path, extra: str) -> Path:
    path.write_text(path.read_text() + extra)
    return path


def first_step() -> dict[str, object]:
    event = next(event for event in rank_events(PLAN, 0) if isinstance(event, StepEvent))
    return asdict(event)


def test_every_kind_of_event_comes_back_as_it_was_written(tmp_path: Path) -> None:
    events = rank_events(PLAN, 2)
    warnings: list[str] = []
    assert list(read_events(write_events(tmp_path, 2, events), warnings.append)) == events
    assert warnings == []


@pytest.mark.parametrize("end", ["", "\n"], ids=["as written", "closed by launch"])
def test_a_torn_last_line_is_a_warning(tmp_path: Path, end: str) -> None:
    events = rank_events(PLAN, 0)
    path = lines_of(write_events(tmp_path, 0, events), '{"event": "step", "ra' + end)
    warnings: list[str] = []
    assert list(read_events(path, warnings.append)) == events
    assert len(warnings) == 1
    assert f"line {len(events) + 1}: torn" in warnings[0]


def test_a_whole_last_line_without_a_newline_counts(tmp_path: Path) -> None:
    events = rank_events(PLAN, 0)
    path = write_events(tmp_path, 0, events)
    path.write_text(path.read_text().rstrip("\n"))
    assert list(read_events(path, pytest.fail)) == events


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = lines_of(write_events(tmp_path, 0, []), '{"event": "st\n{"event": "ende"}\n')
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        list(read_events(path, pytest.fail))


def test_an_unknown_event_is_one_warning_however_often_it_comes(tmp_path: Path) -> None:
    path = lines_of(write_events(tmp_path, 0, []), '{"event": "\\u001b[31mnew", "x": 1}\n' * 5)
    warnings: list[str] = []
    assert list(read_events(path, warnings.append)) == []
    assert len(warnings) == 1
    assert "\x1b" not in warnings[0]


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("step_s", "fast", r"line 1: step_s is 'fast': input should be a valid number"),
        ("step", 1.5, r"line 1: step is 1\.5"),
        ("step", -1, r"line 1: step is -1, need 0 or more"),
        ("step_s", 0, r"line 1: step_s is 0.*, need more than 0"),
        ("step_s", float("nan"), r"line 1: step_s is nan: input should be a finite number"),
        ("idle_s", -0.1, r"line 1: idle_s is -0\.1, need 0 or more"),
        ("colour", "red", r"line 1: colour is 'red'"),
    ],
)
def test_a_wrong_field_is_an_error_with_its_place(
    tmp_path: Path, key: str, value: object, complaint: str
) -> None:
    path = lines_of(write_events(tmp_path, 0, []), json.dumps({**first_step(), key: value}) + "\n")
    with pytest.raises(ConfigError, match=complaint) as caught:
        list(read_events(path, pytest.fail))
    assert caught.value.hint


@pytest.mark.parametrize("line", ["[1, 2]", "7", '{"step": 1}', '{"event": 3}'])
def test_a_line_that_is_no_event_is_an_error(tmp_path: Path, line: str) -> None:
    path = lines_of(write_events(tmp_path, 0, []), line + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        list(read_events(path, pytest.fail))


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    fields = first_step()
    del fields["busy_s"]
    path = lines_of(write_events(tmp_path, 0, []), json.dumps(fields) + "\n")
    with pytest.raises(ConfigError, match="busy_s is missing"):
        list(read_events(path, pytest.fail))


def test_a_span_that_ends_before_it_starts_is_an_error(tmp_path: Path) -> None:
    span = {"kind": "F", "microbatch": 0, "start_s": 2.0, "end_s": 1.0}
    line = json.dumps({"event": "trace", "rank": 0, "step": 0, "spans": [span]})
    path = lines_of(write_events(tmp_path, 0, []), line + "\n")
    with pytest.raises(ConfigError, match=r"spans\.0 runs from 2\.0 to 1\.0"):
        list(read_events(path, pytest.fail))


def test_a_file_that_cannot_be_read_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read"):
        list(read_events(tmp_path, pytest.fail))


def test_events_that_name_another_rank_count_for_nobody(tmp_path: Path) -> None:
    write_events(tmp_path, 0, rank_events(PLAN, 1))
    gathered = gather(tmp_path / "events", num_ranks=4)
    assert gathered.ranks == {}
    assert gathered.steps == ()
    assert "name another rank" in gathered.warnings[0]


def test_files_of_ranks_outside_the_plan_are_passed_over(tmp_path: Path) -> None:
    write_events(tmp_path, 9, [])
    assert gather(tmp_path / "events", num_ranks=4).warnings == (
        "rank-0009.jsonl: the plan has 4 ranks, passed over",
    )


def test_a_step_that_comes_twice_counts_once(tmp_path: Path) -> None:
    events = rank_events(PLAN, 0)
    again = [replace(event, step_s=99.0) for event in events if isinstance(event, StepEvent)]
    write_events(tmp_path, 0, [*events, *again])
    gathered = gather(tmp_path / "events", num_ranks=4)
    assert max(step.step_s for step in gathered.steps) < 99
    assert "12 steps came twice" in gathered.warnings[0]


def test_sums_leave_the_first_step_out(tmp_path: Path) -> None:
    events = rank_events(PLAN, 0)
    write_events(tmp_path, 0, events)
    sums = gather(tmp_path / "events", num_ranks=4).ranks[0]
    assert sums.step_s == pytest.approx(11 * PLAN.split.cost.step_s)
    assert sums.num_later == 11
