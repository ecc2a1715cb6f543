from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrun import store
from hetrun.errors import ConfigError, JobError
from hetrun.model import (
    Baseline,
    EndEvent,
    ErrorEvent,
    Failure,
    Plan,
    RunReport,
    Source,
    StepEvent,
    TraceEvent,
)
from hetrun.report import build_report
from tests.unit.report_factory import (
    SEQ_LEN,
    Event,
    Shape,
    loss_at,
    make_outcome,
    make_plan,
    rank_events,
    write_run,
)

PLAN = make_plan()


def report_of(folder: Path, plan: Plan = PLAN) -> RunReport:
    return build_report(write_run(folder, plan, outcome=make_outcome(plan)))


def steps_changed(events: list[Event], **changes: object) -> list[Event]:
    return [
        replace(event, **changes) if isinstance(event, StepEvent) else event  # type: ignore[arg-type]
        for event in events
    ]


def test_a_healthy_run_has_no_warning_and_survives_its_file(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    assert report.warnings == ()
    assert report.status == "done"
    store.save(report, tmp_path / "report.json")
    assert store.load(RunReport, tmp_path / "report.json") == report


def test_loss_is_the_one_that_the_ranks_share(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    assert report.loss.values == tuple(loss_at(step) for step in range(12))
    assert (report.loss.first, report.loss.last) == (loss_at(0), loss_at(11))


def test_throughput_is_tokens_over_the_median_step_without_the_first(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    assert report.step_s == pytest.approx(PLAN.split.cost.step_s)
    assert report.tokens_per_s == pytest.approx(16 * (SEQ_LEN - 1) / report.step_s)
    assert report.prediction_error == pytest.approx(0)


def test_the_first_step_is_in_no_mean(tmp_path: Path) -> None:
    plan = make_plan(steps=2)  # the first one takes 30 % more
    assert report_of(tmp_path, plan).step_s == pytest.approx(plan.split.cost.step_s)


def test_a_step_takes_as_long_as_its_slowest_rank(tmp_path: Path) -> None:
    def slow(rank: int, events: list[Event]) -> list[Event]:
        return steps_changed(events, step_s=9.0) if rank == 2 else events

    report = build_report(write_run(tmp_path, PLAN, outcome=make_outcome(PLAN), change=slow))
    assert report.step_s == 9.0


@pytest.mark.parametrize(
    "shape",
    [Shape((("aurora", 24),)), Shape((("aurora", 15), ("corona", 9)), num_replicas=3)],
    ids=["one rank", "replicas"],
)
def test_shares_of_every_rank_add_up_to_one(tmp_path: Path, shape: Shape) -> None:
    plan = make_plan(shape)
    report = report_of(tmp_path, plan)
    assert len(report.ranks) == len(plan.split.ranks)
    for use in report.ranks:
        assert use.busy + use.communication + use.idle == pytest.approx(1, abs=1e-12)
        assert min(use.busy, use.communication, use.idle) >= 0


def test_time_that_a_rank_does_not_account_for_is_idle_and_said(tmp_path: Path) -> None:
    def lazy(rank: int, events: list[Event]) -> list[Event]:
        return steps_changed(events, idle_s=0.0) if rank == 0 else events

    healthy = report_of(tmp_path / "a")
    report = build_report(write_run(tmp_path / "b", PLAN, outcome=make_outcome(PLAN), change=lazy))
    assert report.ranks[0].idle == pytest.approx(healthy.ranks[0].idle)
    assert any("in none of busy, communication and idle" in text for text in report.warnings)


def test_efficiency_of_a_run_as_predicted_is_the_planned_one(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    for run, planned in (("e1", "e1"), ("e2", "e2"), ("u", "u")):
        value = getattr(report.efficiency, run).value
        assert value == pytest.approx(getattr(PLAN.split.efficiency, planned).value)
        assert getattr(report.efficiency, run).kind is Source.MODELLED
    assert report.even_split is not None
    assert PLAN.even_split is not None
    assert report.even_split.efficiency == PLAN.even_split.efficiency
    assert report.even_split.shape == "1 replica x 4 stages"


def test_measured_seconds_against_simulated_baselines_stay_modelled(tmp_path: Path) -> None:
    report = report_of(tmp_path, make_plan(emulated=False))
    assert report.kind == "measured"
    assert report.efficiency.e1.kind is Source.MODELLED
    assert report.efficiency.e2.kind is Source.MODELLED
    assert report.efficiency.u.kind is Source.MEASURED


def test_a_vendor_that_cannot_train_alone_leaves_no_e1_but_a_reason(tmp_path: Path) -> None:
    alone = Baseline(
        vendor="aurora",
        num_devices=2,
        rows_per_s=None,
        scaled_batch_rows=8,
        scaled_rows_per_s=None,
        ideal_rows_per_s=10.0,
        shape="",
        why="lacks 12 GiB",
    )
    report = report_of(tmp_path, make_plan(baselines=(alone,)))
    assert report.efficiency.e1.value is None
    assert "lacks 12 GiB" in report.efficiency.e1.why
    assert report.efficiency.u.value is not None


def test_stages_say_what_they_hold_and_what_their_ranks_reported(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    first, last = report.stages[0], report.stages[-1]
    assert (first.vendor, first.num_layers, first.has_embedding) == ("aurora", 7, True)
    assert (last.first_layer, last.has_head, last.rows) == (20, True, 16)
    assert first.busy == report.ranks[0].busy
    assert last.peak_memory_bytes == (3 << 30) + 3


def test_the_timeline_is_the_last_step_that_most_ranks_traced(tmp_path: Path) -> None:
    def late(rank: int, events: list[Event]) -> list[Event]:
        if rank != 0:
            return events
        last = next(event for event in events if isinstance(event, TraceEvent))
        return [*events, replace(last, step=last.step + 5)]

    report = build_report(write_run(tmp_path, PLAN, outcome=make_outcome(PLAN), change=late))
    assert {trace.step for trace in report.timeline} == {11}
    assert [trace.rank for trace in report.timeline] == [0, 1, 2, 3]


def test_missing_ranks_are_named_and_the_rest_is_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path, PLAN, outcome=make_outcome(PLAN))
    (folder / "events" / "rank-0002.jsonl").unlink()
    report = build_report(folder)
    assert [use.rank for use in report.ranks] == [0, 1, 3]
    assert "no events from rank 2 (b1): left out of all means" in report.warnings
    assert report.stages[2].busy is None


def test_ranks_that_disagree_on_the_loss_are_a_warning(tmp_path: Path) -> None:
    def drift(rank: int, events: list[Event]) -> list[Event]:
        return steps_changed(events, loss=9.0) if rank == 3 else events

    report = build_report(write_run(tmp_path, PLAN, outcome=make_outcome(PLAN), change=drift))
    assert any("ranks disagree on the loss at 12 steps" in text for text in report.warnings)
    assert report.loss.first == loss_at(0)


def test_replicas_that_end_with_different_parameters_are_a_warning(tmp_path: Path) -> None:
    plan = make_plan(Shape((("aurora", 24),), num_replicas=2))

    def other(rank: int, events: list[Event]) -> list[Event]:
        return [
            replace(event, parameters_sha="b" * 64)
            if rank == 1 and isinstance(event, EndEvent)
            else event
            for event in events
        ]

    report = build_report(write_run(tmp_path, plan, outcome=make_outcome(plan), change=other))
    assert any("ended with different parameters" in text for text in report.warnings)


def test_a_modelled_run_off_its_prediction_is_a_warning(tmp_path: Path) -> None:
    slower = lambda rank, events: steps_changed(events, step_s=2.0)  # noqa: E731
    report = build_report(write_run(tmp_path, PLAN, outcome=make_outcome(PLAN), change=slower))
    assert any("against the prediction" in text for text in report.warnings)


def test_a_changed_plan_is_a_warning(tmp_path: Path) -> None:
    outcome = replace(make_outcome(PLAN), plan_sha="0" * 64)
    report = build_report(write_run(tmp_path, PLAN, outcome=outcome))
    assert any("plan.json was changed" in text for text in report.warnings)


def test_a_failed_run_is_reported_as_far_as_it_came(tmp_path: Path) -> None:
    failure = Failure(host="b1", rank=3, when_s=5.0, what="killed by signal 9")
    outcome = make_outcome(PLAN, "failed", (failure,))
    stopped = lambda rank, events: rank_events(PLAN, rank, steps=4)  # noqa: E731
    report = build_report(write_run(tmp_path, PLAN, outcome=outcome, change=stopped))
    assert (report.status, report.steps, report.planned_steps) == ("failed", 4, 12)
    assert report.failures == (failure,)
    assert "the run ended early: 4 steps of 12 finished" in report.warnings


def test_without_launch_json_the_run_is_unfinished_and_errors_speak(tmp_path: Path) -> None:
    def raised(rank: int, events: list[Event]) -> list[Event]:
        error = ErrorEvent(
            rank=rank,
            host="b1",
            wall_s=50.0 - rank,
            step=12,
            kind="ValueError",
            message="no",
            traceback="one\ntwo",
        )
        return [*events, error] if rank >= 2 else events

    report = build_report(write_run(tmp_path, PLAN, outcome=None, change=raised))
    assert report.status == "unfinished"
    assert [failure.rank for failure in report.failures] == [3, 2]  # the earliest first
    assert report.failures[0].last_lines == ("one", "two")
    assert any("launch.json is missing" in text for text in report.warnings)
    assert report.wall_s == pytest.approx(12.0)


def test_a_run_without_a_step_is_an_error_that_names_the_cause(tmp_path: Path) -> None:
    failure = Failure(host="b1", rank=3, when_s=5.0, what="raised ValueError: no")
    folder = write_run(
        tmp_path,
        PLAN,
        outcome=make_outcome(PLAN, "failed", (failure,)),
        change=lambda rank, events: events[:1],
    )
    with pytest.raises(
        JobError, match=r"no rank finished a step.*rank 3: raised ValueError"
    ) as info:
        build_report(folder)
    assert info.value.hint
    assert "all.log" in info.value.hint


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plan\.json is missing"):
        build_report(tmp_path)
    with pytest.raises(ConfigError, match="is not there"):
        build_report(tmp_path / "nowhere")


def test_a_file_is_no_run_folder_but_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "run"
    file.write_text("")
    with pytest.raises(ConfigError, match="is no run folder"):
        build_report(file)


def test_one_step_alone_is_reported_with_a_warning(tmp_path: Path) -> None:
    plan = make_plan(steps=1)
    report = report_of(tmp_path, plan)
    assert report.step_s == pytest.approx(1.3 * plan.split.cost.step_s)
    assert "only one step was finished: its time includes set-up" in report.warnings


def test_a_slow_step_is_named(tmp_path: Path) -> None:
    def jitter(rank: int, events: list[Event]) -> list[Event]:
        return [
            replace(event, step_s=8.0)
            if isinstance(event, StepEvent) and event.step == 7
            else event
            for event in events
        ]

    report = build_report(write_run(tmp_path, PLAN, outcome=make_outcome(PLAN), change=jitter))
    assert any("the slowest, step 7, took 8.00 s" in text for text in report.warnings)
