"""Bounded zero bubble and fractional cuts against what was measured elsewhere, and what must hold for every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.schedule.zero_bubble import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    SplitRun,
    SplitStage,
    bounded_windows,
    even_boundaries,
    held_layers,
    layers_at,
    simulate_split,
    split_stages,
)

NUM_LAYERS, EMBEDDING, HEAD = 24, 0.2, 1.0  # extras in layers
ALL_LAYERS = NUM_LAYERS + EMBEDDING + HEAD


def run(layers: Callable[[int], Sequence[int]], speeds: Sequence[float], count: int) -> SplitRun:
    stages = split_stages(layers, speeds, count, first_extra=EMBEDDING, last_extra=HEAD)
    return simulate_split(stages)


def fractional(speeds: Sequence[float], count: int) -> SplitRun:
    cuts = even_boundaries(NUM_LAYERS, speeds, first_extra=EMBEDDING, last_extra=HEAD)
    return run(lambda i: layers_at(cuts, NUM_LAYERS, i), speeds, count)


def whole_cuts(layers: Sequence[int], speeds: Sequence[float], count: int) -> SplitRun:
    return run(lambda _: layers, speeds, count)


def used(result: SplitRun, speeds: Sequence[float], count: int) -> float:
    """U: ideal time at summed speeds over simulated time."""
    return 3 * count * ALL_LAYERS / sum(speeds) / result.end_s


@pytest.mark.parametrize(("count", "e1", "u"), [(64, 0.9864, 0.9819), (384, 0.9977, 0.9969)])
def test_two_speeds_reach_what_was_measured_elsewhere(count: int, e1: float, u: float) -> None:
    """The notes' cuts have another phase, which moves m = 64 by up to 0.4 points and m = 384 by 0.05."""
    speeds = (2.0, 2.0, 1.2, 1.2)
    mixed = fractional(speeds, count)
    alone = [fractional(speeds[:2], count).end_s, fractional(speeds[2:], count).end_s]
    reached = 1 / mixed.end_s / sum(1 / seconds for seconds in alone)
    assert reached == pytest.approx(e1, abs=0.0025 if count == 64 else 0.0005)
    assert used(mixed, speeds, count) == pytest.approx(u, abs=0.0025 if count == 64 else 0.0005)
    assert mixed.peak_activations == (7, 6, 5, 4)


def test_fractional_cuts_beat_the_best_whole_ones() -> None:
    speeds = (2.0, 2.0, 1.2, 1.2)
    whole = max(
        used(whole_cuts(layers, speeds, 64), speeds, 64)
        for layers in [(7, 8, 5, 4), (7, 8, 4, 5), (8, 8, 4, 4), (8, 7, 5, 4), (7, 7, 5, 5)]
    )
    assert used(fractional(speeds, 64), speeds, 64) > whole + 0.02


def test_deferred_weights_without_a_bound_hold_nearly_every_activation() -> None:
    cuts = even_boundaries(NUM_LAYERS, (2.0, 1.2, 0.8))
    bounded = split_stages(lambda i: layers_at(cuts, NUM_LAYERS, i), (2.0, 1.2, 0.8), 96)
    free = [
        SplitStage(
            forward_s=s.forward_s,
            backward_s=s.backward_s,
            weights_s=s.weights_s,
            send_s=0.0,
            window=96,
            most_held=96,
        )
        for s in bounded
    ]
    greedy = simulate_split(free)
    assert max(greedy.peak_activations) > 40
    assert max(simulate_split(bounded).peak_activations) <= 6


@st.composite
def pipelines(draw: st.DrawFn) -> list[SplitStage]:
    count, size = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    seconds = st.lists(st.floats(0.1, 3), min_size=count, max_size=count).map(tuple)
    stages = []
    for index in range(size):
        window, most_held = bounded_windows(size, index)
        stages.append(
            SplitStage(
                forward_s=draw(seconds),
                backward_s=draw(seconds),
                weights_s=draw(seconds),
                send_s=draw(st.floats(0, 1)),
                window=window,
                most_held=most_held,
            )
        )
    return stages


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_every_run_does_all_in_order_and_keeps_its_bounds(stages: list[SplitStage]) -> None:
    result = simulate_split(stages)
    count = len(stages[0].forward_s)
    for stage, order, peak, end_s in zip(
        stages, result.orders, result.peak_activations, result.stage_end_s, strict=True
    ):
        for kind in (FORWARD, BACKWARD, WEIGHTS):
            assert [i for k, i in order if k == kind] == list(range(count))
        for i in range(count):
            places = [order.index((kind, i)) for kind in (FORWARD, BACKWARD, WEIGHTS)]
            assert places == sorted(places)
        assert 1 <= peak <= stage.most_held
        assert end_s >= sum((*stage.forward_s, *stage.backward_s, *stage.weights_s)) * (1 - 1e-12)
    assert result.num_events == 3 * count * len(stages)


@given(st.lists(st.floats(0.5, 3), min_size=1, max_size=6), st.integers(0, 200))
def test_every_microbatch_runs_each_layer_once_and_on_stages_that_hold_it(
    speeds: list[float], microbatch: int
) -> None:
    cuts = even_boundaries(NUM_LAYERS, speeds)
    layers = layers_at(cuts, NUM_LAYERS, microbatch)
    assert sum(layers) == NUM_LAYERS
    begin = 0
    for count, (first, end) in zip(layers, held_layers(cuts, NUM_LAYERS), strict=True):
        assert count == 0 or first <= begin <= begin + count <= end
        begin += count


def test_average_share_of_a_stage_matches_its_speed() -> None:
    cuts = even_boundaries(NUM_LAYERS, (2.0, 1.2))
    average = sum(layers_at(cuts, NUM_LAYERS, i)[0] for i in range(1000)) / 1000
    assert average == pytest.approx(NUM_LAYERS * 2 / 3.2, abs=0.01)


def test_bad_pipelines_are_refused() -> None:
    with pytest.raises(ValueError, match="equally many"):
        simulate_split([])
    with pytest.raises(ValueError, match="window 3, need 1 to most_held 2"):
        SplitStage(forward_s=(1,), backward_s=(1,), weights_s=(1,), send_s=0, window=3, most_held=2)
    with pytest.raises(ValueError, match="not in order"):
        even_boundaries(2, (1.0, 1.0), first_extra=9.0)
