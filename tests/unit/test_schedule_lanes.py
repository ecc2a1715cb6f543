"""The event simulation of lanes: against what was measured elsewhere, closed forms, and what must hold for every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.model import Order
from hetrun.schedule import StageTimes, steady_cycle_s
from hetrun.schedule.cuts import even_boundaries, layers_at
from hetrun.schedule.lanes import Lanes, StageWork, bounded_windows
from hetrun.schedule.periods import play_skipping
from hetrun.schedule.rules import BACKWARD, FORWARD, WEIGHTS, Lane

NUM_LAYERS, EMBEDDING, HEAD = 24, 0.2, 1.0  # extras in layers
ALL_LAYERS = NUM_LAYERS + EMBEDDING + HEAD
TWO_SPEEDS = (2.0, 2.0, 1.2, 1.2)
ZERO_BUBBLE, ONE_F_ONE_B = Order.ZERO_BUBBLE, Order.ONE_F_ONE_B


def played(stages: Sequence[StageWork], order: Order = ZERO_BUBBLE) -> list[Lane]:
    lanes = Lanes(stages, order)
    lanes.play()
    return list(lanes.lanes)


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
    times = [st.one_of(st.just(0.0), st.floats(0.1, 3)), st.floats(0.1, 3), st.floats(1, 1.2)]
    one = times[draw(st.integers(0, 2))]  # only without zeros do lanes act on
    seconds = st.lists(one, min_size=count, max_size=count).map(tuple)
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
        mine, entries = range(len(lane.work[0]))[lane.number :: lane.step], list(lane.entries())
        kinds = (FORWARD, BACKWARD, WEIGHTS) if order is ZERO_BUBBLE else (FORWARD, BACKWARD)
        for kind in kinds:
            assert [entry[1] for entry in entries if entry[0] == kind] == list(mine)
        assert len(entries) == len(kinds) * len(mine)
        assert lane.peak <= (lane.most_held if order is ZERO_BUBBLE else lane.window)
        assert lane.end_s >= sum(own[i] for own in lane.work for i in mine) * (1 - 1e-12)
        for before, after in pairwise(entries):
            assert before[3] <= after[2]
    check_arrivals(stages, lanes)


def test_a_send_too_short_for_the_clock_ends() -> None:
    stages = [
        replace(own, send_s=s)
        for own, s in zip(constant([(0, 0, 0)] * 3, 2), (1.0, 5e-324, 0.0), strict=True)
    ]
    assert end_of(played(stages, ONE_F_ONE_B)) == 2.0


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_lanes_that_act_on_do_what_lanes_asked_in_order_of_time_do(
    pipeline: tuple[list[StageWork], Order],
) -> None:
    stages, order = pipeline
    expected = asked_in_order(stages, splits=order is ZERO_BUBBLE)
    for lane in played(stages, order):
        assert list(lane.entries()) == expected[lane.stage, lane.number]


Actions = dict[tuple[int, int], list[tuple[int, int, float, float]]]


def asked_in_order(stages: Sequence[StageWork], *, splits: bool) -> Actions:
    """The rules once more, one action per lane and moment: always the lane whose time is least, lists nowhere shared."""
    count, last = len(stages[0].forward_s), len(stages) - 1
    places = [(stage, lane) for stage, work in enumerate(stages) for lane in range(work.lanes)]
    done: Actions = {place: [] for place in places}
    arrived = {(0, FORWARD, i): 0.0 for i in range(count)}
    work_s = sum(sum(work.forward_s) + sum(work.backward_s) for work in stages)
    slack_s = 1e-9 * work_s / (2 * len(stages) * count)
    free_s = dict.fromkeys(places, 0.0)
    asked_s = 0.0
    while asked_s < inf:
        for stage, lane in places:
            if free_s[stage, lane] > asked_s:
                continue
            work, own = stages[stage], done[stage, lane]
            numbers = [sum(entry[0] == kind for entry in own) for kind in range(3)]
            f, b, w = (lane + number * work.lanes for number in numbers)
            room = numbers[0] - numbers[1] < work.window
            if splits:
                room = room and numbers[0] - numbers[2] < work.most_held
            can_f = room and arrived.get((stage, FORWARD, f), inf) <= asked_s + slack_s
            can_b = arrived.get((stage, BACKWARD, b), inf) <= asked_s + slack_s
            if can_b and (splits or not can_f):
                kind, i, seconds = BACKWARD, b, work.backward_s
            elif can_f:
                kind, i, seconds = FORWARD, f, work.forward_s
            elif splits and w < b:
                kind, i, seconds = WEIGHTS, w, work.weights_s
            else:
                continue
            start_s = max(asked_s, arrived.get((stage, kind, i), 0.0))
            free_s[stage, lane] = end_s = start_s + seconds[i]
            own.append((kind, i, start_s, end_s))
            if kind == FORWARD:
                there = (stage + 1, FORWARD, i) if stage < last else (stage, BACKWARD, i)
                arrived[there] = end_s + work.send_s * (stage < last)
            elif kind == BACKWARD and stage:
                arrived[stage - 1, BACKWARD, i] = end_s + stages[stage - 1].send_s
            break  # this may have woken a lane before it
        else:
            times = [*free_s.values(), *arrived.values()]
            asked_s = min((time_s for time_s in times if time_s > asked_s), default=inf)
    return done


def check_arrivals(stages: Sequence[StageWork], lanes: Sequence[Lane]) -> None:
    """No action before its input, W after B, and never more ahead than the bounds."""
    at = {}
    for lane in lanes:
        for kind, i, start_s, end_s in lane.entries():
            at[lane.stage, kind, i] = (start_s, end_s)
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
    """Stages whose microbatches are alike, in zero bubble, half of them with lanes, long enough for periods."""
    size, count = draw(st.integers(1, 5)), draw(st.integers(20, 120))
    lanes = st.integers(1, 3) if draw(st.booleans()) else st.just(1)
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
                lanes=draw(lanes),
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


def test_a_long_route_of_lanes_is_skipped_through() -> None:
    stages = constant([(3.0, 6.0, 0.0), (1.0, 2.0, 0.0), (2.0, 4.0, 0.0)], 3000, send_s=0.1)
    route = [replace(own, lanes=n) for own, n in zip(stages, (3, 1, 2), strict=True)]
    lanes = Lanes(route, ONE_F_ONE_B)
    play_skipping(lanes)
    assert sum(len(lane.kinds) for lane in lanes.lanes) < 3 * 2 * 300
    assert end_of(lanes.lanes) == pytest.approx(end_of(played(route, ONE_F_ONE_B)), rel=1e-12)


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
    assert " ".join(f"{'FBW'[kind]}{i}" for kind, i, *_ in lane.entries()) == actions
