"""The event simulation against closed forms, hand-made cases and its own promises."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.schedule import (
    ActionKind,
    StageTimes,
    lower_bound_s,
    plain_window,
    simulate_pipeline,
    steady_cycle_s,
    upper_bound_s,
)
from hetrun.schedule.pipeline import pipeline_ends

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD


def stages_1f1b(
    totals: Sequence[float], *, send_s: float = 0.0, extra: Sequence[int] | None = None
) -> list[StageTimes]:
    """Stages whose forward is a third of their total; windows of plain 1F1B plus `extra`."""
    extra = extra or [0] * len(totals)
    return [
        StageTimes(
            forward_s=total / 3,
            backward_s=2 * total / 3,
            send_s=send_s if index < len(totals) - 1 else 0.0,
            window=plain_window(len(totals), index) + extra[index],
        )
        for index, total in enumerate(totals)
    ]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[StageTimes], int]:
    """Random stages with links and widened windows."""
    num_stages = draw(st.integers(1, 6))
    seconds = st.floats(0.05, 4.0, allow_nan=False)
    stages = []
    window = 0
    for index in reversed(range(num_stages)):
        window += 1 + (draw(st.integers(0, 2)) if index < num_stages - 1 else 0)
        stages.append(
            StageTimes(
                forward_s=draw(seconds),
                backward_s=draw(seconds),
                send_s=draw(st.floats(0.0, 1.0)) if index < num_stages - 1 else 0.0,
                window=window,
            )
        )
    return stages[::-1], draw(st.integers(1, 24))


@pytest.mark.parametrize(("totals", "end_s"), [([3, 1, 1, 1], 24.0), ([1, 1, 1, 3], 27.0)])
def test_order_of_unequal_stages_matters(totals: list[float], end_s: float) -> None:
    assert simulate_pipeline(stages_1f1b(totals), 8).end_s == pytest.approx(end_s, rel=1e-12)


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_microbatches", [1, 4, 9])
def test_balanced_stages_without_links_take_m_plus_p_minus_1_cycles(
    num_stages: int, num_microbatches: int
) -> None:
    run = simulate_pipeline(stages_1f1b([3.0] * num_stages), num_microbatches)
    assert run.end_s == pytest.approx(3.0 * (num_microbatches + num_stages - 1), rel=1e-12)
    held = tuple(min(num_stages - s, num_microbatches) for s in range(num_stages))
    assert run.peak_activations == held


def test_two_stages_run_the_known_1f1b_order() -> None:
    run = simulate_pipeline(stages_1f1b([3.0, 3.0]), 3)
    orders = ["".join(f"{a.kind.value}{a.microbatch}" for a in stage) for stage in run.actions]
    assert orders == ["F0F1B0F2B1B2", "F0B0F1B1F2B2"]
    assert [a.start_s for a in run.actions[1]] == pytest.approx([1, 2, 4, 5, 7, 8])


def test_wider_window_hides_a_slow_link() -> None:
    plain = simulate_pipeline(stages_1f1b([3.0] * 4, send_s=0.5), 64)
    extra = [4 - 1 - s for s in range(4)]
    wide = simulate_pipeline(stages_1f1b([3.0] * 4, send_s=0.5, extra=extra), 64)
    assert plain.end_s > 1.1 * wide.end_s
    assert wide.end_s < 1.01 * (64 * 3.0 + 3 * 3.0 + 2 * 3 * 0.5)
    assert max(wide.peak_activations) > max(plain.peak_activations)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8),
    st.floats(0.0, 0.5),
    st.integers(0, 3),
)
def test_steady_cycle_formula_holds_within_half_a_percent(
    totals: list[float], send_s: float, wide: int
) -> None:
    extra = [int(index < wide) for index in range(len(totals) - 1)] + [0]
    stages = stages_1f1b(totals, send_s=send_s, extra=extra)
    short, long = 150, 450
    rise_s = max(pipeline_ends(stages, long)) - max(pipeline_ends(stages, short))
    assert rise_s / (long - short) == pytest.approx(steady_cycle_s(stages), rel=5e-3)


@settings(max_examples=150, deadline=None)
@given(pipelines())
def test_bounds_are_never_violated(case: tuple[list[StageTimes], int]) -> None:
    stages, num_microbatches = case
    end_s = simulate_pipeline(stages, num_microbatches).end_s
    assert end_s >= lower_bound_s(stages, num_microbatches) * (1 - 1e-12)
    assert end_s <= upper_bound_s(stages, num_microbatches) * (1 + 1e-12)


@settings(max_examples=150, deadline=None)
@given(pipelines())
def test_every_action_runs_once_after_its_inputs_and_within_the_window(
    case: tuple[list[StageTimes], int],
) -> None:
    stages, num_microbatches = case
    run = simulate_pipeline(stages, num_microbatches)
    ends = [{(a.kind, a.microbatch): a.end_s for a in actions} for actions in run.actions]
    every = {(kind, i) for kind in (FORWARD, BACKWARD) for i in range(num_microbatches)}
    for index, actions in enumerate(run.actions):
        assert len(actions) == len(every)
        assert set(ends[index]) == every
        in_flight = peak = 0
        free_s = 0.0
        for action in actions:
            key = (action.kind, action.microbatch)
            needs = free_s
            if action.kind is ActionKind.FORWARD:
                if index > 0:
                    needs = max(needs, ends[index - 1][key] + stages[index - 1].send_s)
                in_flight += 1
                seconds = stages[index].forward_s
            else:
                needs = max(needs, ends[index][ActionKind.FORWARD, action.microbatch])
                if index < len(stages) - 1:
                    needs = max(needs, ends[index + 1][key] + stages[index].send_s)
                in_flight -= 1
                seconds = stages[index].backward_s
            peak = max(peak, in_flight)
            assert in_flight <= stages[index].window
            assert action.start_s >= needs
            assert action.end_s == action.start_s + seconds
            free_s = action.end_s
        assert peak == run.peak_activations[index]
        assert free_s == run.stage_end_s[index]
    assert pipeline_ends(stages, num_microbatches) == pytest.approx(run.stage_end_s, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(pipelines(), st.integers(1, 300))
def test_skipped_rounds_change_no_end(
    case: tuple[list[StageTimes], int], num_microbatches: int
) -> None:
    stages, _ = case
    ends = pipeline_ends(stages, num_microbatches)
    played = simulate_pipeline(stages, num_microbatches).stage_end_s
    assert ends == pytest.approx(played, rel=1e-11)


def test_long_pipelines_cost_no_more_than_short_ones() -> None:
    stages = stages_1f1b([1.0, 1.1, 0.9, 1.0], send_s=0.1)
    started = time.process_time()
    end_s = max(pipeline_ends(stages, 10_000_000))
    assert time.process_time() - started < 1.0
    assert end_s / 10_000_000 == pytest.approx(steady_cycle_s(stages), rel=1e-4)


def test_stages_without_work_cost_nothing_and_end() -> None:
    idle = StageTimes(forward_s=0.0, backward_s=0.0, send_s=0.0, window=2)
    busy = StageTimes(forward_s=1.0, backward_s=2.0, send_s=0.0, window=1)
    assert simulate_pipeline([idle, busy], 5).end_s == 15.0


def test_window_wider_than_upstream_is_cut_so_that_the_order_cannot_deadlock() -> None:
    stages = [
        StageTimes(forward_s=1.0, backward_s=1.0, send_s=0.0, window=1),
        StageTimes(forward_s=1.0, backward_s=1.0, send_s=0.0, window=5),
    ]
    run = simulate_pipeline(stages, 4)
    assert run.peak_activations == (1, 1)
    assert run.end_s == 16.0


@pytest.mark.parametrize("num_microbatches", [0, -1])
def test_pipeline_without_microbatches_is_refused(num_microbatches: int) -> None:
    with pytest.raises(ValueError, match="need 1 of each"):
        simulate_pipeline(stages_1f1b([1.0]), num_microbatches)


def test_pipeline_without_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="need 1 of each"):
        simulate_pipeline([], 1)


@pytest.mark.parametrize(
    "wrong", [{"forward_s": -1.0}, {"backward_s": -1.0}, {"send_s": -1.0}, {"window": 0}]
)
def test_impossible_stage_times_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need"):
        StageTimes(**({"forward_s": 1.0, "backward_s": 1.0, "send_s": 0.0, "window": 1} | wrong))  # type: ignore[arg-type]


def test_simulation_is_fast_enough_to_rank_candidates() -> None:
    stages = stages_1f1b([1.0] * 8, send_s=0.01)
    started = time.process_time()
    pipeline_ends(stages, 1000)
    assert 16_000 / (time.process_time() - started) > 2e5  # ten times that on an idle core
