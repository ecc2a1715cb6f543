"""AMP's pairs of predicted and real seconds on a mixed cluster: how well our cost model puts its plans in order."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import correlation

import pytest

from tests.unit.peer_amp import PAIRS, Truths, forward_s, predicted_s

REAL = [pair[5] for pair in PAIRS]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    return correlation(_ranked(a), _ranked(b))


def _ranked(values: Sequence[float]) -> list[float]:
    """Ranks, equal values in the middle of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def regret(predicted: Sequence[float]) -> float:
    """How much longer the plan takes that is predicted to be the quickest than the quickest does."""
    return REAL[predicted.index(min(predicted))] / min(REAL) - 1


def ours(truths: Truths) -> list[float]:
    return [predicted_s(pair, truths) for pair in PAIRS]


def test_pairs_are_those_that_amp_published() -> None:
    amp = [pair[4] for pair in PAIRS]
    assert len(PAIRS) == 43
    assert all(sum(pair[3]) == 24 and pair[0] * pair[1] * len(pair[3]) == 16 for pair in PAIRS)
    assert spearman(amp, REAL) == pytest.approx(0.394, abs=0.001)
    assert regret(amp) == pytest.approx(0.148, abs=0.001)


def test_plans_of_a_mixed_cluster_stand_in_the_order_of_their_real_times() -> None:
    predicted = ours(Truths())
    off = [abs(p / r - 1) for p, r in zip(predicted, REAL, strict=True)]
    assert spearman(predicted, REAL) >= 0.8
    assert regret(predicted) <= 0.05
    assert sum(off) / len(off) <= 0.15


def test_order_is_lost_where_links_are_not_shared_or_times_are_in_proportion_to_rows() -> None:
    assert spearman(ours(Truths(shared_links=False)), REAL) < 0.8
    assert spearman(ours(Truths(fixed_part=False)), REAL) < 0.6


def test_a_row_takes_what_was_measured_and_more_rows_less_than_in_proportion() -> None:
    one, eight = (forward_s("v100", 1, rows, Truths()) for rows in (1, 8))
    assert one == pytest.approx(3.919e-3)
    assert 2 * one < eight < 8 * one
