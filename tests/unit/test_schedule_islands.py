"""Whatever the vendors of the ranks: each part of the whole crosses between vendors once, from one rank of each."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hetrun.schedule.islands import two_levels

VENDORS = st.lists(st.sampled_from(["red", "green", "blue"]), min_size=1, max_size=12)


def test_islands_of_three_and_two_share_what_crosses_as_evenly_as_they_can() -> None:
    levels = two_levels([7, 2, 3, 4, 5], {2: "a", 3: "b", 4: "a", 5: "b", 7: "a"})
    assert levels is not None
    assert levels.islands == ((2, 4, 7), (3, 5))
    assert levels.of == 6
    found = [(item.ranks, item.start, item.end) for item in levels.exchanges]
    assert found == [((2, 3), 0, 2), ((3, 4), 2, 3), ((4, 5), 3, 4), ((5, 7), 4, 6)]


@given(vendors=VENDORS)
def test_each_part_crosses_once_between_those_that_have_it(vendors: list[str]) -> None:
    of_rank = dict(enumerate(vendors, start=3))
    levels = two_levels(list(of_rank), of_rank)
    sizes = Counter(vendors)
    if len(sizes) == 1 or len(sizes) == len(vendors):
        assert levels is None
        return
    assert levels is not None
    assert sorted(rank for island in levels.islands for rank in island) == sorted(of_rank)
    parts = [part for item in levels.exchanges for part in range(item.start, item.end)]
    assert parts == list(range(levels.of))
    for island in levels.islands:
        (vendor,) = {of_rank[rank] for rank in island}
        assert len(island) == sizes[vendor]
        share = levels.of // len(island)
        for item in levels.exchanges:
            (own,) = set(item.ranks) & set(island)
            place = island.index(own)
            assert place * share <= item.start < item.end <= (place + 1) * share
