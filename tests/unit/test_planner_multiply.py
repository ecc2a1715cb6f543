"""Many shapes and how many of each: the linear programme, whole numbers, few shapes, against HiGHS and the known case."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from hetrun.planner.batch import split_many
from hetrun.planner.multiply import Columns, few_shapes, relaxed_deadline, whole_replicas
from hetrun.planner.relax import earliest, relax
from hetrun.planner.split import split_layers

pytestmark = pytest.mark.slow

SPEEDS = np.array([1, 0.62, 0.35, 0.22])
MEMORY_GB = np.array([96, 64, 64, 32])
SHARE_AT_TP = {4: 0.88, 8: 0.78}


@lru_cache(maxsize=1)
def four_vendors() -> Columns:
    """All replica shapes of case P7, with its own figures: 70B, 80 layers, tp 4 or 8, blocks in order A, B, C, D."""
    options = [(0, 0), *product((4, 8), (1, 2, 4, 8, 16))]
    shapes = [
        blocks
        for blocks in product(options, repeat=4)
        if 1 <= sum(stages for _, stages in blocks) <= 32
    ]
    layer_s = np.full((len(shapes), 32), np.inf)
    caps = np.zeros((len(shapes), 32))
    for number, blocks in enumerate(shapes):
        stages = np.array([(k, tp) for k, (tp, size) in enumerate(blocks) for _ in range(size)])
        kind, tp = stages[:, 0], stages[:, 1]
        share = np.where(tp == 4, SHARE_AT_TP[4], SHARE_AT_TP[8])
        in_flight = len(stages) - np.arange(len(stages))
        layer_s[number, : len(stages)] = 1 / (SPEEDS[kind] * tp * share)
        caps[number, : len(stages)] = 0.9 * MEMORY_GB[kind] * tp // (13.04 + 1.2 * in_flight)
    layers, fits = split_many(80, layer_s, np.zeros_like(layer_s), caps)
    seconds = np.where(np.isfinite(layer_s), layers, 0) * np.where(layer_s < np.inf, layer_s, 0)
    need = np.array([[tp * size for tp, size in blocks] for blocks in shapes], dtype=float)[fits].T
    cycle_s = seconds[fits].max(axis=1)
    return Columns(
        need=need,
        rows=np.ones(need.shape[1]),
        fill_s=seconds[fits].sum(axis=1) - cycle_s,
        cycle_s=cycle_s,
    )


def test_four_vendors_have_as_many_shapes_as_counted_elsewhere() -> None:
    assert len(four_vendors().rows) == 11_472


def test_integer_programme_is_better_than_rounding() -> None:
    ends = []
    for exact in (False, True):
        answer = whole_replicas(four_vendors(), [128, 64, 32, 16], 480, exact=exact)
        assert answer is not None
        ends.append(answer[1])
    assert ends[1] < ends[0]


@pytest.mark.parametrize("each", [256, 2500])
def test_four_vendors_reach_the_known_bound_and_a_plan_close_to_it(each: int) -> None:
    deadline = relaxed_deadline(four_vendors(), [each] * 4, 8 * each)
    assert deadline is not None
    assert deadline.bound_s == pytest.approx(370.84, abs=5e-3)
    answer = whole_replicas(four_vendors(), [each] * 4, 8 * each)
    assert answer is not None
    counts, ends_s = answer
    assert deadline.bound_s <= ends_s <= 371.2
    columns = four_vendors()
    done = sum(n * columns.done_by(ends_s)[j] for j, n in counts.items())
    used = sum((n * columns.need[:, j] for j, n in counts.items()), np.zeros(4))
    assert done >= 8 * each
    assert (used <= each).all()


def test_one_shape_and_one_vendor_replicas_cost_what_is_known() -> None:
    columns = four_vendors()
    one = few_shapes(columns, [256] * 4, 2048, most=1)
    assert one is not None
    assert one[1] == pytest.approx(386.21, abs=5e-3)
    alone = columns.some(np.flatnonzero((columns.need > 0).sum(axis=0) == 1))
    single = relaxed_deadline(alone, [256] * 4, 2048)
    assert single is not None
    assert single.bound_s == pytest.approx(371.15, abs=5e-3)


def test_uneven_groups_reach_the_known_bound() -> None:
    deadline = relaxed_deadline(four_vendors(), [40_000, 30_000, 20_000, 10_000], 200_000)
    assert deadline is not None
    assert deadline.bound_s == pytest.approx(298.30, abs=5e-3)


@st.composite
def programmes(draw: st.DrawFn) -> Columns:
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    number = st.integers(0, 6)
    need = np.array(
        draw(
            st.lists(
                st.lists(number, min_size=groups, max_size=groups), min_size=size, max_size=size
            )
        ),
        dtype=float,
    ).T
    need[0, need.sum(axis=0) == 0] = 1
    seconds = st.lists(st.floats(0.1, 9), min_size=size, max_size=size)
    return Columns(
        need=need,
        rows=np.array(draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=size, max_size=size))),
        fill_s=np.array(draw(seconds)),
        cycle_s=np.array(draw(seconds)),
    )


@settings(max_examples=80, deadline=None)
@given(programmes(), st.floats(1, 60), st.integers(1, 40))
def test_linear_programme_agrees_with_highs_and_proves_itself(
    columns: Columns, deadline_s: float, have: int
) -> None:
    value = columns.done_by(deadline_s)
    capacity = np.full(len(columns.need), float(have))
    relaxed = relax(value, columns.need, capacity)
    best = -linprog(-value, A_ub=columns.need, b_ub=capacity, method="highs").fun
    assert relaxed.value == pytest.approx(best, rel=1e-7, abs=1e-7)
    assert best <= relaxed.ceiling * (1 + 1e-9) + 1e-9
    assert relaxed.ceiling == pytest.approx(best, rel=1e-6, abs=1e-6)
    assert len(relaxed.counts) <= len(columns.need)


@settings(max_examples=40, deadline=None)
@given(programmes(), st.integers(1, 3), st.integers(6, 20))
def test_whole_and_few_replicas_fit_keep_their_deadline_and_no_bound_is_beaten(
    columns: Columns, most: int, have: int
) -> None:
    capacity = [have] * len(columns.need)
    deadline = relaxed_deadline(columns, capacity, 50)
    few = few_shapes(columns, capacity, 50, most=most)
    whole = whole_replicas(columns, capacity, 50, exact=False)
    assert deadline is not None
    assert few is not None
    assert len(few[0]) <= most
    for counts, ends_s in (few, *([whole] if whole else [])):
        used = sum((n * columns.need[:, j] for j, n in counts.items()), np.zeros(len(capacity)))
        assert (used <= have).all()
        assert sum(n * columns.done_by(ends_s)[j] for j, n in counts.items()) >= 50
        assert ends_s >= deadline.bound_s * (1 - 1e-9)


def test_more_shapes_are_never_slower() -> None:
    ends = []
    columns = four_vendors().some(np.arange(0, 11_472, 23))
    for most in (1, 2, 3):
        answer = few_shapes(columns, [256] * 4, 2048, most=most)
        assert answer is not None
        ends.append(answer[1])
    assert ends == sorted(ends, reverse=True)
    assert ends[1] < ends[0]


def test_no_shape_that_fits_is_no_answer() -> None:
    columns = four_vendors()
    assert relaxed_deadline(columns, [3] * 4, 8) is None
    assert whole_replicas(columns, [3] * 4, 8) is None
    assert few_shapes(columns, [3] * 4, 8, most=2) is None


def test_what_no_deadline_reaches_is_said() -> None:
    with pytest.raises(ValueError, match="no deadline reaches 5"):
        earliest(lambda _: 4.0, 5.0, start_s=1.0, precision=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.lists(
        st.tuples(st.floats(0.2, 4), st.integers(1, 30), st.floats(0, 3)), min_size=1, max_size=6
    ),
)
def test_splits_of_many_pipelines_are_as_good_as_the_exact_one(
    num_layers: int, stages: list[tuple[float, int, float]]
) -> None:
    speeds = [speed for speed, _, _ in stages]
    extras = [extra for _, _, extra in stages]
    caps = [cap for _, cap, _ in stages]
    unit_s = np.array([[1 / speed for speed in speeds] + [np.inf]])
    start_s = np.array([[e / s for e, s in zip(extras, speeds, strict=True)] + [0.0]])
    layers, fits = split_many(num_layers, unit_s, start_s, np.array([[*caps, 0]], dtype=float))
    if sum(caps) < num_layers or len(stages) > num_layers:
        assert not fits[0]
        return
    assert fits[0]
    assert layers[0].sum() == num_layers
    counts = [int(n) for n in layers[0][:-1]]
    assert all(1 <= n <= cap for n, cap in zip(counts, caps, strict=True))
    more = split_layers(
        num_layers - len(stages),
        speeds,
        caps=[cap - 1 for cap in caps],
        extras=[extra + 1 for extra in extras],
    )
    exact = [n + 1 for n in more]

    def slowest(held: list[int]) -> float:
        return max((e + n) / s for e, n, s in zip(extras, held, speeds, strict=True))

    assert slowest(counts) == pytest.approx(slowest(exact), rel=1e-8)
