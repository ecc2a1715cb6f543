"""Repeats as a steady, a throttled, a cold and a shared device give them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun.runtime.steadiness import MIN_REPEATS, Steadiness, finding, judge

# Seconds of a layer on a quiet and on a shared processor, recorded.
QUIET = (
    *(0.01021, 0.01019, 0.01034, 0.01018, 0.01022, 0.01020, 0.01017, 0.01041, 0.01019, 0.01021),
    *(0.01018, 0.01020, 0.01025, 0.01019, 0.01023),
)
SHARED = (
    *(0.0102, 0.0117, 0.0103, 0.0109, 0.0142, 0.0104, 0.0103, 0.0112, 0.0105, 0.0103),
    *(0.0121, 0.0104, 0.0106, 0.0104, 0.0103),
)
ONE_HICCUP = (*QUIET[:7], 0.09, *QUIET[7:])
TWO_CLOCKS = tuple(0.0150 if number % 3 == 2 else s for number, s in enumerate(QUIET))
HOT = tuple(s * (1 + 0.04 * number) for number, s in enumerate(QUIET))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (QUIET, Steadiness.STEADY),
        (SHARED, Steadiness.STEADY),
        (ONE_HICCUP, Steadiness.STEADY),
        (HOT, Steadiness.SLOWING),
        (HOT[::-1], Steadiness.SPEEDING),
        (TWO_CLOCKS, Steadiness.BIMODAL),
        (HOT[: MIN_REPEATS - 1], Steadiness.STEADY),  # too few to tell
        ((), Steadiness.STEADY),
    ],
)
def test_kind_of_repeats_is_told_apart(seconds: tuple[float, ...], expected: Steadiness) -> None:
    assert judge(seconds) is expected


def test_step_down_of_the_clock_is_throttling() -> None:
    """A device that drops to a lower clock half way and stays there."""
    seconds = (*QUIET, *(1.4 * s for s in QUIET))
    assert judge(seconds) in (Steadiness.SLOWING, Steadiness.BIMODAL)


def test_words_name_the_figure_and_how_bad_it_is() -> None:
    assert finding("matmul", QUIET) is None
    assert finding("matmul", HOT) == (
        "matmul: repeats got 1.36 times as slow while measuring; throttled?"
    )
    assert "was not warm" in (finding("copy", HOT[::-1]) or "")
    assert "5 of 15 repeats are 1.47 times as slow" in (finding("layer", TWO_CLOCKS) or "")


@given(
    st.lists(st.floats(0.97, 1.03), min_size=MIN_REPEATS, max_size=40),
    st.floats(1e-6, 10.0),
)
def test_small_noise_is_steady_whatever_the_unit(noise: list[float], unit_s: float) -> None:
    assert judge([unit_s * value for value in noise]) is Steadiness.STEADY
