"""Shares of layers that transformers builds give, added up, what whole layers give: outputs and gradients, family by family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetrun.arch.hf import from_config
from hetrun.model import ModelSpec
from hetrun.runtime.hf_stage import build_stage
from hetrun.runtime.tensor_parallel import Share, share_layers, shared_dims
from hetrun.schedule.shares import SHARED_FAMILIES
from tests.dist.ranks import run_ranks
from tests.unit.hf_lab import keys_of, stage_plan

pytestmark = pytest.mark.dist

SEQ_LEN = 7


def _largest_differences(rank: int, store_path: Path, models: dict[str, ModelSpec]) -> list[str]:
    """Names of what differs from the whole stage by more than rounding."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store_path), 2), rank=rank, world_size=2
    )
    found = []
    for kind, model in models.items():
        whole = build_stage(model, stage_plan(range(2)), seq_len=SEQ_LEN)
        part = build_stage(model, stage_plan(range(2)), seq_len=SEQ_LEN)
        assert shared_dims(whole), kind
        share_layers(part, Share(rank, 2, dist.group.WORLD))
        results = []
        for stage in (whole, part):
            stage.initialise(seed=3, device=torch.device("cpu"), dtype=torch.float64)
            logits = stage(torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN))
            logits.square().sum().backward()
            results.append(logits.detach())
        pairs = [(f"{kind} logits", *results)]
        right = dict(whole.named_parameters())
        for name, parameter in part.named_parameters():
            box = part.boxes.get(name)
            for what, a, b in (
                ("value", parameter.detach(), right[name].detach()),
                ("gradient", parameter.grad, right[name].grad),
            ):
                assert a is not None
                assert b is not None
                pairs.append((f"{kind} {name} {what}", a, b if box is None else box.of(b)))
        assert sum(box.whole != box.shape for box in part.boxes.values()) >= 14, kind
        for name, a, b in pairs:
            if not torch.allclose(a, b, rtol=1e-5, atol=1e-7 * float(b.abs().max())):
                found.append(f"{name}: {(a - b).abs().max()} of {b.abs().max()}")
    return found


def test_two_shares_are_the_whole_in_every_family_that_is_said_to_be_shareable(
    tmp_path: Path,
) -> None:
    models = {
        kind: from_config({**keys_of(kind), "vocab_size": 257}, transformers=True)
        for kind in SHARED_FAMILIES
    }
    assert run_ranks(_largest_differences, 2, tmp_path, models) == [[], []]
