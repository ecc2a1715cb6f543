"""Every parameter counts once in the norm, whoever holds it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from hetrun.errors import ConfigError
from hetrun.model import ModelSpec
from hetrun.runtime import sync
from hetrun.runtime.network import Stage
from hetrun.runtime.segments import Holding, Segment, SegmentGroup, counted_parameters
from hetrun.runtime.sync import GradientSync
from hetrun.runtime.trainer import MicrobatchShare, find_stage, per_valid_token
from hetrun.schedule import gradient_buckets
from tests.dist.plans import MODEL, SEQ_LEN, Pipeline, make_plan

PIPELINES = (Pipeline((6, 2), 2, 4), Pipeline((1, 3, 4), 1, 4), Pipeline((8,), 2, 2))


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, tied_embeddings=True)])
@pytest.mark.parametrize("pipelines", [PIPELINES, PIPELINES[:1], PIPELINES[2:]])
def test_each_parameter_is_counted_by_one_rank(
    model: ModelSpec, pipelines: tuple[Pipeline, ...]
) -> None:
    plan = make_plan(pipelines, model=model)
    buckets = gradient_buckets(plan.split.ranks, plan.split.replicas, model, 4)
    counts: Counter[str] = Counter()
    for rank in plan.split.ranks:
        _, part = find_stage(plan, rank)
        stage = Stage(model, part, seq_len=SEQ_LEN)
        names = {id(parameter): name for name, parameter in stage.named_parameters()}
        counted = counted_parameters(
            Holding(stage.units(), {}, {}), buckets=buckets, lane=(rank.rank,), rank=rank.rank
        )
        counts.update(names[id(parameter)] for parameter in counted)
    whole = Stage(model, replace(part, first_layer=0, num_layers=8, has_embedding=True), seq_len=1)
    assert counts == Counter(name for name, _ in whole.named_parameters())


def _sync(*gradients: list[float]) -> tuple[GradientSync, list[nn.Parameter]]:
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(len(gradient), dtype=torch.float64))
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        parameters.append(parameter)
    return GradientSync(parameters, buckets=[], counted=[], scalar_planned_s=0.0), parameters


def test_clip_scales_all_gradients_to_the_norm() -> None:
    gradients, (first, second) = _sync([3.0, 0.0], [4.0])
    gradients.clip(5.0, 1.0)
    assert first.grad is not None
    assert second.grad is not None
    assert first.grad.tolist() == pytest.approx([0.6, 0.0], rel=1e-5)
    assert second.grad.tolist() == pytest.approx([0.8], rel=1e-5)


@pytest.mark.parametrize("clip_norm", [None, 6.0])
def test_clip_leaves_small_gradients_alone(clip_norm: float | None) -> None:
    gradients, (first, _) = _sync([3.0, 0.0], [4.0])
    gradients.clip(5.0, clip_norm)
    assert first.grad is not None
    assert first.grad.tolist() == [3.0, 0.0]


def test_chunks_keep_order_and_miss_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "CHUNK_BYTES", 16)
    _, parameters = _sync([1.0], [2.0], [3.0, 4.0], [5.0], [6.0, 7.0, 8.0])
    parameters[1].grad = None  # a parameter that no microbatch touched
    segments = [Segment(parameter, 0, 0, len(parameter)) for parameter in parameters[:-1]]
    segments.append(Segment(parameters[-1], 0, 1, 2))
    group = SegmentGroup(None, (0, 1), tuple(segments), 1)
    chunks = [
        [value for gradient in chunk.gradients for value in gradient.tolist()]
        for chunk in sync._chunks(group)
    ]
    assert chunks == [[1.0, 0.0], [3.0, 4.0], [5.0, 7.0]]
    assert group.num_bytes == 6 * 8


def test_loss_is_divided_by_the_tokens_of_the_whole_batch() -> None:
    share = MicrobatchShare(
        valid_tokens=3, batch_valid_tokens=50, rows=1, batch_rows=9, replica=1,
        replica_valid_tokens=20, num_replicas=2, batch_microbatches=7,
    )  # fmt: skip
    assert per_valid_token(share) == 1 / 50


def test_rank_that_its_stage_does_not_name_is_refused() -> None:
    plan = make_plan(PIPELINES[2:])
    (replica,) = plan.split.replicas
    wrong = replace(replica, stages=(replace(replica.stages[0], ranks=(1,)),))
    plan = replace(plan, split=replace(plan.split, replicas=(wrong,)))
    with pytest.raises(ConfigError, match=r"has ranks \[1\], need rank 0 among them"):
        find_stage(plan, plan.split.ranks[0])
