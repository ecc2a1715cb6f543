"""The search against brute force: every way to group, order, cut and share out a tiny cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun import arch
from hetrun.model import MIB, Link, LinkKind, ModelCount, ModelSpec, Order, PlanLimits
from hetrun.planner.drafts import Candidate, Group, judge, narrow_windows, wide_windows
from hetrun.planner.orders import offers, refined
from hetrun.planner.problem import Problem, read_problem
from hetrun.planner.search import search
from hetrun.planner.shapes import ShapeMaker
from tests.effort import examples
from tests.unit.planner_lab import FREE_LINKS, LINKS, WHOLE, Chips, Lab, small_model

pytestmark = pytest.mark.slow


def problem_of(lab: Lab) -> Problem:
    """The problem with 1F1B over whole layers, which is what brute force tries."""
    lab = replace(lab, limits=replace(lab.limits, orders=WHOLE.orders, fractional=False))
    return read_problem(lab.facts, lab.profile, lab.recipe, targets={})


def multisets(use: tuple[int, ...], last: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not any(use):
        yield ()
        return
    for first in product(*(range(n + 1) for n in use)):
        if any(first) and first <= last:
            rest = tuple(a - b for a, b in zip(use, first, strict=True))
            for others in multisets(rest, first):
                yield (first, *others)


def cuts(total: int, size: int) -> Iterator[tuple[int, ...]]:
    if size == 1:
        yield (total,)
        return
    for first in range(1, total - size + 2):
        for rest in cuts(total - first, size - 1):
            yield (first, *rest)


def brute_force(problem: Problem) -> Candidate | None:
    """Every way to group, order, cut and share out, with narrow and wide windows, in the best order that is allowed."""
    maker = ShapeMaker(problem)
    best: Candidate | None = None
    capacity = [len(kind.seats) for kind in problem.kinds]
    for use in product(*(range(n + 1) for n in capacity)):
        for replicas in multisets(use, use):
            options = [list(_pipelines(maker, one)) for one in replicas]
            for picked in product(*options):
                sizes = [range(1, problem.batch_rows + 1) for _ in picked]
                for counts in product(*sizes):
                    if not counts or sum(counts) != problem.batch_rows:
                        continue
                    tried = judge(
                        problem,
                        tuple(replace(g, counts=(n,)) for g, n in zip(picked, counts, strict=True)),
                    )
                    tried = refined(problem, tried) if offers(problem) else tried
                    if best is None or tried.step_s < best.step_s:
                        best = tried
    return best


def _pipelines(maker: ShapeMaker, use: tuple[int, ...]) -> Iterator[Group]:
    stages = [kind for kind, count in enumerate(use) for _ in range(count)]
    for kinds in sorted(set(permutations(stages))):
        for layers in cuts(maker.problem.model.num_layers, len(kinds)):
            shape = maker.finish(kinds, layers, 1, memory_bound=False)
            for windows in {narrow_windows(shape), wide_windows(shape)}:
                if maker.fits(shape, windows):
                    yield Group(shape=shape, windows=windows, counts=())


def heavy(num_layers: int, *, head: int = 0) -> ModelSpec:
    """A model whose last layers compute three times what the first does, and hold as much more."""
    base = small_model(num_layers, 32 + head)
    first = replace(arch.layer_at(base, 0), num_layers=1)
    rest = replace(
        first,
        num_layers=num_layers - 1,
        parameters=3 * first.parameters,
        active_parameters=3 * first.active_parameters,
    )
    counts = ModelCount(
        layers=(first, rest),
        embedding_parameters=arch.embedding_parameters(base),
        head_parameters=arch.head_parameters(base),
    )
    return replace(base, family="odd", counts=counts, config='{"model_type": "odd"}')


MODELS = (small_model(2), small_model(3), heavy(2), heavy(3), heavy(3, head=225))


@settings(max_examples=examples(6), deadline=None)
@given(st.data())
def test_no_split_of_a_tiny_cluster_is_better_than_ours(data: st.DataObject) -> None:
    chips = [
        Chips(
            vendor=name,
            num_devices=data.draw(st.integers(1, 2)),
            gflops=data.draw(st.sampled_from([0.5, 1.0, 2.0])),
            memory=data.draw(st.sampled_from([0.8 * MIB, 1.2 * MIB, None])),
        )
        for name in "xy"
    ]
    across = data.draw(st.sampled_from([1e7, 1e9]))
    links = tuple(
        replace(link, bytes_per_s=across) if link.kind is LinkKind.ACROSS else link
        for link in LINKS
    )
    problem = problem_of(
        Lab(
            chips=chips,
            model=data.draw(st.sampled_from(MODELS)),
            batch=data.draw(st.integers(1, 4)),
            rows=(1,),
            seq_len=16,
            links=links,
        )
    )
    best = brute_force(problem)
    if best is not None:
        assert search(problem).best.step_s <= best.step_s * 1.001


def links(inside_s: float, inside: float, across_s: float, across: float) -> tuple[Link, ...]:
    figures = ((inside_s, inside), (1e-4, 1e8), (across_s, across))
    return tuple(
        Link(kind=kind, latency_s=latency_s, bytes_per_s=rate)
        for kind, (latency_s, rate) in zip(LinkKind, figures, strict=True)
    )


def chips(vendor: str, num_devices: int, gflops: float, memory: float | None = None) -> Chips:
    return Chips(
        vendor=vendor,
        num_devices=num_devices,
        gflops=gflops,
        memory=memory,
        per_host=1 + (num_devices > 2),
    )


SLOW = links(1e-4, 1e9, 1e-3, 1e8)
HARD = {
    "one vendor stands between the devices of the other": Lab(
        chips=[chips("a", 3, 0.8, 600_000), chips("b", 1, 0.5, 500_000)],
        model=small_model(5, 64),
        batch=6,
        rows=(1,),
        seq_len=16,
        links=links(1e-3, 1e8, 0.0, 1e10),
    ),
    "two pipelines mirror each other": Lab(
        chips=[chips("a", 2, 2.0, 1_477_018), chips("b", 2, 2.0, 1_015_450)],
        model=small_model(2, 257),
        batch=6,
        rows=(1,),
        seq_len=16,
        links=links(0.0, 1e8, 1e-5, 1e10),
    ),
    "different pipelines are cut at the same layer": Lab(
        chips=[chips("a", 1, 0.5), chips("b", 3, 0.5)],
        model=small_model(4),
        batch=2,
        rows=(1,),
        seq_len=16,
        links=links(1e-5, 1e8, 0.0, 1e8),
    ),
    "layers and microbatches move together": Lab(
        chips=[chips("a", 3, 1.0), chips("b", 1, 0.5)],
        model=small_model(4, 257),
        batch=4,
        rows=(1,),
        seq_len=16,
        links=links(1e-3, 1e8, 2e-4, 1e10),
    ),
    "heavy layers behind a light one": Lab(
        chips=[chips("a", 2, 1.0, 1.1e6), chips("b", 1, 0.5, 9e5)],
        model=heavy(4),
        batch=5,
        rows=(1,),
        seq_len=16,
        links=links(1e-4, 1e9, 1e-4, 1e9),
    ),
    "heavy head: the layers that balance are not the best": Lab(
        chips=[
            Chips(vendor="a", num_devices=1, memory=5e6),
            Chips(vendor="b", num_devices=1, memory=5e6),
        ],
        model=small_model(4, vocab_size=257),
        batch=3,
        rows=(1,),
        seq_len=16,
        links=links(0.0, 1e9, 1e-3, 1e7),
    ),
    "memory: the quicker order of the vendors holds fewer layers": Lab(
        chips=[
            Chips(vendor="a", num_devices=2, memory=8e5),
            Chips(vendor="b", num_devices=2, memory=1.2e6),
        ],
        model=small_model(4),
        batch=6,
        rows=(1,),
        seq_len=16,
        links=SLOW,
    ),
    "two pipelines of unequal depth": Lab(
        chips=[
            Chips(vendor="a", num_devices=2, gflops=0.5, memory=1.2e6),
            Chips(vendor="b", num_devices=2, gflops=0.8, memory=1.2e6),
        ],
        model=small_model(3),
        batch=3,
        rows=(1,),
        seq_len=16,
        links=links(1e-4, 1e9, 1e-4, 1e8),
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_ones_are_solved_exactly(name: str) -> None:
    problem = problem_of(HARD[name])
    best = brute_force(problem)
    assert best is not None
    assert search(problem).best.step_s == pytest.approx(best.step_s, rel=1e-9)


def few_rows(a: int, b: int, batch: int, *, num_layers: int, b_layer_s: float = 1.0) -> Problem:
    """Zero bubble over whole layers and free links; with so few rows most of a step is bubble."""
    lab = Lab(
        chips=[
            Chips(vendor="a", num_devices=a, layer_s=1.0),
            Chips(vendor="b", num_devices=b, layer_s=b_layer_s),
        ],
        model=small_model(num_layers),
        batch=batch,
        rows=(1,),
        links=FREE_LINKS,
        limits=PlanLimits(orders=tuple(Order), fractional=False),
    )
    return read_problem(lab.facts, lab.profile, lab.recipe, targets={})


def test_zero_bubble_that_pays_only_once_bubbles_are_filled_is_found() -> None:
    # two pipelines of 3 + 3 layers: 12 s in 1F1B, as without pipelines; 3 x 3 s and the first forward with W put off
    assert search(few_rows(1, 3, 6, num_layers=6)).best.step_s == pytest.approx(10.0)


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize(("a", "b", "b_layer_s"), [(1, 2, 1.0), (2, 2, 1.0), (2, 1, 0.5)])
def test_zero_bubble_of_few_rows_is_solved_exactly(
    a: int, b: int, b_layer_s: float, batch: int
) -> None:
    problem = few_rows(a, b, batch, num_layers=4, b_layer_s=b_layer_s)
    best = brute_force(problem)
    assert best is not None
    assert search(problem).best.step_s <= best.step_s * (1 + 1e-9)
