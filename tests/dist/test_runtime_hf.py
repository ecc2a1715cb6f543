"""Models that transformers builds train under any plan like the uncut model in a plain loop, from weights and from checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from hetrun.arch.hf import from_config
from hetrun.model import ModelSpec, Order, Plan
from hetrun.runtime.hf_names import in_class
from hetrun.runtime.hf_stage import build_stage
from hetrun.runtime.optimizer import learning_rate_at
from tests.dist.plans import Pipeline, make_plan, with_train
from tests.dist.saving import merged, save_all, with_checkpoints
from tests.dist.training import Reference, largest_difference, open_test_stream, train_all
from tests.unit.hf_lab import keys_of, stage_plan, uncut

pytestmark = pytest.mark.dist

CUT = (Pipeline((3, 2), 1, 4),)
ZERO = Order.ZERO_BUBBLE
BESIDE = Pipeline((5,), 2, 2)
REAL_CUT = (Pipeline((3, 3), 1, 7, order=ZERO, cuts=(2.4,), more_window=1), BESIDE)
SHARED = (Pipeline((3, 2), 1, 4, order=ZERO, tp=(2, 1), more_window=1), BESIDE)
UNEVEN = (Pipeline((3, 1, 1), 2, 4),)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """As in the ranks: these models are too small to share their work out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def byte_model(kind: str) -> ModelSpec:
    return from_config({**keys_of(kind), "vocab_size": 257})


def train_uncut(plan: Plan) -> Reference:
    """A plain loop over the model as transformers builds it, one batch, torch's own clipping and AdamW."""
    train, model = plan.recipe.train, plan.recipe.model
    stage = build_stage(model, stage_plan(range(5)), seq_len=plan.recipe.data.seq_len)
    stage.initialise(seed=train.seed, device=torch.device("cpu"), dtype=torch.float64)
    built = uncut(model, [stage])
    optimizer = torch.optim.AdamW(
        built.parameters(), betas=(train.beta1, train.beta2), weight_decay=train.weight_decay
    )
    stream = open_test_stream(plan, is_ragged=True)
    losses, norms = [], []
    for step in range(train.steps):
        rows = stream.rows(step * train.global_batch_rows, train.global_batch_rows)
        targets = rows.targets.masked_fill(rows.valid == 0, -100)
        logits = built(rows.inputs, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(built.parameters(), train.clip_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(train, step)
        optimizer.step()
        losses.append(loss.item())
    trained = dict(built.named_parameters())
    values = {
        name: trained[in_class(name)].detach().flatten().tolist()
        for name, _ in stage.named_parameters()
    }
    return Reference(losses=losses, gradient_norms=norms, parameters=values, model=stage)


@pytest.mark.parametrize(
    ("kind", "pipelines", "recompute", "tolerance"),
    [
        pytest.param("gpt2", REAL_CUT, False, 1e-10, id="gpt2-zero-bubble-real-cut"),
        # norms of qwen2 are fp32 inside
        pytest.param("qwen2", SHARED, False, 1e-6, id="qwen2-tp-2-1-beside-one-rank"),
        # routers and norms of mixtral are fp32 inside, where rounding of rows in another batch may differ
        pytest.param("mixtral", UNEVEN, True, 1e-6, id="mixtral-3-1-1-recomputed"),
    ],
)
def test_a_cut_model_trains_like_the_uncut_one(
    kind: str, pipelines: tuple[Pipeline, ...], recompute: bool, tolerance: float, tmp_path: Path
) -> None:
    plan = make_plan(pipelines, model=byte_model(kind), steps=10)
    replicas = [
        replace(r, stages=tuple(replace(stage, recompute=recompute) for stage in r.stages))
        for r in plan.split.replicas
    ]
    plan = replace(plan, split=replace(plan.split, replicas=tuple(replicas)))
    reference = train_uncut(plan)
    answers = train_all(plan, tmp_path, is_ragged=True)
    assert max(reference.gradient_norms) > 0.5  # clipping was at work
    assert reference.losses[-1] < reference.losses[0] - 0.5
    for answer in answers:
        assert answer.losses == pytest.approx(reference.losses, rel=tolerance / 10)
    assert largest_difference(answers, reference) < tolerance


def test_a_run_from_weights_goes_on_from_its_checkpoint_under_another_cut(tmp_path: Path) -> None:
    model = byte_model("gpt_neox")
    stage = build_stage(model, stage_plan(range(5)), seq_len=12)
    stage.initialise(seed=99, device=torch.device("cpu"), dtype=torch.float64)
    built = uncut(model, [stage])
    built.save_pretrained(tmp_path / "weights")

    def planned(pipelines: tuple[Pipeline, ...]) -> Plan:
        plan = with_train(make_plan(pipelines, model=model, steps=6), clip_norm=None)
        recipe = replace(plan.recipe, weights=str(tmp_path / "weights"))
        return replace(plan, recipe=recipe)

    whole = save_all(planned(CUT), tmp_path)
    folder = str(tmp_path / "checkpoints")
    save_all(with_train(with_checkpoints(planned(CUT), folder), steps=3), tmp_path)
    resumed = save_all(with_checkpoints(planned((Pipeline((5,), 1, 4),)), folder), tmp_path)
    assert {n: loss for n, loss in whole[0].losses.items() if n >= 3} == resumed[0].losses
    assert merged(resumed) == merged(whole)
    rows = open_test_stream(planned(CUT), is_ragged=True).rows(0, 4)
    targets = rows.targets.masked_fill(rows.valid == 0, -100)
    logits = built(rows.inputs).logits
    first = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert whole[0].losses[0] == pytest.approx(first, rel=1e-10)  # of those weights, not of seed 7
