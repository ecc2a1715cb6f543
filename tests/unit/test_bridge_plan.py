"""Islands, plan and who sends what: pure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun.bridge.failure import (
    BridgeError,
    MismatchError,
    pack_failure,
    unpack_failure,
)
from hetrun.bridge.plan import (
    Layout,
    chunks,
    group_id,
    link_bound,
    make_layout,
    make_plan,
    overlap,
    read_plan,
    shares,
    slices,
)
from hetrun.bridge.topology import Card, Settings, card_from, read_settings
from hetrun.errors import ConfigError


def card(rank: int, island: str, *, backend: str = "gloo", torch: str = "2.13") -> Card:
    return Card(
        rank=rank,
        island=island,
        backend=backend,
        torch=torch,
        addrs=("127.0.0.1",),
        ports=(4000 + rank,),
    )


def cards(islands: str) -> list[Card]:
    return [card(rank, name) for rank, name in enumerate(islands)]


def test_islands_come_in_the_order_of_their_lowest_rank_also_when_interleaved() -> None:
    assert make_plan(cards("baba")).islands == ((0, 2), (1, 3))


def test_order_of_arrival_changes_nothing() -> None:
    assert make_plan(cards("aab")[::-1]) == make_plan(cards("aab"))


@pytest.mark.parametrize("ranks", [[0, 2], [0, 0, 1]])
def test_missing_or_doubled_rank_is_refused(ranks: list[int]) -> None:
    with pytest.raises(ConfigError, match="need each once"):
        make_plan([card(rank, "a") for rank in ranks])


def test_two_libraries_on_one_island_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="rank 1 has mpi"):
        make_plan([card(0, "a"), card(1, "a", backend="mpi")])


def test_two_versions_of_torch_on_one_island_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch 2\.4"):
        make_plan([card(0, "a"), card(1, "a", torch="2.4")])


def test_plan_survives_its_bytes() -> None:
    plan = make_plan(cards("aabba"))
    assert read_plan(plan.to_bytes()) == plan
    assert plan.digest() != make_plan(cards("aabbb")).digest()


@pytest.mark.parametrize(
    "change", [{"chunk_bytes": 1}, {"islands": [[0], [1]]}, {"version": 2}, {"more": 1}]
)
def test_plan_that_this_rank_would_not_make_is_refused(change: dict[str, object]) -> None:
    data = json.loads(make_plan(cards("aa")).to_bytes()) | change
    with pytest.raises(ConfigError, match="differently"):
        read_plan(json.dumps(data, sort_keys=True).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b'{"cards": 3}', b'{"cards": [{}]}', b"\xff"])
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        read_plan(data)


@pytest.mark.parametrize(
    "change",
    [{"addrs": ["host"]}, {"ports": []}, {"ports": ["1"]}, {"rank": "0"}, {"island": ""}],
)
def test_wrong_card_is_refused(change: dict[str, object]) -> None:
    data = json.loads(card(0, "a").to_json()) | change
    with pytest.raises(ConfigError):
        card_from(data)


def settings_file(folder: Path, *, mode: int = 0o600, secret: str = "ab" * 32) -> Path:
    path = folder / "bridge.json"
    data = {"island": "a", "backend": "gloo", "addrs": ["127.0.0.1"], "secret": secret}
    path.write_text(json.dumps(data))
    path.chmod(mode)
    return path


def test_settings_come_from_the_file_and_never_show_the_secret(tmp_path: Path) -> None:
    settings = read_settings({"HETRUN_BRIDGE": str(settings_file(tmp_path))})
    assert settings.secret == bytes.fromhex("ab" * 32)
    assert "ab" * 32 not in repr(settings)
    assert repr(settings.secret) not in repr(settings)


def test_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="open to others"):
        read_settings({"HETRUN_BRIDGE": str(settings_file(tmp_path, mode=0o640))})


def test_wrong_secret_is_not_shown(tmp_path: Path) -> None:
    path = settings_file(tmp_path, secret="zz" * 32)
    with pytest.raises(ConfigError, match="not hexadecimal") as caught:
        read_settings({"HETRUN_BRIDGE": str(path)})
    assert "zz" not in str(caught.value)


def test_short_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="shorter"):
        Settings(island="a", backend="gloo", addrs=("127.0.0.1",), secret=b"x")


def test_layout_numbers_members_inside_the_group() -> None:
    layout = make_layout(make_plan(cards("abab")), [3, 2, 0], 2)
    assert layout == Layout(ranks=(3, 2, 0), me=1, islands=((2, 1), (0,)), whole=(True, False))
    assert (layout.home, layout.place, layout.leaders) == (0, 1, (2, 0))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_news_reach_all_members_in_three_hops(islands: list[str]) -> None:
    plan = make_plan(cards("".join(islands)))
    ranks = range(len(islands))
    next_to = {rank: make_layout(plan, ranks, rank).neighbours() for rank in ranks}
    for start in ranks:
        reached = {start}
        for _ in range(3):
            reached |= {far for near in reached for far in next_to[near]}
        assert reached == set(ranks)


@given(st.integers(0, 5000), st.integers(1, 700), st.integers(1, 7))
def test_chunks_cover_all_once_and_begin_at_units(count: int, most: int, unit: int) -> None:
    ranges = chunks(count, most, unit=unit)
    assert [at for start, end in ranges for at in range(start, end)] == list(range(count))
    assert all(start % unit == 0 and start < end < start + most + 2 * unit for start, end in ranges)


@given(st.integers(0, 300), st.integers(1, 9))
def test_slices_cover_all_once_at_multiples_of_one_length(count: int, parts: int) -> None:
    ranges = slices(count, parts)
    assert [at for start, end in ranges for at in range(start, end)] == list(range(count))
    length = ranges[0][1]
    assert all(start in (part * length, count) for part, (start, _) in enumerate(ranges))
    assert shares(count, parts)[-1][1] == count


def test_overlap_of_apart_ranges_is_empty() -> None:
    assert overlap((0, 5), (3, 9)) == (3, 5)
    start, end = overlap((0, 2), (5, 9))
    assert start == end


def test_groups_of_the_same_name_and_other_ranks_have_another_number() -> None:
    assert group_id("1", [0, 1]) == group_id("1", (0, 1)) != group_id("1", [1, 0])


def test_bounds_are_those_of_the_formula() -> None:
    assert link_bound("all_reduce", 100, (2, 2), island=0) == (100, 100)
    assert link_bound("all_reduce", 90, (2, 1, 2), island=1) == (120, 120)
    assert link_bound("all_gather", 100, (3, 1), island=0) == (75, 25)
    assert link_bound("reduce_scatter", 100, (3, 1), island=0) == (25, 75)


def test_failure_keeps_its_name_on_the_way() -> None:
    error = unpack_failure(pack_failure(MismatchError("rank 1: 5, rank 2: 6")), sender=1)
    assert type(error) is MismatchError
    assert str(error) == "rank 1: 5, rank 2: 6"


@pytest.mark.parametrize("data", [b"", b"{}", b'{"kind": "SystemExit", "message": "x"}', b"\xff"])
def test_failure_that_makes_no_sense_is_one_still(data: bytes) -> None:
    error = unpack_failure(data, sender=3)
    assert type(error) is BridgeError
    assert "rank 3" in str(error)
