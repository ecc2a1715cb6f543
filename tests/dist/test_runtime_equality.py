"""A plan changes who computes what, never what is computed: parameters equal those of a single process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.model import Dtype, ModelSpec, Order
from hetrun.runtime.trainer import LossScale, MicrobatchShare
from hetrun.schedule import simulate_step
from tests.dist.plans import MODEL, Pipeline, make_plan, with_train
from tests.dist.training import largest_difference, train_all, train_reference

pytestmark = pytest.mark.dist

TOLERANCE = 1e-10
TIED = replace(MODEL, tied_embeddings=True)
UNEVEN_DATA = (Pipeline((8,), 2, 5), Pipeline((8,), 1, 4), Pipeline((8,), 2, 1))
UNEVEN_PIPELINE = (Pipeline((5, 2, 1), 2, 8),)
BOTH = (Pipeline((5, 3), 2, 6), Pipeline((2, 3, 3), 1, 4))
UNEQUAL_DEPTH = (Pipeline((6, 2), 2, 4), Pipeline((1, 3, 4), 1, 4), Pipeline((8,), 2, 2))


@pytest.mark.parametrize("is_ragged", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize(
    ("pipelines", "model"),
    [
        pytest.param(UNEVEN_DATA, MODEL, id="rows-10-4-2"),
        pytest.param(UNEVEN_PIPELINE, MODEL, id="layers-5-2-1"),
        pytest.param(BOTH, MODEL, id="layers-5-3-and-2-3-3"),
        pytest.param(UNEQUAL_DEPTH, MODEL, id="depths-2-3-1"),
        pytest.param(UNEQUAL_DEPTH, TIED, id="tied-depths-2-3-1"),
        pytest.param(UNEVEN_PIPELINE, TIED, id="tied-layers-5-2-1"),
    ],
)
def test_any_split_trains_like_one_process(
    pipelines: tuple[Pipeline, ...], model: ModelSpec, is_ragged: bool, tmp_path: Path
) -> None:
    plan = make_plan(pipelines, model=model)
    reference = train_reference(plan, is_ragged=is_ragged)
    answers = train_all(plan, tmp_path, is_ragged=is_ragged)
    difference = largest_difference(answers, reference)
    assert max(reference.gradient_norms) > 0.5  # clipping was at work
    assert reference.losses[-1] < reference.losses[0] - 0.5
    for answer in answers:
        assert answer.losses == pytest.approx(reference.losses, rel=1e-11)
        assert answer.gradient_norms == pytest.approx(reference.gradient_norms, rel=1e-9)
    assert difference < TOLERANCE


def test_stages_that_recompute_train_like_one_process(tmp_path: Path) -> None:
    plan = make_plan(BOTH, model=TIED)
    replicas = [
        replace(r, stages=(replace(r.stages[0], recompute=True), *r.stages[1:]))
        for r in plan.split.replicas
    ]
    plan = replace(plan, split=replace(plan.split, replicas=tuple(replicas)))
    reference = train_reference(plan, is_ragged=True)
    answers = train_all(plan, tmp_path, is_ragged=True)
    assert max(reference.gradient_norms) > 0.5  # clipping was at work
    assert largest_difference(answers, reference) < TOLERANCE


def by_rows(share: MicrobatchShare) -> float:
    """Wrong: the mean of each microbatch, weighted by its rows."""
    return share.rows / share.batch_rows / share.valid_tokens


def mean_of_replicas(share: MicrobatchShare) -> float:
    """Wrong: each replica's own mean, averaged as plain data parallelism does."""
    return 1.0 / share.replica_valid_tokens / share.num_replicas


def mean_of_microbatches(share: MicrobatchShare) -> float:
    """Wrong: the mean of each microbatch, all microbatches alike."""
    return 1.0 / share.valid_tokens / share.batch_microbatches


@pytest.mark.parametrize(
    ("loss_scale", "is_ragged"),
    [(by_rows, True), (mean_of_replicas, False), (mean_of_microbatches, False)],
)
def test_comparison_catches_a_wrong_weighting(
    loss_scale: LossScale, is_ragged: bool, tmp_path: Path
) -> None:
    plan = make_plan(UNEVEN_DATA)
    reference = train_reference(plan, is_ragged=is_ragged)
    answers = train_all(plan, tmp_path, is_ragged=is_ragged, loss_scale=loss_scale)
    difference = largest_difference(answers, reference)
    assert difference > 1e6 * TOLERANCE


def test_fp32_follows_the_loss_curve_of_one_process(tmp_path: Path) -> None:
    plan = make_plan(UNEQUAL_DEPTH, dtype=Dtype.FP32)
    reference = train_reference(plan, is_ragged=True)
    for answer in train_all(plan, tmp_path, is_ragged=True):
        assert answer.losses == pytest.approx(reference.losses, rel=1e-5)


def test_bf16_trains_and_replicas_stay_equal(tmp_path: Path) -> None:
    plan = make_plan(UNEQUAL_DEPTH, model=TIED, dtype=Dtype.BF16)
    answers = train_all(plan, tmp_path, is_ragged=True)
    assert answers[0].losses[-1] < answers[0].losses[0] - 0.3
    held: dict[str, list[list[float]]] = {}
    for answer in answers:
        for name, values in answer.parameters.items():
            held.setdefault(name, []).append(values)
    assert len(held["embedding.weight"]) == 5  # first and last stages of three replicas
    for copies in held.values():
        assert all(copy == copies[0] for copy in copies)


def test_mixed_precision_trains_like_one_process_and_lasts_as_simulated(tmp_path: Path) -> None:
    """Zero bubble and real cuts: put-off gradients, bf16 messages, and a layer whose fp32 gradients are added."""
    cut = Pipeline((4, 5), 2, 5, order=Order.ZERO_BUBBLE, cuts=(3.4,), more_window=1)
    plan = make_plan((cut,), dtype=Dtype.BF16_MIXED)
    reference = train_reference(plan, is_ragged=True)
    exact = train_reference(with_train(plan, dtype=Dtype.FP32), is_ragged=True)
    answers = train_all(plan, tmp_path, is_ragged=True)
    assert exact.losses[-1] < exact.losses[0] - 0.5
    for answer in answers:
        assert answer.losses == pytest.approx(reference.losses, rel=2e-3)
        assert answer.losses == pytest.approx(exact.losses, rel=1e-2)
        assert answer.losses != exact.losses
    names = set(answers[0].parameters) & set(answers[1].parameters)
    assert {name.split(".")[1] for name in names} == {"3"}  # the layer at the cut
    assert all(answers[0].parameters[name] == answers[1].parameters[name] for name in names)
    run = simulate_step(
        plan.split.ranks, plan.split.replicas, plan.links, plan.recipe.model, Dtype.BF16_MIXED
    )
    assert answers[0].step_s == pytest.approx([run.cost.step_s] * 20, rel=1e-6)
