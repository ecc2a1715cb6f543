"""Unequal layers over stages that each need one: brute force, and thousands at once against one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.planner.batch import Pipelines, Table, split_many_unequal
from hetrun.planner.ranges import Reach, split_ranges


@st.composite
def stages(draw: st.DrawFn, num_layers: int, weights: Sequence[int]) -> Reach:
    each = draw(
        st.lists(
            st.sampled_from([0.1, 0.5, 1.0, 2.0, 7.0]), min_size=num_layers, max_size=num_layers
        )
    )
    return Reach(
        sums=tuple(accumulate(each, initial=0.0)),
        start_s=draw(st.sampled_from([0.0, 0.0, 1.0, 3.3])),
        weights=tuple(accumulate(weights, initial=0)),
        cap=draw(st.sampled_from([4, 8, 15, 99])),
        peaks=draw(
            st.one_of(
                st.just(()),
                st.lists(st.integers(0, 6), min_size=num_layers, max_size=num_layers),
            )
        ),
    )


@st.composite
def pipelines(draw: st.DrawFn, num_layers: int | None = None) -> list[Reach]:
    num_layers = num_layers or draw(st.integers(1, 9))
    weights = draw(st.lists(st.sampled_from([1, 2, 5]), min_size=num_layers, max_size=num_layers))
    return draw(st.lists(stages(num_layers, weights), min_size=1, max_size=4))


def all_cuts(pipe: Sequence[Reach]) -> Iterator[tuple[int, ...]]:
    """Every way to give each stage a layer at least that fits its memory."""
    total = len(pipe[0].sums) - 1
    for inner in combinations(range(1, total), len(pipe) - 1):
        cuts = (0, *inner, total)
        if all(
            s.weights[end] - s.weights[first] + max(s.peaks[first:end], default=0) <= s.cap
            for s, (first, end) in zip(pipe, pairwise(cuts), strict=True)
        ):
            yield cuts


def slowest(pipe: Sequence[Reach], cuts: Sequence[int]) -> float:
    return max(s.seconds(*cut) for s, cut in zip(pipe, pairwise(cuts), strict=True))


@settings(max_examples=300, deadline=None)
@given(pipelines())
def test_no_cut_with_a_layer_for_every_stage_is_better_than_ours(pipe: list[Reach]) -> None:
    """Also where a single layer is too much for a stage, so that the one before must stop short."""
    best = min((slowest(pipe, cuts) for cuts in all_cuts(pipe)), default=None)
    counts = split_ranges(pipe, least=1)
    if best is None:
        assert counts is None
        return
    assert counts is not None
    cuts = tuple(accumulate(counts, initial=0))
    assert cuts in list(all_cuts(pipe))
    assert slowest(pipe, cuts) == pytest.approx(best, rel=1e-9)


def test_a_stage_stops_short_of_a_layer_that_the_next_one_cannot_hold() -> None:
    weights, sums = (0, 1, 2, 3, 12, 13), (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    caps = (99, 2, 99)
    pipe = [Reach(sums=sums, start_s=0.0, weights=weights, cap=cap) for cap in caps]
    assert split_ranges(pipe, least=1) == (2, 1, 2)


def test_among_equally_good_cuts_those_near_to_even_are_taken() -> None:
    sums = tuple(accumulate([1.0] * 12, initial=0.0))
    pipe = [
        Reach(sums=sums, start_s=start_s, weights=(0,) * 13, cap=0)
        for start_s in (0.0, 0.0, 0.0, 5.0)
    ]
    assert split_ranges(pipe, least=1) == (4, 4, 3, 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(pipelines(num_layers=6), min_size=1, max_size=8))
def test_many_at_once_fit_and_their_levels_are_no_higher_than_the_optimum(
    pipes: list[list[Reach]],
) -> None:
    order = [[replace(stage, peaks=()) for stage in pipe] for pipe in pipes]
    order.sort(key=len, reverse=True)
    flat = [stage for pipe in order for stage in pipe]
    depth = len(order[0])
    rows = np.zeros((len(order), depth), dtype=np.int64)
    start_s, caps = np.zeros(rows.shape), np.zeros(rows.shape)
    for i, pipe in enumerate(order):
        for j, stage in enumerate(pipe):
            rows[i, j] = next(n for n, other in enumerate(flat) if other is stage)
            start_s[i, j], caps[i, j] = stage.start_s, stage.cap
    many = Pipelines(
        seconds=Table(np.asarray([stage.sums for stage in flat])),
        weights=Table(np.asarray([stage.weights for stage in flat], dtype=float)),
        time_rows=rows,
        weight_rows=rows,
        start_s=start_s,
        caps=caps,
        sizes=np.asarray([len(pipe) for pipe in order]),
    )
    cuts, fits, level_s = split_many_unequal(many)
    for i, pipe in enumerate(order):
        best = min((slowest(pipe, c) for c in all_cuts(pipe)), default=np.inf)
        assert level_s[i] <= best * (1 + 1e-9)
        own = tuple(int(cut) for cut in cuts[i, : len(pipe) + 1])
        if fits[i]:
            assert own in list(all_cuts(pipe))
        longest = max(stage.longest_s + stage.start_s for stage in pipe)
        heaviest = max(stage.heaviest - stage.cap for stage in pipe)
        if best < np.inf and longest < best * (1 - 1e-9) and heaviest <= 0:
            assert fits[i]
            assert slowest(pipe, own) == pytest.approx(best, rel=1e-9)
