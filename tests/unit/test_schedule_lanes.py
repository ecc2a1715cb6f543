"""The event simulation of lanes: against what was measured elsewhere, closed forms, and what must hold for every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.model import Order
from hetrun.schedule import StageTimes, steady_cycle_s
from hetrun.schedule.cuts import even_boundaries, layers_at
from hetrun.schedule.lanes import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Lane,
    Lanes,
    StageWork,
    bounded_windows,
)
from hetrun.schedule.periods import play_skipping

NUM_LAYERS, EMBEDDING, HEAD = 24, 0.2, 1.0  # extras in layers
ALL_LAYERS = NUM_LAYERS + EMBEDDING + HEAD
TWO_SPEEDS = (2.0, 2.0, 1.2, 1.2)
ZERO_BUBBLE, ONE_F_ONE_B = Order.ZERO_BUBBLE, Order.ONE_F_ONE_B


def played(stages: Sequence[StageWork], order: Order = ZERO_BUBBLE) -> list[Lane]:
    lanes = Lanes(stages, order)
    lanes.play()
    return lanes.lanes


def end_of(lanes: Sequence[Lane]) -> float:
    return max(lane.end_s for lane in lanes)


def bounded(
    layers: Callable[[int], Sequence[int]], speeds: Sequence[float], count: int
) -> list[StageWork]:
    """Stages with the notes' extras, without link times, whose B and W take as long as F."""
    size = len(speeds)
    stages = []
    for s, speed in enumerate(speeds):
        extra = EMBEDDING * (s == 0) + HEAD * (s == size - 1)
        seconds = tuple((layers(i)[s] + extra) / speed for i in range(count))
        window, most_held = bounded_windows(size, s)
        stages.append(
            StageWork(
                forward_s=seconds,
                backward_s=seconds,
                weights_s=seconds,
                send_s=0.0,
                window=window,
                most_held=most_held,
            )
        )
    return stages


def fractional(speeds: Sequence[float], count: int) -> list[Lane]:
    cuts = even_boundaries(NUM_LAYERS, speeds, first_extra=EMBEDDING, last_extra=HEAD)
    return played(bounded(lambda i: layers_at(cuts, NUM_LAYERS, i), speeds, count))


def used(lanes: Sequence[Lane], speeds: Sequence[float], count: int) -> float:
    """U: ideal time at summed speeds over simulated time."""
    return 3 * count * ALL_LAYERS / sum(speeds) / end_of(lanes)


@pytest.mark.parametrize(("count", "e1", "u"), [(64, 0.9864, 0.9819), (384, 0.9977, 0.9969)])
def test_two_speeds_reach_what_was_measured_elsewhere(count: int, e1: float, u: float) -> None:
    """The notes' cuts have another phase, which moves m = 64 by up to 0.4 points and m = 384 by 0.05."""
    mixed = fractional(TWO_SPEEDS, count)
    alone = [end_of(fractional(half, count)) for half in (TWO_SPEEDS[:2], TWO_SPEEDS[2:])]
    reached = 1 / end_of(mixed) / sum(1 / seconds for seconds in alone)
    assert reached == pytest.approx(e1, abs=0.0025 if count == 64 else 0.0005)
    assert used(mixed, TWO_SPEEDS, count) == pytest.approx(u, abs=0.0025 if count == 64 else 0.0005)
    assert [lane.peak for lane in mixed] == [7, 6, 5, 4]


def test_fractional_cuts_beat_the_best_whole_ones() -> None:
    whole = max(
        used(played(bounded(([cut] * 64).__getitem__, TWO_SPEEDS, 64)), TWO_SPEEDS, 64)
        for cut in [(7, 8, 5, 4), (7, 8, 4, 5), (8, 8, 4, 4), (8, 7, 5, 4), (7, 7, 5, 5)]
    )
    assert used(fractional(TWO_SPEEDS, 64), TWO_SPEEDS, 64) > whole + 0.02


def test_deferred_weights_without_a_bound_hold_nearly_every_activation() -> None:
    speeds = (2.0, 1.2, 0.8)
    cuts = even_boundaries(NUM_LAYERS, speeds)
    held = bounded(lambda i: layers_at(cuts, NUM_LAYERS, i), speeds, 96)
    free = [
        StageWork(
            forward_s=s.forward_s,
            backward_s=s.backward_s,
            weights_s=s.weights_s,
            send_s=0.0,
            window=96,
            most_held=96,
        )
        for s in held
    ]
    assert max(lane.peak for lane in played(free)) > 40
    assert max(lane.peak for lane in played(held)) <= 6


