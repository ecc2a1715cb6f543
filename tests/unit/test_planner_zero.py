"""Shared updates (ZeRO 1): what they leave on each device, when they are chosen, and that nothing better is missed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun import arch
from hetrun.errors import NoPlanError
from hetrun.model import MIB, Dtype, LinkKind, ModelSpec, PlanLimits
from hetrun.planner.check import check_split
from hetrun.planner.cost import Piece
from hetrun.planner.drafts import Candidate, judge
from hetrun.planner.owners import Owners
from hetrun.planner.problem import Problem
from hetrun.planner.search import search
from hetrun.planner.shapes import ShapeMaker
from hetrun.planner.zero import holders, with_zero
from hetrun.report.words import shape_of
from hetrun.schedule import all_reduce_s, gradient_buckets, simulate_step
from hetrun.schedule.step import SCALAR_BYTES
from tests.effort import examples
from tests.unit.planner_lab import LINKS, WHOLE, Chips, Lab, small_model
from tests.unit.test_planner_brute import _pipelines, multisets, problem_of

BOTH = PlanLimits(zero=(0, 1))
ENDLESS = 1 << 30  # holders: moments weigh nothing


def piece(first: int, count: int, *, embedding: bool = False, head: bool = False) -> Piece:
    return Piece(first_layer=first, num_layers=count, has_embedding=embedding, has_head=head)


def test_a_stage_updates_of_each_parameter_the_nth_part_that_n_lanes_leave_it() -> None:
    model = replace(small_model(4), tied_embeddings=True)
    whole = piece(0, 4, embedding=True, head=True)
    front, back = piece(0, 3, embedding=True), piece(2, 2, head=True)  # layer 2 is cut
    owners = Owners(model, {whole: 1, front: 2, back: 1})
    layer, table = arch.layer_parameters(model), arch.embedding_parameters(model)
    norm = arch.final_norm_parameters(model)
    assert owners.updated(front, tp=1) == -(-2 * layer // 3) + -(-(layer + table) // 4)
    assert owners.updated(back, tp=1) == -(-(layer + norm) // 2) + -(-(layer + table) // 4)
    assert owners.updated(back, tp=2) == (
        -(-(-(-layer // 2) + norm) // 2) + -(-(-(-layer // 2) + table) // 4)
    )
    alone = Owners(model, {whole: 1})
    assert alone.updated(whole, tp=1) == arch.total_parameters(model)


def test_scattering_and_gathering_take_half_an_all_reduce_each_around_the_optimizer() -> None:
    lab = Lab(
        chips=[Chips(vendor="x", num_devices=2)],
        batch=2,
        rows=(1,),
        limits=replace(WHOLE, zero=(1,), max_stages=1),
    )
    split = lab.plan().split
    (bucket,) = gradient_buckets(split.ranks, split.replicas, lab.model, 4)
    reduce_s = all_reduce_s(bucket.num_bytes, split.ranks, LINKS)
    scalar_s = all_reduce_s(SCALAR_BYTES, split.ranks, LINKS)
    (stage,) = split.replicas[0].stages
    assert stage.optimizer_s == pytest.approx(10e-9 * arch.total_parameters(lab.model) / 2)
    run = simulate_step(split.ranks, split.replicas, LINKS, lab.model, Dtype.FP32)
    spans = [(span.kind, span.end_s - span.start_s) for span in run.rank_spans[1][-4:]]
    assert [kind for kind, _ in spans] == ["sync", "sync", "optimizer", "sync"]
    assert [seconds for _, seconds in spans] == pytest.approx(
        [reduce_s / 2, scalar_s, stage.optimizer_s, reduce_s / 2]
    )
    cost = split.cost
    assert cost.sync_s == pytest.approx(reduce_s + scalar_s)
    assert cost.optimizer_s == pytest.approx(stage.optimizer_s)
    parts = cost.compute_s + cost.bubble_s + cost.p2p_s + cost.sync_s + cost.optimizer_s
    assert cost.step_s == pytest.approx(parts, rel=1e-12)


def test_what_one_device_cannot_hold_fits_where_four_share_its_moments() -> None:
    lab = Lab(
        chips=[Chips(vendor="x", num_devices=4, memory=4.6 * MIB)],
        model=small_model(2, vocab_size=4000),
        batch=8,
        rows=(1,),
        seq_len=16,
        limits=replace(WHOLE, max_stages=1),
    )
    with pytest.raises(NoPlanError) as caught:
        lab.plan()
    assert "allow plan.zero: [0, 1]" in (caught.value.hint or "")
    plan = replace(lab, limits=replace(lab.limits, zero=(0, 1))).plan()
    assert [replica.zero for replica in plan.split.replicas] == [1, 1, 1, 1]
    assert "nothing fits without" in plan.verdict
    assert shape_of(plan.split.replicas) == "4 replicas x 1 stage with shared updates"
    (stage,) = plan.split.replicas[0].stages
    total = arch.total_parameters(lab.model)
    whole = replace(lab, chips=[Chips(vendor="x", num_devices=4, memory=None)]).plan()
    (unshared,) = whole.split.replicas[0].stages
    assert unshared.memory_bytes - stage.memory_bytes == 8 * total - 8 * (total // 4)
    with pytest.raises(NoPlanError) as caught:
        replace(lab, chips=[Chips(vendor="x", num_devices=2, memory=3 * MIB)]).plan()
    assert "plan.zero" not in (caught.value.hint or "")


def test_a_number_of_holders_between_the_obvious_ones_is_found() -> None:
    model = ModelSpec(num_layers=8, hidden_size=64, num_heads=4, ffn_size=176, vocab_size=3000)
    chips = [
        Chips(vendor="x", num_devices=6, gflops=2.0, memory=12 * MIB),
        Chips(vendor="y", num_devices=4, memory=3 * MIB),
    ]
    limits = replace(WHOLE, zero=(0, 1))
    lab = Lab(chips=chips, model=model, batch=32, rows=(1, 2), seq_len=32, limits=limits)
    problem = problem_of(lab)
    found = with_zero(problem, search)
    assert holders(found) == 6  # of powers of two and what these lead to, 5 is the best
    assert found.whole is not None
    assert found.best.step_s < 0.95 * found.whole.step_s


def test_updates_stay_whole_where_sharing_them_gains_nothing() -> None:
    chips = [Chips(vendor="x", num_devices=4, layer_s=1e-3)]  # its optimizer takes no time
    plan = Lab(chips=chips, batch=8, rows=(1, 2), limits=BOTH).plan()
    assert {replica.zero for replica in plan.split.replicas} == {0}
    always = Lab(chips=chips, batch=8, rows=(1, 2), limits=replace(BOTH, zero=(1,))).plan()
    assert {replica.zero for replica in always.split.replicas} == {1}
    assert always.split.cost.step_s == pytest.approx(plan.split.cost.step_s)


def test_wrong_bytes_and_sharing_that_nobody_allowed_are_found() -> None:
    lab = Lab(chips=[Chips(vendor="x", num_devices=2)], batch=4, rows=(1,), limits=BOTH)
    split = lab.plan().split
    assert split.replicas[0].zero == 1
    check_split(split, lab.facts, lab.profile, lab.recipe)
    with pytest.raises(ValueError, match=r"zero \[1\]"):
        check_split(split, lab.facts, lab.profile, replace(lab, limits=PlanLimits()).recipe)
    first = split.replicas[0]
    lighter = replace(first.stages[0], memory_bytes=first.stages[0].memory_bytes - 1)
    changed = replace(first, stages=(lighter, *first.stages[1:]))
    with pytest.raises(ValueError, match=r"replica 0 stage 0: .* bytes"):
        check_split(
            replace(split, replicas=(changed, *split.replicas[1:])),
            lab.facts,
            lab.profile,
            lab.recipe,
        )


def brute_force(problem: Problem) -> Candidate | None:
    """Every split with shared updates that fits by what its own replicas leave on each device."""
    shared = replace(problem, shards=1)
    maker = ShapeMaker(replace(problem, shards=ENDLESS))
    best: Candidate | None = None
    capacity = [len(kind.seats) for kind in problem.kinds]
    for use in product(*(range(n + 1) for n in capacity)):
        for replicas in multisets(use, use):
            for picked in product(*([*_pipelines(maker, one)] for one in replicas)):
                for counts in product(range(1, problem.batch_rows + 1), repeat=len(picked)):
                    if not counts or sum(counts) != problem.batch_rows:
                        continue
                    pairs = zip(picked, counts, strict=True)
                    tried = judge(shared, tuple(replace(g, counts=(n,)) for g, n in pairs))
                    if fits(tried) and (best is None or tried.step_s < best.step_s):
                        best = tried
    return best


def fits(candidate: Candidate) -> bool:
    stages = [stage for replica in candidate.layout.replicas for stage in replica.stages]
    return all(s.memory_bytes <= (s.memory_limit_bytes or s.memory_bytes) for s in stages)


@pytest.mark.slow
@settings(max_examples=examples(12), deadline=None)
@given(st.data())
def test_no_split_of_a_tiny_cluster_with_shared_updates_is_better_than_ours(
    data: st.DataObject,
) -> None:
    chips = [
        Chips(
            vendor=name,
            num_devices=data.draw(st.integers(1, 2)),
            gflops=data.draw(st.sampled_from([0.05, 1.0, 2.0])),
            memory=data.draw(st.sampled_from([0.3 * MIB, 0.5 * MIB, 0.8 * MIB, None])),
        )
        for name in "xy"
    ]
    across = data.draw(st.sampled_from([1e7, 1e9]))
    links = tuple(
        replace(link, bytes_per_s=across) if link.kind is LinkKind.ACROSS else link
        for link in LINKS
    )
    model = data.draw(st.sampled_from([small_model(2), small_model(2, 300), small_model(3)]))
    tied = replace(model, tied_embeddings=data.draw(st.booleans()))
    lab = Lab(
        chips=chips,
        model=tied,
        batch=data.draw(st.integers(1, 4)),
        rows=(1,),
        seq_len=16,
        links=links,
        limits=PlanLimits(zero=(1,)),
    )
    problem = problem_of(lab)
    best = brute_force(problem)
    if best is not None:
        assert with_zero(problem, search).best.step_s <= best.step_s * 1.001


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "tied"),
    [
        (replace(WHOLE, lanes=(1, 2)), False),
        (replace(WHOLE, tp=(1, 2), recompute=True), True),
        (PlanLimits(), True),  # zero bubble and real cuts
    ],
    ids=["lanes", "tp and recomputation", "all orders"],
)
def test_sharing_is_never_slower_and_each_plan_holds_what_it_says(
    limits: PlanLimits, tied: bool
) -> None:
    lab = Lab(
        chips=[
            Chips(vendor="x", num_devices=2, memory=0.8 * MIB),
            Chips(vendor="y", num_devices=1, gflops=0.5),
        ],
        model=replace(small_model(4), tied_embeddings=tied),
        batch=4,
        rows=(1, 2),
        seq_len=16,
        limits=limits,
    )
    whole = lab.plan().split.cost.step_s
    shared = replace(lab, limits=replace(limits, zero=(0, 1))).plan()  # is checked there
    assert {replica.zero for replica in shared.split.replicas} == {1}
    assert shared.split.cost.step_s < whole
