"""What ranks tell each other of the values that they share. The exchange itself is in tests/dist/test_runtime_drift.py."""

from __future__ import annotations

import pytest
import torch

from hetrun.model import Drift, Dtype
from hetrun.runtime import drift
from hetrun.runtime.precision import TORCH_DTYPE
from tests.dist.plans import Pipeline, make_plan, with_train

RANKS = make_plan((Pipeline((8,), 1, 1),) * 9).split.ranks


@pytest.mark.parametrize("dtype", [Dtype.FP64, Dtype.FP32, Dtype.BF16])
def test_any_changed_bit_and_any_swap_changes_the_checksum(dtype: Dtype) -> None:
    values = torch.linspace(-2.0, 3.0, 60).to(TORCH_DTYPE[dtype]).reshape(3, 20)
    whole = drift.checksum([values])
    assert drift.checksum([values.clone()]) == whole
    assert drift.checksum([values[:, :7].contiguous()]) == drift.checksum([values[:, :7]])
    bits = values.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[values.element_size()])
    for bit in range(8 * values.element_size() - 1):
        bits[1, 5] ^= 1 << bit
        assert drift.checksum([values]) != whole
        bits[1, 5] ^= 1 << bit
    swapped = values.clone()
    swapped[0, 0], swapped[2, 19] = values[2, 19], values[0, 0]
    assert drift.checksum([swapped]) != whole
    assert drift.checksum([values[:1], values[1:]]) != drift.checksum([values[1:], values[:1]])


def test_order_counts_over_many_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "_CHUNK", 4)
    values = torch.arange(12.0)
    turned = torch.cat((values[4:8], values[:4], values[8:]))
    assert drift.checksum([turned]) != drift.checksum([values])


def test_comparisons_are_due_every_so_often_and_after_the_last_step() -> None:
    plan = make_plan((Pipeline((8,), 1, 1),), steps=8)
    train = with_train(plan, compare_every=3).recipe.train
    assert [step for step in range(8) if drift.is_due(train, step)] == [2, 5, 7]
    assert not any(drift.is_due(plan.recipe.train, step) for step in range(8))


def test_words_name_unit_ranks_vendors_and_size() -> None:
    said = drift.words(
        Drift(unit="layer.3", groups=((0, 3), (1,)), largest=1.234e-7), RANKS, repaired=False
    )
    assert said == "layer.3 differs between ranks 0, 3 (red) and rank 1 (green) by up to 1.2e-07"
    many = Drift(unit="head", groups=((0,), tuple(range(1, 9))), largest=None)
    assert drift.words(many, RANKS, repaired=True) == (
        "head differs between rank 0 (red) and ranks 1, 2, 3, 4, 5, 6, ... (blue, green, red)"
        " and is not finite; all took the values of rank 0"
    )


def test_repair_needs_comparisons() -> None:
    plan = make_plan((Pipeline((8,), 1, 1),))
    with pytest.raises(ValueError, match="repair without compare_every"):
        with_train(plan, repair=True)
    with pytest.raises(ValueError, match="compare_every 0, need at least 1"):
        with_train(plan, compare_every=0)