def constant(
    seconds: Sequence[tuple[float, float, float]], count: int, *, send_s: float = 0.0, more: int = 0
) -> list[StageWork]:
    """Stages that take (F, B, W) seconds for every microbatch, with 1F1B's windows and `more`."""
    return [
        StageWork(
            forward_s=(f,) * count,
            backward_s=(b,) * count,
            weights_s=(w,) * count,
            send_s=send_s,
            window=len(seconds) - index + more,
            most_held=len(seconds) - index + more + (w > 0),
        )
        for index, (f, b, w) in enumerate(seconds)
    ]


@pytest.mark.parametrize("count", [1, 4, 9])
def test_balanced_1f1b_takes_m_plus_p_minus_1_cycles(count: int) -> None:
    lanes = played(constant([(1, 2, 0)] * 4, count), ONE_F_ONE_B)
    assert end_of(lanes) == pytest.approx(3 * (count + 3), rel=1e-12)
    assert [lane.peak for lane in lanes] == [min(4 - s, count) for s in range(4)]


@pytest.mark.parametrize(("more", "cycle_s"), [(0, 3.35), (1, 3.3)])
def test_pace_of_1f1b_is_the_closed_forms_and_with_room_the_slowest_stages(
    more: int, cycle_s: float
) -> None:
    seconds = [(1.0, 2.0, 0.0), (1.1, 2.2, 0.0), (0.9, 1.8, 0.0)]
    times = [
        StageTimes(forward_s=f, backward_s=b, send_s=0.2, window=3 - i + more)
        for i, (f, b, _) in enumerate(seconds)
    ]
    ends = [
        end_of(played(constant(seconds, count, send_s=0.2, more=more), ONE_F_ONE_B))
        for count in (100, 200)
    ]
    assert (ends[1] - ends[0]) / 100 == pytest.approx(cycle_s, rel=1e-9)
    assert steady_cycle_s(times) == pytest.approx(3.35)


def test_zero_bubble_of_balanced_stages_waits_for_the_first_forwards_only() -> None:
    size, count = 4, 40
    lanes = played(constant([(1, 1, 1)] * size, count, more=2))
    assert lanes[-1].end_s == pytest.approx(3 * count + size - 1)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[StageWork], Order]:
    """Random stages of up to four lanes with any windows, zero durations and links among them."""
    count, size = draw(st.integers(1, 14)), draw(st.integers(1, 5))
    order = draw(st.sampled_from(Order))
    seconds = st.lists(
        st.one_of(st.just(0.0), st.floats(0.1, 3)), min_size=count, max_size=count
    ).map(tuple)
    stages = []
    for _ in range(size):
        window = draw(st.integers(1, 6))
        stages.append(
            StageWork(
                forward_s=draw(seconds),
                backward_s=draw(seconds),
                weights_s=draw(seconds) if order is ZERO_BUBBLE else (0.0,) * count,
                send_s=draw(st.floats(0, 1)),
                window=window,
                most_held=window + draw(st.integers(0, 2)),
                lanes=draw(st.integers(1, 4)),
            )
        )
    return stages, order


@settings(max_examples=150, deadline=None)
@given(pipelines())
def test_every_run_does_all_in_order_and_keeps_its_bounds(
    pipeline: tuple[list[StageWork], Order],
) -> None:
    stages, order = pipeline
    lanes = played(stages, order)
    for lane in lanes:
        count, entries = len(lane.seconds[0]), list(lane.entries())
        kinds = (FORWARD, BACKWARD, WEIGHTS) if order is ZERO_BUBBLE else (FORWARD, BACKWARD)
        for kind in kinds:
            assert [entry[1] for entry in entries if entry[0] == kind] == list(range(count))
        assert len(entries) == len(kinds) * count
        assert lane.peak <= (lane.most_held if order is ZERO_BUBBLE else lane.window)
        assert lane.end_s >= sum(map(sum, lane.seconds)) * (1 - 1e-12)
        for before, after in pairwise(entries):
            assert before[3] <= after[2]
    check_arrivals(stages, lanes)


