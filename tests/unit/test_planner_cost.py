"""Seconds and bytes of stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun import arch
from hetrun.arch.hf import from_config
from hetrun.model import Dtype, Link, LinkKind, ModelSpec, RowTiming
from hetrun.planner.cost import (
    Crossings,
    Piece,
    best_part_seconds_per_row,
    is_extrapolated,
    model_seconds,
    send_seconds,
    stage_parameters,
    stage_seconds,
    timing_at,
)
from hetrun.planner.memory import Load, layer_bytes, stage_bytes
from hetrun.planner.recost import _interpolate
from tests.unit.planner_lab import Chips, Lab, small_model

PROFILE = Lab(chips=[Chips(vendor="x", num_devices=1)]).profile.devices[0]


def timing(rows: int, layer_s: float, head_s: float = 0.0) -> RowTiming:
    return RowTiming(
        rows=rows,
        layer_forward_s=layer_s,
        layer_backward_s=2 * layer_s,
        embedding_forward_s=0.1,
        embedding_backward_s=0.2,
        head_forward_s=head_s,
        head_backward_s=2 * head_s,
    )


@pytest.mark.parametrize(
    ("rows", "layer_s", "beyond"),
    [
        (1, 1.0, True),
        (2, 1.0, False),
        (3, 1.5, False),
        (4, 2.0, False),
        (8, 5.0, False),
        (12, 8.0, True),
    ],
)
def test_times_are_linear_between_sizes_and_go_on_with_the_last_slope(
    rows: int, layer_s: float, beyond: bool
) -> None:
    profile = replace(PROFILE, timings=(timing(2, 1.0), timing(4, 2.0), timing(8, 5.0)))
    assert timing_at(profile, rows).layer_forward_s == pytest.approx(layer_s)
    assert timing_at(profile, rows).layer_backward_s == pytest.approx(2 * layer_s)
    assert is_extrapolated(profile, rows) is beyond


def test_single_measured_size_scales_in_proportion() -> None:
    profile = replace(PROFILE, timings=(timing(2, 1.0),))
    assert timing_at(profile, 6).layer_forward_s == pytest.approx(3.0)


def test_falling_times_never_extrapolate_below_zero() -> None:
    profile = replace(PROFILE, timings=(timing(1, 2.0), timing(2, 1.0)))
    assert timing_at(profile, 64).layer_forward_s == pytest.approx(32.0)


@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=4), st.integers(1, 20))
def test_both_evaluators_read_a_profile_alike(seconds: list[float], rows: int) -> None:
    timings = tuple(timing(2 * i + 2, s, s) for i, s in enumerate(seconds))
    found = timing_at(replace(PROFILE, timings=timings), rows)
    points = [(t.rows, [t.layer_forward_s, t.layer_backward_s, t.head_forward_s]) for t in timings]
    expected = [found.layer_forward_s, found.layer_backward_s, found.head_forward_s]
    assert _interpolate(points, rows) == pytest.approx(expected)


def test_stage_adds_layers_embedding_and_head() -> None:
    parts = timing(1, 1.0, 3.0)
    both = Piece(first_layer=0, num_layers=4, has_embedding=True, has_head=True)
    assert stage_seconds(parts, both) == pytest.approx((7.1, 14.2))
    middle = Piece(first_layer=0, num_layers=4, has_embedding=False, has_head=False)
    assert stage_seconds(parts, middle) == pytest.approx((4.0, 8.0))
    assert model_seconds(parts, 4) == pytest.approx(21.3)


def test_best_seconds_per_row_may_come_from_different_sizes() -> None:
    layer_s, _, head_s = best_part_seconds_per_row([timing(1, 1.0, 1.0), timing(2, 1.0, 4.0)])
    assert (layer_s, head_s) == pytest.approx((1.5, 3.0))


def test_send_pays_latency_and_bytes() -> None:
    link = Link(kind=LinkKind.ACROSS, latency_s=0.5, bytes_per_s=100.0)
    assert send_seconds(link, 200) == pytest.approx(2.5)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_all_stages_add_up_to_the_model(tied: bool) -> None:
    model = replace(small_model(5), tied_embeddings=tied)
    whole = Piece(first_layer=0, num_layers=5, has_embedding=True, has_head=True)
    assert stage_parameters(model, whole) == arch.total_parameters(model)
    first = Piece(first_layer=0, num_layers=2, has_embedding=True, has_head=False)
    last = Piece(first_layer=2, num_layers=3, has_embedding=False, has_head=True)
    copies = model.vocab_size * model.hidden_size if tied else 0  # the tied matrix lives on both
    split = stage_parameters(model, first) + stage_parameters(model, last)
    assert split == arch.total_parameters(model) + copies


def test_a_tied_head_holds_all_that_belongs_to_the_embedding() -> None:
    """Learned positions too: the ranks of both ends add up and update one unit."""
    keys = {"model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 257}
    model = from_config(keys)
    last = Piece(first_layer=4, num_layers=0, has_embedding=False, has_head=True)
    assert stage_parameters(model, last) == (257 + 1024) * 32 + 2 * 32


def test_bytes_of_a_7b_stage_are_what_one_counts_by_hand() -> None:
    model = ModelSpec(
        num_layers=32, hidden_size=4096, num_heads=32, ffn_size=11008, vocab_size=32000
    )
    piece = Piece(first_layer=0, num_layers=1, has_embedding=False, has_head=False)
    found = stage_bytes(model, Dtype.BF16, piece, Load(rows=1, seq_len=4096, window=1))
    states = 4 * 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    per_token = 2 * (2 * 4096 * 4 + 4096 * 2) + 5 * 4096 * 2 + 32 * 4 + 4 * 11008 * 2
    assert found == states + 4096 * per_token + 3 * 4096 * 4096 * 2


@given(
    st.integers(0, 6),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(Dtype),
)
def test_one_more_layer_adds_what_layer_bytes_says(
    num_layers: int, window: int, rows: int, head: bool, dtype: Dtype
) -> None:
    model = small_model(8)
    load = Load(rows=rows, seq_len=16, window=window, tp=1 + head, recompute=window > 3)
    sizes = [
        stage_bytes(
            model,
            dtype,
            Piece(first_layer=0, num_layers=n, has_embedding=False, has_head=head),
            load,
        )
        for n in (num_layers, num_layers + 1)
    ]
    more = layer_bytes(model, arch.layer_at(model, num_layers), dtype, load)
    assert sizes[1] - sizes[0] == more


def test_wider_windows_and_heads_take_memory() -> None:
    model = small_model(8, vocab_size=257)

    def size(window: int, head: bool, dtype: Dtype = Dtype.FP32) -> int:
        piece = Piece(first_layer=0, num_layers=2, has_embedding=False, has_head=head)
        return stage_bytes(model, dtype, piece, Load(rows=1, seq_len=16, window=window))

    assert size(1, False) < size(2, False) < size(2, True)
    assert size(1, True, Dtype.BF16) < size(1, True) < size(1, True, Dtype.FP64)


def test_sharing_layers_and_running_forwards_again_save_memory() -> None:
    piece = Piece(first_layer=0, num_layers=6, has_embedding=False, has_head=False)

    def size(*, tp: int, recompute: bool) -> int:
        load = Load(rows=2, seq_len=64, window=4, tp=tp, recompute=recompute)
        return stage_bytes(small_model(8), Dtype.FP32, piece, load)

    assert size(tp=2, recompute=True) < size(tp=2, recompute=False) < size(tp=1, recompute=False)
    assert size(tp=1, recompute=True) < size(tp=1, recompute=False)


def test_lanes_that_leave_a_host_share_its_interface_and_the_busier_end_counts() -> None:
    pipeline = [["x"], ["y"]]
    crossings = Crossings([pipeline, pipeline, [["z"], ["y"]], [["x"], ["x"]]])
    assert crossings.at_once("x", "y") == 3  # y receives from two on x and one on z
    assert crossings.at_once("x", "x") == 1
    assert Crossings([pipeline, pipeline, [["x"], ["z"]]]).at_once("x", "z") == 3
    assert Crossings([[["x", "y"], ["y"]]]).at_once("x", "y") == 1  # the lane on y stays there


def test_a_shared_link_takes_longer_for_its_bytes_not_for_its_latency() -> None:
    link = Link(kind=LinkKind.ACROSS, latency_s=0.5, bytes_per_s=10.0)
    assert send_seconds(link, 20) == 2.5
    assert send_seconds(link, 20, at_once=3) == 6.5
