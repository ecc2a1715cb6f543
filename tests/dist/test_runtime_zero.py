"""Shared updates give what whole ones give, with each moment on one rank, and last as long as simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrun import arch
from hetrun.model import ModelSpec, Order, Plan
from hetrun.schedule import simulate_step
from tests.dist.plans import Pipeline, make_plan, with_train
from tests.dist.saving import merged, on_hosts, save_all, with_checkpoints
from tests.dist.training import largest_difference, train_all, train_reference

pytestmark = pytest.mark.dist

FOUR = ModelSpec(num_layers=4, hidden_size=16, num_heads=4, ffn_size=24, vocab_size=257)
TIED = replace(FOUR, tied_embeddings=True)
PLANS = {
    "unequal-depth": (
        Pipeline((3, 1), 2, 4, order=Order.ZERO_BUBBLE, more_window=1),
        Pipeline((4,), 1, 3),
        Pipeline((4,), 2, 1),
    ),
    "real-cut-lanes-and-unequal-tp": (
        Pipeline((2, 3), 1, 6, cuts=(1.4,), lanes=(2, 1), more_window=1),
        Pipeline((4,), 1, 2, tp=(2,)),
    ),
}


def shared(plan: Plan) -> Plan:
    """The same plan with shared updates."""
    replicas = tuple(replace(replica, zero=1) for replica in plan.split.replicas)
    return replace(plan, split=replace(plan.split, replicas=replicas))


@pytest.mark.parametrize(
    ("name", "model"), [("unequal-depth", TIED), ("real-cut-lanes-and-unequal-tp", FOUR)]
)
def test_shared_updates_train_like_one_process_and_last_as_simulated(
    name: str, model: ModelSpec, tmp_path: Path
) -> None:
    plan = shared(make_plan(PLANS[name], model=model))
    reference = train_reference(plan, is_ragged=True)
    answers = train_all(plan, tmp_path, is_ragged=True)
    assert max(reference.gradient_norms) > 0.5  # clipping was at work
    for answer in answers:
        assert answer.losses == pytest.approx(reference.losses, rel=1e-11)
        assert answer.gradient_norms == pytest.approx(reference.gradient_norms, rel=1e-9)
    assert largest_difference(answers, reference) < 1e-10
    assert sum(answer.num_moments for answer in answers) == arch.total_parameters(model)
    run = simulate_step(
        plan.split.ranks, plan.split.replicas, plan.links, model, plan.recipe.train.dtype
    )
    for answer, expected in zip(answers, run.rank_spans, strict=True):
        assert answer.step_s == pytest.approx([run.cost.step_s] * 20, rel=1e-6)
        for done in (answer.spans[0], answer.spans[-1]):
            assert [(s.kind, s.microbatch) for s in done] == [
                (s.kind, s.microbatch) for s in expected
            ]
            times = [(s.start_s, s.end_s) for s in expected]
            for span, (start_s, end_s) in zip(done, times, strict=True):
                assert (span.start_s, span.end_s) == pytest.approx((start_s, end_s), rel=1e-6)


def test_parts_of_moments_on_different_hosts_load_into_whole_ones_and_back(tmp_path: Path) -> None:
    disks, folder = tmp_path / "disks", "/proc/self/cwd/checkpoints"

    def saving(plan: Plan, steps: int, hosts: str) -> Plan:
        return on_hosts(with_checkpoints(with_train(plan, steps=steps), folder), list(hosts))

    first = make_plan((Pipeline((4,), 1, 3), Pipeline((1, 3), 1, 1)), model=TIED)
    second = make_plan((Pipeline((2, 2), 1, 4),), model=TIED)
    third = make_plan((Pipeline((4,), 1, 2, tp=(2,)), Pipeline((4,), 1, 2, tp=(2,))), model=TIED)
    reference = train_reference(with_train(first, steps=9), is_ragged=True)
    begun = save_all(saving(shared(first), 3, "aab"), tmp_path, disks=disks)
    said = [event.message for event in begun[0].of("warning")]
    assert [text.split(",")[0] for text in said] == ["if host a is lost", "if host b is lost"]
    save_all(saving(second, 6, "ba"), tmp_path, disks=disks)
    save_all(saving(shared(third), 8, "aabb"), tmp_path, disks=disks)
    ended = save_all(saving(shared(first), 9, "cab"), tmp_path, disks=disks)
    assert ended[0].losses == {8: pytest.approx(reference.losses[8], rel=1e-11)}
    values = merged(ended)
    assert set(values) == set(reference.parameters)
    for name, parameter in reference.parameters.items():
        assert values[name] == pytest.approx(parameter, abs=1e-10)
