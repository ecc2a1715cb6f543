"""Ranks die at random moments, many saves long; the run goes on under another plan as if nothing had been."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.dist.plans import MODEL, make_plan, with_train
from tests.dist.ranks import RankFailedError
from tests.dist.saving import KillLater, merged, save_all, with_checkpoints
from tests.dist.test_runtime_checkpoint import (
    CUT,
    CUT_ELSEWHERE,
    SHARED,
    SHARED_BY_MORE,
    TOLERANCE,
    largest_difference,
    losses,
)

pytestmark = pytest.mark.dist


def chaos(seed: int, tmp_path: Path) -> None:
    """Kill a rank at a random moment, many saves long, and go on under another plan."""
    folder = str(tmp_path / "checkpoints")
    plan = with_train(make_plan(CUT, steps=30), clip_norm=None)
    other = with_train(make_plan(CUT_ELSEWHERE, steps=30), clip_norm=None)
    whole = save_all(plan, tmp_path)
    try:
        save_all(
            with_checkpoints(plan, folder, every_steps=1),
            tmp_path,
            fault=KillLater(victim=seed % 2, seed=seed, within_s=1.5),
        )
    except RankFailedError:
        pass
    else:
        pytest.fail("the rank outlived its run: nothing was tested")
    resumed = save_all(with_checkpoints(other, folder, every_steps=7), tmp_path)
    assert losses(resumed) == {
        n: loss for n, loss in losses(whole).items() if n >= min(losses(resumed))
    }
    assert merged(resumed) == merged(whole)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_a_random_moment_it_goes_on_as_if_nothing_was(seed: int, tmp_path: Path) -> None:
    chaos(seed, tmp_path)


@pytest.mark.bench  # two minutes: `make chaos`
@pytest.mark.parametrize("seed", range(3, 20))
def test_killed_at_many_random_moments_it_goes_on(seed: int, tmp_path: Path) -> None:
    chaos(seed, tmp_path)


@pytest.mark.bench
@pytest.mark.parametrize("seed", range(3))
def test_killed_among_ranks_that_share_layers_it_goes_on_with_other_shares(
    seed: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoints")
    model = replace(MODEL, num_kv_heads=4)
    plan, other = (make_plan(p, model=model, steps=30) for p in (SHARED, SHARED_BY_MORE))
    whole = save_all(plan, tmp_path)
    fault = KillLater(victim=seed % 2, seed=seed, within_s=1.5)
    with pytest.raises(RankFailedError):
        save_all(with_checkpoints(plan, folder, every_steps=1), tmp_path, fault=fault)
    resumed = save_all(with_checkpoints(other, folder, every_steps=7), tmp_path)
    assert largest_difference(merged(resumed), merged(whole)) < TOLERANCE