def check_arrivals(stages: Sequence[StageWork], lanes: Sequence[Lane]) -> None:
    """No action before its input, W after B, and never more ahead than the bounds."""
    at = {}
    for lane in lanes:
        for kind, place, start_s, end_s in lane.entries():
            at[lane.stage, kind, place * lane.step + lane.number] = (start_s, end_s)
    for (stage, kind, i), (start_s, _) in at.items():
        if kind == FORWARD and stage:
            assert start_s >= at[stage - 1, FORWARD, i][1] + stages[stage - 1].send_s
        if kind == BACKWARD and stage + 1 < len(stages):
            assert start_s >= at[stage + 1, BACKWARD, i][1] + stages[stage].send_s
        if kind in (BACKWARD, WEIGHTS):
            assert start_s >= at[stage, kind - 1, i][1]
        ahead = i - stages[stage].window * stages[stage].lanes
        if kind == FORWARD and ahead >= 0:
            assert start_s >= at[stage, BACKWARD, ahead][1]


@pytest.mark.parametrize("order", list(Order))
def test_a_route_of_two_lanes_then_one_then_three_ends(order: Order) -> None:
    """By hand, with each lane in its own 1F1B, this stalls."""
    seconds = (1.0,) * 12
    apart = seconds if order is ZERO_BUBBLE else (0.0,) * 12
    stages = [
        StageWork(
            forward_s=seconds,
            backward_s=seconds,
            weights_s=apart,
            send_s=0.0,
            window=window,
            most_held=window + 1,
            lanes=lanes,
        )
        for lanes, window in [(2, 2), (1, 2), (3, 1)]
    ]
    assert len(played(stages, order)) == 6


def test_bad_pipelines_are_refused() -> None:
    with pytest.raises(ValueError, match="equally many"):
        Lanes([], ZERO_BUBBLE)
    good = constant([(1, 1, 1)], 1)[0]
    with pytest.raises(ValueError, match="window 3, need 1 to most_held 2"):
        replace(good, window=3, most_held=2)
    with pytest.raises(ValueError, match="0 lanes"):
        replace(good, lanes=0)


@st.composite
def uniform_pipelines(draw: st.DrawFn) -> list[StageWork]:
    """Stages of one lane whose microbatches are alike, in zero bubble, long enough for periods."""
    size, count = draw(st.integers(1, 5)), draw(st.integers(20, 120))
    tick = st.integers(0, 12).map(lambda n: n / 4)  # ties are likely
    seconds = st.one_of(tick, st.floats(0.1, 3))
    stages = []
    for index in range(size):
        window = size - index + draw(st.integers(0, 3))
        stages.append(
            StageWork(
                forward_s=(draw(seconds) + 0.25,) * count,
                backward_s=(draw(seconds),) * count,
                weights_s=(draw(seconds),) * count,
                send_s=draw(st.one_of(st.just(0.0), st.floats(0, 1))),
                window=window,
                most_held=window + draw(st.integers(0, 2)),
            )
        )
    return stages


@settings(max_examples=150, deadline=None)
@given(uniform_pipelines())
def test_skipping_periods_changes_no_end(stages: list[StageWork]) -> None:
    skipped = Lanes(stages, ZERO_BUBBLE)
    play_skipping(skipped)
    ends = [lane.end_s for lane in played(stages)]
    assert [lane.end_s for lane in skipped.lanes] == pytest.approx(ends, rel=1e-9)


def test_a_long_pipeline_of_equal_microbatches_is_skipped_through() -> None:
    lanes = Lanes(constant([(1.0, 1.1, 0.9)] * 6, 3000, more=2), ZERO_BUBBLE)
    play_skipping(lanes)
    assert sum(len(lane.kinds) for lane in lanes.lanes) < 6 * 3 * 300
    slow = played(constant([(1.0, 1.1, 0.9)] * 6, 3000, more=2))
    assert end_of(lanes.lanes) == pytest.approx(end_of(slow), rel=1e-12)


def test_periods_are_not_looked_for_where_microbatches_differ() -> None:
    good = constant([(1, 1, 1)] * 2, 4)
    with pytest.raises(ValueError, match="alike"):
        play_skipping(Lanes([replace(good[0], forward_s=(1, 2, 1, 2)), good[1]], ZERO_BUBBLE))


@pytest.mark.parametrize(
    ("order", "weights_s", "actions"),
    [(ONE_F_ONE_B, 0.0, "F0 F1 B0 F2 B1 B2"), (ZERO_BUBBLE, 1.0, "F0 B0 F1 B1 F2 B2 W0 W1 W2")],
)
def test_1f1b_takes_a_forward_first_and_zero_bubble_a_backward(
    order: Order, weights_s: float, actions: str
) -> None:
    (lane,) = played([replace(constant([(1, 1, weights_s)], 3)[0], window=2, most_held=3)], order)
    assert " ".join(f"{'FBW'[kind]}{place}" for kind, place, *_ in lane.entries()) == actions
