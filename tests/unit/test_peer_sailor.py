"""Our plan of Sailor's own experiment, judged by its formula, against what four planners reach there."""

from __future__ import annotations

import pytest

from hetrun.model import Plan
from tests.unit.peer_sailor import BEST_OF_ALL, PEERS, experiment, judged, step_s

pytestmark = pytest.mark.slow

TPS = ((1,), (2,), (4,))  # one degree for all stages
STAGES = range(3, 7)  # the most that a pipeline may have


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Plans with each tp alone, and with all of them but at most so many stages: the judge takes its choice."""
    alone = [experiment(tp=tp).plan() for tp in TPS]
    return [*alone, *(experiment(max_stages=most).plan() for most in STAGES)]


def test_the_judge_gives_what_sailors_simulator_gives() -> None:
    wide = [("v100", 2, 5), ("v100", 2, 4), ("v100", 2, 4), ("a100", 2, 13)]
    deep = [("v100", 1, 2)] * 8 + [("a100", 1, 5)] * 2
    assert step_s(2, 16, wide) == pytest.approx(5.070531223628357, rel=1e-6)
    assert step_s(1, 12, deep) == pytest.approx(6.536984508026063, rel=1e-6)


def test_the_best_of_our_plans_is_the_best_that_is_known_to_the_peers_judge(
    plans: list[Plan],
) -> None:
    best = max(judged(plan.split) for plan in plans)
    assert best == pytest.approx(BEST_OF_ALL, rel=1e-4)
    assert best > 1.15 * max(PEERS.values())


def test_most_of_our_plans_beat_every_peer(plans: list[Plan]) -> None:
    beats = [judged(plan.split) > max(PEERS.values()) for plan in plans]
    assert sum(beats) >= len(beats) - 1
