"""Exact splits: the worked cases, and brute force on small ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.errors import NoPlanError
from hetrun.planner.split import split_layers, split_rows, split_unequal


def slowest(
    counts: Sequence[int], speeds: Sequence[float], extras: Sequence[float] | None = None
) -> float:
    extras = extras or [0.0] * len(speeds)
    return max((e + n) / s for n, s, e in zip(counts, speeds, extras, strict=True))


def all_splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in all_splits(total - first, parts - 1):
            yield (first, *rest)


@pytest.mark.parametrize(
    ("num_layers", "speeds", "answer", "worst"),
    [
        (24, [3, 1], (18, 6), 6.0),
        (32, [1, 1, 2, 2], (5, 5, 11, 11), 5.5),
        (32, [2, 1], (22, 10), 11.0),
        (12, [2, 4, 2], (3, 6, 3), 1.5),
    ],
)
def test_layers_follow_speed(
    num_layers: int, speeds: list[float], answer: tuple[int, ...], worst: float
) -> None:
    counts = split_layers(num_layers, speeds)
    assert counts == answer
    assert slowest(counts, speeds) == worst


def test_memory_cap_moves_layers_to_the_slow_device() -> None:
    counts = split_layers(32, [2, 1], caps=[18, 32])
    assert counts == (18, 14)
    assert slowest(counts, [2, 1]) == 14.0


def test_heavy_head_takes_layers_from_its_stage() -> None:
    extras = [0.0, 128256 * 4096 / 218_112_000]
    counts = split_layers(32, [1, 1], extras=extras)
    assert counts == (17, 15)
    assert slowest(counts, [1, 1], extras) == pytest.approx(17.41, abs=5e-3)


def test_rows_follow_speed_exactly_where_they_can() -> None:
    counts = split_rows(32, [3, 1])
    assert counts == (24, 8)
    assert slowest(counts, [3, 1]) == 8.0


def test_whole_rows_keep_three_replicas_from_the_bound() -> None:
    speeds = [1, 0.9, 0.8]
    counts = split_rows(10, speeds)
    assert counts == (4, 3, 3)
    assert slowest(counts, speeds) == 4.0
    assert 10 / sum(speeds) == pytest.approx(3.704, abs=5e-4)


def test_equal_parts_get_equal_shares_and_the_earlier_ones_the_rest() -> None:
    assert split_layers(10, [1, 1, 1]) == (4, 3, 3)
    assert split_rows(7, [0.1, 0.1]) == (4, 3)


def test_replica_with_a_long_fill_may_get_no_rows() -> None:
    assert split_rows(4, [1, 1], fills=[0.0, 9.0]) == (4, 0)


def test_nothing_to_hand_out_is_fine() -> None:
    assert split_layers(0, [1, 2]) == (0, 0)


def test_caps_below_the_total_are_refused() -> None:
    with pytest.raises(NoPlanError, match="hold at most"):
        split_layers(10, [1, 1], caps=[4, 5])


@pytest.mark.parametrize("speeds", [[], [1.0, 0.0]])
def test_parts_without_speed_are_our_bug(speeds: list[float]) -> None:
    with pytest.raises(ValueError, match="need parts with speed"):
        split_layers(4, speeds)


SPEEDS = st.lists(st.sampled_from([0.3, 0.5, 0.7, 1.0, 1.1, 2.0, 3.0]), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 9), SPEEDS, st.data())
def test_no_split_of_layers_is_better_than_ours(
    total: int, speeds: list[float], data: st.DataObject
) -> None:
    size = len(speeds)
    extras = data.draw(st.lists(st.floats(0, 6), min_size=size, max_size=size))
    caps = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    fitting = [
        counts
        for counts in all_splits(total, size)
        if all(n <= cap for n, cap in zip(counts, caps, strict=True))
    ]
    if not fitting:
        with pytest.raises(NoPlanError):
            split_layers(total, speeds, caps=caps, extras=extras)
        return
    counts = split_layers(total, speeds, caps=caps, extras=extras)
    assert counts in fitting
    best = min(slowest(c, speeds, extras) for c in fitting)
    assert slowest(counts, speeds, extras) == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), SPEEDS, st.data())
def test_no_apportionment_is_better_than_ours(
    total: int, speeds: list[float], data: st.DataObject
) -> None:
    fills = data.draw(st.lists(st.floats(0, 6), min_size=len(speeds), max_size=len(speeds)))

    def worst(counts: Sequence[int]) -> float:
        return max(f + n / s for n, s, f in zip(counts, speeds, fills, strict=True) if n)

    best = min(worst(counts) for counts in all_splits(total, len(speeds)))
    assert worst(split_rows(total, speeds, fills=fills)) == pytest.approx(best, rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 5), st.integers(1, 9)), max_size=8), SPEEDS, st.data())
def test_no_cut_of_unequal_layers_is_better_than_ours(
    layers: list[tuple[float, int]], speeds: list[float], data: st.DataObject
) -> None:
    """Heavy layers, heads and memory: whatever fits in order is no quicker."""
    size = len(speeds)
    costs, sizes = [cost for cost, _ in layers], [num_bytes for _, num_bytes in layers]
    extras = data.draw(st.lists(st.floats(0, 6), min_size=size, max_size=size))
    caps = data.draw(st.lists(st.integers(0, 40), min_size=size, max_size=size))

    def loads(values: Sequence[float], counts: Sequence[int]) -> list[float]:
        ends = list(accumulate(counts, initial=0))
        return [sum(values[first:end]) for first, end in pairwise(ends)]

    def worst(counts: Sequence[int]) -> float:
        parts = zip(loads(costs, counts), extras, speeds, strict=True)
        return max((extra + load) / speed for load, extra, speed in parts)

    fitting = [
        counts
        for counts in all_splits(len(layers), size)
        if all(load <= cap for load, cap in zip(loads(sizes, counts), caps, strict=True))
    ]

    def ours() -> tuple[int, ...]:
        return split_unequal(costs, speeds, caps_bytes=caps, layer_bytes=sizes, extras=extras)

    if not fitting:
        with pytest.raises(NoPlanError, match="do not fit in their order"):
            ours()
        return
    assert ours() in fitting
    assert worst(ours()) == pytest.approx(min(worst(c) for c in fitting), rel=1e-9)


@given(st.integers(1, 60), SPEEDS)
def test_unequal_split_agrees_with_the_equal_one(total: int, speeds: list[float]) -> None:
    equal = slowest(split_layers(total, speeds), speeds)
    assert slowest(split_unequal([1.0] * total, speeds), speeds) == pytest.approx(equal)


@given(st.integers(0, 10_000), SPEEDS)
def test_order_of_equal_speeds_changes_nothing_but_places(total: int, speeds: list[float]) -> None:
    counts = split_rows(total, speeds)
    again = split_rows(total, speeds[::-1])
    assert sum(counts) == total
    assert sorted(counts) == sorted(again)
