"""E1, E2 and U: what they divide by, and when they have no value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun.efficiency import efficiency
from hetrun.model import Baseline, Source


def baseline(
    vendor: str,
    rows_per_s: float | None,
    *,
    scaled: float | None = None,
    ideal: float = 1.0,
    why: str = "",
) -> Baseline:
    return Baseline(
        vendor=vendor,
        num_devices=4,
        rows_per_s=rows_per_s,
        scaled_batch_rows=8,
        scaled_rows_per_s=scaled,
        ideal_rows_per_s=ideal,
        shape="4 replicas x 1 stage",
        why=why,
    )


@pytest.mark.parametrize(
    ("num_rows", "step_s", "alone", "expected"),
    [
        (16, 72.0, (16 / 96, 16 / 192), 8 / 9),
        (16, 80.0, (16 / 96, 16 / 192), 0.8),
        (64, 264.0, (64 / 384, 64 / 768), 32 / 33),
        (64, 272.0, (64 / 384, 64 / 768), 16 / 17),
    ],
)
def test_e1_of_the_worked_cases(
    num_rows: int, step_s: float, alone: tuple[float, float], expected: float
) -> None:
    baselines = [baseline("x", alone[0]), baseline("y", alone[1])]
    found = efficiency(step_s, num_rows, baselines, kind=Source.MODELLED)
    assert found.e1.value == pytest.approx(expected, rel=1e-12)
    assert found.e1.kind is Source.MODELLED


def test_each_number_divides_by_its_own_sum() -> None:
    baselines = [
        baseline("x", 3.0, scaled=2.5, ideal=4.0),
        baseline("y", 1.0, scaled=0.5, ideal=1.0),
    ]
    found = efficiency(2.0, 8, baselines, kind=Source.MEASURED)
    assert (found.e1.value, found.e2.value, found.u.value) == (1.0, 4 / 3, 0.8)


def test_more_than_all_is_shown_as_it_is() -> None:
    found = efficiency(1.0, 10, [baseline("x", 8.0)], kind=Source.MEASURED)
    assert found.e1.value == 1.25


def test_vendor_that_cannot_train_alone_leaves_no_value_but_a_reason() -> None:
    baselines = [
        baseline("x", 3.0, scaled=3.0),
        baseline("y", None, why="2 devices lack 3.1 GiB"),
        baseline("z", None),
    ]
    found = efficiency(1.0, 4, baselines, kind=Source.MODELLED)
    assert found.e1.value is None
    assert "y has no baseline: 2 devices lack 3.1 GiB" in found.e1.why
    assert "z has no baseline: it cannot train" in found.e1.why
    assert found.u.value == pytest.approx(4 / 3)


def test_no_baseline_at_all_leaves_no_value() -> None:
    found = efficiency(1.0, 4, [], kind=Source.MODELLED)
    assert found.u.value is None
    assert found.u.why == "no baseline is known"


@given(st.floats(0.1, 10), st.integers(1, 100), st.lists(st.floats(0.1, 10), min_size=1))
def test_efficiency_times_summed_speed_is_the_throughput(
    step_s: float, num_rows: int, rates: list[float]
) -> None:
    baselines = [baseline(f"v{i}", rate) for i, rate in enumerate(rates)]
    e1 = efficiency(step_s, num_rows, baselines, kind=Source.MODELLED).e1.value
    assert e1 is not None
    assert e1 * sum(rates) == pytest.approx(num_rows / step_s)
