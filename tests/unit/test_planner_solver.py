"""The split routines against CP-SAT, which shares nothing with them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.planner.split import split_layers, split_rows, split_unequal

cp_model: Any = pytest.importorskip("ortools.sat.python.cp_model")


def least_maximum(model: Any, loads: Sequence[Any], most: int) -> int:
    """Solve for the least possible maximum of the loads."""
    longest = model.new_int_var(0, most, "longest")
    for load in loads:
        model.add(longest >= load)
    model.minimize(longest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 40),
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 30), st.integers(0, 40)),
        min_size=1,
        max_size=6,
    ),
)
def test_layers_and_rows_are_split_as_well_as_cp_sat_does(
    total: int, parts: list[tuple[int, int, int]]
) -> None:
    """Each part takes `unit` ticks per layer on top of `start` ticks, and holds at most `cap`."""
    units, starts = [unit for unit, _, _ in parts], [start for _, start, _ in parts]
    caps = [max(cap, -(-total // len(parts))) for _, _, cap in parts]
    model = cp_model.CpModel()
    counts = [model.new_int_var(0, cap, f"n{i}") for i, cap in enumerate(caps)]
    model.add(sum(counts) == total)
    loads = [start + unit * n for start, unit, n in zip(starts, units, counts, strict=True)]
    best = least_maximum(model, loads, max(starts) + max(units) * total)
    speeds = [1 / unit for unit in units]
    extras = [start / unit for start, unit in zip(starts, units, strict=True)]
    found = split_layers(total, speeds, caps=caps, extras=extras)
    assert sum(found) == total
    assert all(n <= cap for n, cap in zip(found, caps, strict=True))
    slowest = max(s + u * n for s, u, n in zip(starts, units, found, strict=True))
    assert slowest == best
    rows = split_rows(total, speeds, fills=[float(start) for start in starts])
    used = [s + u * n for s, u, n in zip(starts, units, rows, strict=True) if n]
    assert max(used) <= best


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=14),
    st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(0, 9), st.integers(0, 60)),
        min_size=1,
        max_size=4,
    ),
)
def test_unequal_layers_are_cut_as_well_as_cp_sat_does(
    layers: list[tuple[int, int]], stages: list[tuple[int, int, int]]
) -> None:
    """Layers of so many ticks and bytes on stages of so much speed, other work and memory."""
    costs, sizes = [cost for cost, _ in layers], [num_bytes for _, num_bytes in layers]
    speeds, extras = [speed for speed, _, _ in stages], [extra for _, extra, _ in stages]
    caps = [max(cap, -(-sum(sizes) // len(stages)) + 6) for _, _, cap in stages]
    model = cp_model.CpModel()
    size, ticks = len(speeds), 12  # whole for every speed
    on = [[model.new_bool_var(f"l{i}s{s}") for s in range(size)] for i in range(len(costs))]
    for layer in on:
        model.add_exactly_one(layer)
    for before, after in pairwise(on):  # stages in order of layers
        stage = [sum(s * there for s, there in enumerate(layer)) for layer in (before, after)]
        model.add(stage[0] <= stage[1])
    for s, cap in enumerate(caps):
        model.add(sum(n * layer[s] for n, layer in zip(sizes, on, strict=True)) <= cap)
    loads = [
        ticks * extra // speed
        + sum(ticks * cost // speed * layer[s] for cost, layer in zip(costs, on, strict=True))
        for s, (speed, extra) in enumerate(zip(speeds, extras, strict=True))
    ]
    best = least_maximum(model, loads, ticks * (sum(costs) + sum(extras)))
    found = split_unequal(costs, speeds, caps_bytes=caps, layer_bytes=sizes, extras=extras)
    begin, slowest = 0, 0.0
    for count, (speed, extra, _), cap in zip(found, stages, caps, strict=True):
        assert sum(sizes[begin : begin + count]) <= cap
        slowest = max(slowest, ticks * (extra + sum(costs[begin : begin + count])) / speed)
        begin += count
    assert begin == len(costs)
    assert slowest == pytest.approx(best)
