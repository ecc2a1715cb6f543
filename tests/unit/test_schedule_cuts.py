"""Real cuts: every layer once, on stages that hold it, and shares that match the speeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun.schedule.cuts import even_boundaries, held_layers, layers_at

NUM_LAYERS = 24


@given(st.lists(st.floats(0.5, 3), min_size=1, max_size=6), st.integers(0, 200))
def test_every_microbatch_runs_each_layer_once_and_on_stages_that_hold_it(
    speeds: list[float], microbatch: int
) -> None:
    cuts = even_boundaries(NUM_LAYERS, speeds)
    layers = layers_at(cuts, NUM_LAYERS, microbatch)
    assert sum(layers) == NUM_LAYERS
    begin = 0
    for count, (first, end) in zip(layers, held_layers(cuts, NUM_LAYERS), strict=True):
        assert count == 0 or first <= begin <= begin + count <= end
        begin += count


def test_average_share_of_a_stage_matches_its_speed() -> None:
    cuts = even_boundaries(NUM_LAYERS, (2.0, 1.2))
    average = sum(layers_at(cuts, NUM_LAYERS, i)[0] for i in range(1000)) / 1000
    assert average == pytest.approx(NUM_LAYERS * 2 / 3.2, abs=0.01)


def test_an_end_that_does_more_than_its_share_is_refused() -> None:
    with pytest.raises(ValueError, match="not in order"):
        even_boundaries(2, (1.0, 1.0), first_extra=9.0)
