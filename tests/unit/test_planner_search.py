"""Parts of the search: microbatch counts, multiplicities, shapes, bound, and brute force over tiny clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.model import MIB, Cost, Order, PlanLimits
from hetrun.planner import knapsack
from hetrun.planner.apportion import Part, apportion, level_s
from hetrun.planner.bound import Bound, gap_reason, ideal_rows_per_s, lower_bound
from hetrun.planner.compose import combos
from hetrun.planner.drafts import (
    groups_of,
    repaired,
)
from hetrun.planner.even import even_split
from hetrun.planner.problem import Problem, read_problem
from hetrun.planner.search import search
from hetrun.planner.shapes import ShapeMaker
from hetrun.planner.variety import block_sizes, enumerate_shapes
from tests.unit.planner_lab import FREE_LINKS, Chips, Lab, small_model

pytestmark = pytest.mark.slow


def problem_of(lab: Lab) -> Problem:
    return read_problem(lab.facts, lab.profile, lab.recipe, targets={})


def part(rows: int, cycle_s: float, *, fill_s: float = 0.0, count: int = 1) -> Part:
    return Part(rows=rows, count=count, fill_s=fill_s, cycle_s=cycle_s)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 3, 4]),
            st.sampled_from([0.5, 1.0, 1.3, 2.0]),
            st.sampled_from([0.0, 0.7, 3.0]),
            st.integers(1, 2),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 16),
)
@settings(deadline=None)
def test_no_whole_microbatches_end_earlier_than_ours(
    drawn: list[tuple[int, float, float, int]], batch: int
) -> None:
    parts = [part(r, c, fill_s=f, count=n) for r, c, f, n in drawn]
    flat = [p for p in parts for _ in range(p.count)]
    choices = [range(1, batch // p.rows + 1) for p in flat]
    whole = [
        counts
        for counts in product(*choices)
        if sum(n * p.rows for n, p in zip(counts, flat, strict=True)) == batch
    ]
    found = apportion(batch, parts)
    if not whole:
        assert found is None
        return
    assert found is not None

    def end_s(counts: Sequence[int]) -> float:
        return max(p.fill_s + n * p.cycle_s for n, p in zip(counts, flat, strict=True))

    ours = [n for share in found for n in share]
    assert sum(n * p.rows for n, p in zip(ours, flat, strict=True)) == batch
    assert end_s(ours) == pytest.approx(min(end_s(counts) for counts in whole), rel=1e-6)


def test_sizes_mix_to_an_exact_batch_or_not_at_all() -> None:
    assert apportion(11, [part(4, 4.0), part(3, 3.0)]) == ((2,), (1,))
    assert apportion(5, [part(4, 1.0), part(3, 1.0)]) is None
    assert apportion(9, [part(4, 1.0), part(2, 1.0)]) is None


def test_more_replicas_than_rows_have_no_level() -> None:
    assert level_s(3, [part(1, 1.0, count=4)]) is None
    assert apportion(3, [part(1, 1.0, count=4)]) is None


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.integers(1, 20)),
        max_size=4,
    ),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_multiplicities_are_the_best_there_are(
    drawn: list[tuple[tuple[int, int], int]], capacity: tuple[int, int]
) -> None:
    columns = [column for column in drawn if any(column[0])]
    counts, num_rows = knapsack.most_rows(columns, capacity)
    best = 0
    for tried in product(range(6), repeat=len(columns)):
        used = [sum(n * use[k] for n, (use, _) in zip(tried, columns, strict=True)) for k in (0, 1)]
        if used[0] <= capacity[0] and used[1] <= capacity[1]:
            best = max(best, sum(n * rows for n, (_, rows) in zip(tried, columns, strict=True)))
    assert num_rows == best
    assert num_rows == sum(n * rows for n, (_, rows) in zip(counts, columns, strict=True))
    for kind in (0, 1):
        used_here = sum(n * use[kind] for n, (use, _) in zip(counts, columns, strict=True))
        assert used_here <= capacity[kind]


def test_many_devices_are_rounded_from_the_linear_programme() -> None:
    columns = [((1, 0), 10), ((0, 1), 6), ((2, 3), 39), ((3, 1), 37)]
    counts, num_rows = knapsack.most_rows(columns, (1500, 1500))
    used = [sum(n * use[k] for n, (use, _) in zip(counts, columns, strict=True)) for k in (0, 1)]
    assert max(used) <= 1500
    # duals 11 and 17/3 price every column at its rows or more, so nothing does better than this
    bound = 1500 * (37 - 6) / 3 + 1500 * 6
    assert 0.999 * bound <= num_rows <= bound * 1.02


def test_leftovers_too_many_for_exact_rounding_still_give_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(knapsack, "MOST_STATES", 30)
    counts, num_rows = knapsack.most_rows([((4, 4), 9), ((7, 0), 5)], (30, 30))
    assert counts[0] * 4 + counts[1] * 7 <= 30
    assert num_rows >= 7 * 9


def test_nothing_to_choose_from_does_nothing() -> None:
    assert knapsack.most_rows([], (3, 3)) == ((), 0)


def test_block_sizes_hold_small_ones_even_shares_and_all() -> None:
    assert block_sizes(8, 8, full=12) == tuple(range(1, 9))
    assert {1, 2, 12, 16, 32} <= set(block_sizes(32, 32, full=12))
    assert block_sizes(32, 10, full=4) == (1, 2, 3, 4, 5, 6, 8, 10)


LAB = Lab(
    chips=[
        Chips(vendor="x", num_devices=2, gflops=2.0),
        Chips(vendor="y", num_devices=2, gflops=1.0, memory=None),
    ],
    model=small_model(6),
    rows=(1, 2),
    batch=12,
    seq_len=16,
)


def test_shapes_hold_every_layer_and_every_order() -> None:
    maker = ShapeMaker(problem_of(LAB))
    shapes = enumerate_shapes(maker)
    assert {shape.kinds for shape in shapes} >= {(0,), (1, 1), (0, 1), (1, 0), (1, 1, 0, 0)}
    assert all(sum(shape.layers) == 6 and min(shape.layers) >= 1 for shape in shapes)
    assert {shape.rows for shape in shapes} == {1, 2}
    assert not any(shape.memory_bound for shape in shapes)


def test_pipeline_deeper_than_the_model_is_no_shape() -> None:
    assert ShapeMaker(problem_of(LAB)).make([0] * 7, 1) is None


def test_tight_memory_marks_shapes_and_drops_others() -> None:
    chips = [replace(LAB.chips[0], memory=0.4 * MIB), LAB.chips[1]]
    maker = ShapeMaker(problem_of(replace(LAB, chips=chips)))
    shapes = enumerate_shapes(maker)
    assert maker.dropped_for_memory > 0
    assert any(shape.memory_bound for shape in shapes)


def test_three_large_kinds_are_tried_in_two_orders() -> None:
    chips = [
        Chips(vendor="x", num_devices=8, gflops=2.0, memory=64 * MIB),
        Chips(vendor="y", num_devices=8, gflops=1.0, memory=None),
        Chips(vendor="z", num_devices=8, gflops=0.5, memory=32 * MIB),
    ]
    maker = ShapeMaker(problem_of(replace(LAB, chips=chips, model=small_model(24))))
    mixed = {
        tuple(dict.fromkeys(shape.kinds))
        for shape in enumerate_shapes(maker)
        if len(set(shape.kinds)) == 3
    }
    assert mixed == {(2, 1, 0), (1, 0, 2)}  # slow first, large memory first


def test_four_kinds_are_mixed_by_two_at_most() -> None:
    chips = [Chips(vendor=name, num_devices=1) for name in "wxyz"]
    shapes = enumerate_shapes(ShapeMaker(problem_of(replace(LAB, chips=chips))))
    assert max(len(set(shape.kinds)) for shape in shapes) == 2


def test_one_replica_of_another_size_repairs_an_odd_batch() -> None:
    maker = ShapeMaker(problem_of(replace(LAB, batch=7)))
    shape = maker.make([0], 2)
    assert shape is not None
    assert groups_of(maker.problem, ((shape, 2),)) is None
    groups = repaired(maker, ((shape, 2),))
    assert groups is not None
    rows = [(group.shape.rows, group.counts) for group in groups]
    assert sum(size * sum(counts) for size, counts in rows) == 7
    only_twos = ShapeMaker(problem_of(replace(LAB, batch=7, rows=(2,))))
    assert repaired(only_twos, ((shape, 2),)) is None


def test_bound_is_the_sum_of_speeds_or_one_microbatch_alone() -> None:
    chips = [
        Chips(vendor="x", num_devices=2, layer_s=1.0),
        Chips(vendor="y", num_devices=1, layer_s=2.0),
    ]
    lab = replace(LAB, chips=chips, rows=(1,))
    assert lower_bound(problem_of(lab)).step_s == pytest.approx(12 * 6 / 2.5)
    alone = replace(lab, batch=1)
    strict = replace(alone, limits=PlanLimits(orders=(Order.ONE_F_ONE_B,)))
    assert lower_bound(problem_of(strict)).step_s == pytest.approx(6.0)
    # gradients of weights, a third of the work here, may be left to others' waiting time
    assert lower_bound(problem_of(alone)).step_s == pytest.approx(4.0)


def test_bound_counts_the_optimizer_of_one_copy() -> None:
    bound = lower_bound(problem_of(LAB))
    assert bound.optimizer_s > 0
    assert bound.step_s == bound.compute_s + bound.optimizer_s


def test_vendors_good_at_different_things_do_more_together_than_their_sum() -> None:
    lab = replace(LAB, model=small_model(6, vocab_size=4096), rows=(1,))
    problem = problem_of(lab)
    x, y = problem.kinds
    timing = x.timings[1]
    heady = replace(timing, head_forward_s=100 * timing.head_forward_s)
    mixed = replace(problem, kinds=(replace(x, timings={1: heady}), y))
    ideal = ideal_rows_per_s(mixed)
    alone = sum(len(k.seats) * k.rows_per_s(6) for k in mixed.kinds)
    assert sum(ideal.values()) > 1.01 * alone
    best = search(mixed).best
    assert best.step_s >= lower_bound(mixed).step_s
    assert 12 / best.step_s <= sum(ideal.values())


def cost(**parts: float) -> Cost:
    values = dict.fromkeys(("compute_s", "bubble_s", "p2p_s", "sync_s", "optimizer_s"), 0.0) | parts
    return Cost(step_s=sum(values.values()), **values)


@pytest.mark.parametrize(
    ("parts", "unlimited_s", "words"),
    [
        ({"compute_s": 10.0}, None, "none: the bound is reached"),
        (
            {"compute_s": 11.0, "sync_s": 2.0},
            None,
            "traffic 20.0%, integrality (whole layers and rows) 10.0%",
        ),
        ({"compute_s": 10.0, "bubble_s": 3.0}, 11.0, "memory 20.0%, bubble 10.0%"),
        ({"compute_s": 9.0, "bubble_s": 3.0}, None, "bubble 20.0%"),
        ({"compute_s": 10.0, "optimizer_s": 1.0}, None, "optimizer 10.0%"),
    ],
)
def test_gap_is_named_largest_part_first(
    parts: dict[str, float], unlimited_s: float | None, words: str
) -> None:
    bound = Bound(compute_s=10.0, optimizer_s=0.0)
    assert gap_reason(cost(**parts), bound, unlimited_s=unlimited_s) == words


def test_even_split_takes_all_devices_and_equal_shares() -> None:
    layout, why = even_split(problem_of(LAB))
    assert why == ""
    assert layout is not None
    assert len(layout.ranks) == 4
    assert len({replica.num_rows for replica in layout.replicas}) == 1
    layers = {s.num_layers for replica in layout.replicas for s in replica.stages}
    assert max(layers) - min(layers) <= 1


def test_even_split_that_does_not_divide_or_fit_says_why() -> None:
    chips = [Chips(vendor="x", num_devices=5)]
    layout, why = even_split(problem_of(replace(LAB, chips=chips, limits=PlanLimits(max_stages=4))))
    assert layout is None
    assert "5 devices do not share 12 rows equally" in why
    tight = [replace(LAB.chips[0], memory=0.2 * MIB), LAB.chips[1]]
    layout, why = even_split(problem_of(replace(LAB, chips=tight)))
    assert layout is None
    assert "fits" in why


def uneven_lab(max_shapes: int | None = None) -> Lab:
    """Speeds 1 : 0.5 in numbers that no single replica shape uses up."""
    chips = [
        Chips(vendor="x", num_devices=5, layer_s=1.0, memory=None, per_host=5),
        Chips(vendor="y", num_devices=3, layer_s=2.0, memory=None, per_host=3),
    ]
    return Lab(
        chips=chips,
        model=small_model(24),
        batch=64,
        rows=(1,),
        links=FREE_LINKS,
        limits=PlanLimits(max_shapes=max_shapes),
    )


def test_few_shapes_are_kept_to_and_their_price_is_said() -> None:
    free = uneven_lab().plan()
    one = uneven_lab(max_shapes=1).plan()
    shapes = {
        tuple((one.split.ranks[s.ranks[0]].vendor, s.num_layers) for s in replica.stages)
        for replica in one.split.replicas
    }
    assert len(shapes) == 1
    price = one.split.cost.step_s / free.split.cost.step_s - 1
    assert price > 0
    assert f"At most 1 replica shape: {price:.2%} slower" in one.verdict
    assert "replica shape" not in free.verdict


def test_no_combination_takes_more_devices_than_there_are() -> None:
    """A vendor without room for two rows is left out of combinations of two; the others keep their own shapes."""
    chips = [
        Chips(vendor="x", num_devices=2, memory=0.6 * MIB),
        Chips(vendor="y", num_devices=2, per_host=1),
        Chips(vendor="z", num_devices=2, gflops=0.5, per_host=1),
    ]
    limits = PlanLimits(max_stages=1)
    lab = Lab(
        chips=chips,
        model=small_model(1, 257),
        batch=23,
        rows=(1, 2),
        seq_len=16,
        limits=limits,
    )
    problem = read_problem(lab.facts, lab.profile, lab.recipe, targets={})
    for combo in combos(problem, enumerate_shapes(ShapeMaker(problem)), 0.0):
        used = [sum(n * shape.use[at] for shape, n in combo) for at in range(3)]
        assert all(need <= have for need, have in zip(used, problem.capacity, strict=True))
