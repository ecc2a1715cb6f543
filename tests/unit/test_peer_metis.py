"""Our plans of Metis' shipped example, judged by its cost model, against its pick and the optimum of its own space."""

from __future__ import annotations

import pytest

from tests.unit.peer_metis import EXACT_MS, METIS_MS, example, lockstep_ms, most_megabytes, split_ms

pytestmark = pytest.mark.slow


def test_the_judge_gives_what_metis_says_of_its_own_plans() -> None:
    picked = [("half", 8, 1, 4), ("a100", 8, 1, 6)]
    exact = [("half", 8, 1, 4), ("a100", 2, 4, 6)]
    assert lockstep_ms(picked, 16) == pytest.approx(METIS_MS, abs=0.1)
    assert lockstep_ms(exact, 16) == pytest.approx(EXACT_MS, abs=0.1)


def test_equal_replicas_cost_the_same_in_lockstep_and_on_their_own() -> None:
    split = example(tp=(2,), max_shapes=1).plan().split
    assert len({(r.microbatch_rows, r.num_microbatches) for r in split.replicas}) == 1
    stages = [
        (
            split.ranks[s.ranks[0]].vendor,
            len(split.replicas),
            len(s.ranks),
            s.num_layers + s.has_embedding + s.has_head,
        )
        for s in split.replicas[0].stages
    ]
    count = split.replicas[0].num_microbatches
    assert split_ms(split) == pytest.approx(lockstep_ms(stages, count), rel=2e-3)


@pytest.mark.parametrize(("tp", "most_mb"), [((1, 2, 4), 80 * 1024), ((2, 4), 40 * 1024)])
def test_replicas_with_batches_of_their_own_beat_the_best_of_metis_space(
    tp: tuple[int, ...], most_mb: float
) -> None:
    split = example(tp=tp).plan().split
    assert most_megabytes(split) <= most_mb
    assert split_ms(split) < 0.95 * EXACT_MS
    assert split_ms(split) == pytest.approx({1: 3366.1, 2: 3522.2}[tp[0]], rel=0.01)
