"""Known curves come back, whatever their figures, noise and single outliers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun.model import CurvePoint
from hetrun.profile.fit import fit_line
from hetrun.profile.stragglers import DeviceCheck, stragglers

SIZES = [1] + [1 << power for power in range(10, 27, 2)]


def curve(latency_s: float, rate: float, factors: list[float] | None = None) -> list[CurvePoint]:
    factors = factors or [1.0] * len(SIZES)
    return [
        CurvePoint(num_bytes=n, seconds=factor * (latency_s + n / rate))
        for n, factor in zip(SIZES, factors, strict=True)
    ]


LATENCY_S = st.floats(1e-6, 1e-2)
# bytes that travel within one latency: below a mebibyte, else the sizes say nothing about bandwidth
KNEE_BYTES = st.floats(1e3, 1e6)


@given(LATENCY_S, KNEE_BYTES)
def test_exact_curve_is_found_exactly(latency_s: float, knee_bytes: float) -> None:
    fit = fit_line(curve(latency_s, knee_bytes / latency_s))
    assert fit.latency_s == pytest.approx(latency_s, rel=1e-6)
    assert fit.bytes_per_s == pytest.approx(knee_bytes / latency_s, rel=1e-6)
    assert fit.error == pytest.approx(0, abs=1e-6)


@given(
    LATENCY_S,
    KNEE_BYTES,
    st.lists(st.floats(0.98, 1.02), min_size=len(SIZES), max_size=len(SIZES)),
    st.integers(0, len(SIZES) - 1),
    st.sampled_from([0.4, 1.0, 3.0, 20.0]),
)
def test_noise_and_one_outlier_do_not_move_the_bandwidth(
    latency_s: float, knee_bytes: float, noise: list[float], at: int, outlier: float
) -> None:
    noise[at] *= outlier
    fit = fit_line(curve(latency_s, knee_bytes / latency_s, noise))
    assert fit.bytes_per_s == pytest.approx(knee_bytes / latency_s, rel=0.15)
    assert fit.seconds(1 << 20) == pytest.approx(
        latency_s + (1 << 20) / (knee_bytes / latency_s), rel=0.15
    )


def test_bucket_that_lets_small_messages_through_does_not_look_like_bandwidth() -> None:
    """A limit of 25 MB/s with a bucket of 64 KiB that is full again before each message."""
    points = [
        CurvePoint(num_bytes=n, seconds=5e-5 + max(0, n - (64 << 10)) / 25e6 + n / 2e9)
        for n in SIZES
    ]
    assert fit_line(points).bytes_per_s == pytest.approx(25e6, rel=0.05)


def test_large_messages_decide_where_loopback_has_two_speeds() -> None:
    points = [
        CurvePoint(num_bytes=n, seconds=1e-5 + n / (8e9 if n <= 1 << 20 else 3.5e9)) for n in SIZES
    ]
    assert fit_line(points).bytes_per_s == pytest.approx(3.5e9, rel=0.05)


@pytest.mark.parametrize(
    "points", [[], curve(1e-5, 1e9)[:1], [CurvePoint(num_bytes=2, seconds=1.0)]]
)
def test_one_size_is_no_curve(points: list[CurvePoint]) -> None:
    with pytest.raises(ValueError, match="need two sizes"):
        fit_line(points)


# --- stragglers -------------------------------------------------------------------------------------------


def check(host: str, index: int, slow: float = 1.0, **more: float) -> DeviceCheck:
    return DeviceCheck(
        host=host,
        vendor="red",
        model="r1",
        index=index,
        layer_s=0.010 * slow,
        matmul_flops_per_s=1e14 / more.get("product", slow),
        num_threads=int(more.get("num_threads", 1)),
    )


def test_equals_have_no_straggler() -> None:
    assert stragglers([]) == {}
    assert stragglers([check("a", 0)]) == {}
    assert stragglers([check("a", 0), check("a", 1, 1.1), check("b", 0, 0.95)]) == {}


def test_slow_device_is_named_with_its_ratios() -> None:
    found = stragglers([check("a", 0), check("b", 3, 1.6, product=1.3), check("a", 1, 1.02)])
    assert found == {
        ("red", "r1"): (
            "b/3 is slower than its equals: a layer takes 1.57 times as long, a product 1.27 times",
        )
    }


def test_of_two_devices_the_slower_is_named_even_if_it_was_measured_in_full() -> None:
    (said,) = stragglers([check("a", 0, 2.0), check("b", 0)])["red", "r1"]
    assert said.startswith("a/0 is slower")


def test_product_alone_gives_a_straggler_away() -> None:
    (said,) = stragglers([check("a", 0), check("b", 0, 1.0, product=1.5)])["red", "r1"]
    assert "a layer takes 1.00 times as long, a product 1.50 times" in said


def test_more_threads_are_no_equals() -> None:
    assert stragglers([check("a", 0), check("b", 0, 3.0, num_threads=4)]) == {}
