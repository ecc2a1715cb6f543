"""Which ranks are measured together, what they are told, and what becomes of their figures or of why there are none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from hetrun.errors import HetrunError, HostError, JobError
from hetrun.model import CurveKind, EmulatedChip, HostFacts, LinkKind, Source
from hetrun.profile import collectives, network, num_steps
from hetrun.profile.collectives import (
    Team,
    TeamResult,
    host_memory_team,
    measure_team,
    native_team,
    read_team,
    team_requests,
)
from hetrun.profile.curves import derived_all_reduce, disagreement, p2p_curve, team_curve
from hetrun.profile.links import NeededLink, needed_links
from hetrun.profile.network import Network, measure_network
from hetrun.profile.pairs import QUICK, Effort
from hetrun.runtime.collectivebench import CollectiveRequest
from hetrun.runtime.job import decode
from tests.unit.profile_lab import device, facts, host, pair_result, team_result

CARDS = host("a", *(device(n, "nvidia", visible_id=str(n)) for n in range(3)))
OTHER = host("b", device(0, "nvidia", visible_id="0"))
PARTS = host("c", device(0, "cpu"), device(1, "cpu"))


def needed(*hosts: HostFacts) -> dict[LinkKind, NeededLink]:
    return {item.kind: item for item in needed_links(facts(*hosts))}


# --- who --------------------------------------------------------------------------------------------------


def test_vendors_library_joins_all_devices_of_a_host_and_one_of_each_of_two() -> None:
    links = needed(CARDS, OTHER)
    inside, between = (
        native_team(links[LinkKind.INSIDE_HOST]),
        native_team(links[LinkKind.INSIDE_ISLAND]),
    )
    assert inside
    assert between
    assert (inside.backend, len(inside.members), len(inside.hosts)) == ("nccl", 3, 1)
    assert [host.spec.name for host, _ in between.members] == ["a", "b"]


def test_processors_emulated_chips_and_unlike_vendors_have_no_library() -> None:
    chip = EmulatedChip(vendor="nvidia", model="m", num_devices=2, flops_per_s=1.0, memory_bytes=1)
    played = host("d", *(device(n, "nvidia", emulated=chip) for n in range(2)))
    assert native_team(needed(PARTS)[LinkKind.INSIDE_HOST]) is None
    assert native_team(needed(played)[LinkKind.INSIDE_HOST]) is None
    assert native_team(needed(OTHER, PARTS)[LinkKind.ACROSS]) is None


def test_each_host_is_told_its_own_ranks_in_the_words_of_the_vendor() -> None:
    team = native_team(needed(CARDS, OTHER)[LinkKind.INSIDE_ISLAND])
    assert team
    told = json.loads(json.dumps(team_requests(team, ("192.0.2.1", "192.0.2.2"), QUICK)))
    first, second = (decode(CollectiveRequest, told[name], where=name) for name in "ab")
    assert (first.is_server, second.is_server, first.is_alone) == (True, False, False)
    assert (first.own_addr, second.own_addr) == ("192.0.2.1", "192.0.2.2")
    assert (first.token, first.ports) == (second.token, second.ports)
    assert (first.backend, first.p2p, first.world_size) == ("nccl", True, 2)
    (seat,) = second.seats
    assert (seat.rank, seat.torch_device, seat.index) == (1, "cuda", 0)
    assert (seat.visible_env, seat.visible_id) == ("CUDA_VISIBLE_DEVICES", "0")


def test_devices_that_nothing_hides_are_numbered() -> None:
    cards = host("a", *(device(n, "nvidia") for n in range(2)))
    team = native_team(needed(cards)[LinkKind.INSIDE_HOST])
    assert team
    told = team_requests(team, ("127.0.0.1",), QUICK)["a"]
    assert [(seat["rank"], seat["index"]) for seat in told["seats"]] == [(0, 0), (1, 1)]


def test_host_memory_needs_no_device() -> None:
    told = team_requests(host_memory_team(CARDS, CARDS), ("127.0.0.1",), QUICK)["a"]
    assert (told["backend"], told["p2p"]) == ("gloo", False)
    assert told["seats"] == [{"rank": 0}, {"rank": 1}]


# --- what they answer -------------------------------------------------------------------------------------

GOOD = [{"num_bytes": n, "seconds": 1e-5 + n / 1e9} for n in (4, 1 << 20)]


def answer(**changes: Any) -> dict[str, bytes]:
    return {
        "collective.json": json.dumps(
            {"all_reduce": GOOD, "p2p": [], "why": "", **changes}
        ).encode()
    }


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"collective.json": b"["},
        answer(all_reduce=[]),
        answer(why=3),
        answer(all_reduce=[*GOOD, GOOD[0]]),
        answer(all_reduce=[{"num_bytes": 4, "seconds": -1.0}, GOOD[1]]),
    ],
)
def test_damaged_answer_is_a_job_error(files: Mapping[str, bytes]) -> None:
    team = host_memory_team(CARDS, OTHER)
    with pytest.raises(JobError, match="in a wrong way") as caught:
        read_team(team, ("1", "2"), "a", files)
    assert caught.value.host == "a"


def asked(
    monkeypatch: pytest.MonkeyPatch, team: Team, **answers: Mapping[str, bytes] | HetrunError
) -> TeamResult:
    monkeypatch.setattr(collectives, "_addresses", lambda hosts: ("192.0.2.1", "192.0.2.2"))
    monkeypatch.setattr(collectives, "on_all", lambda specs, run: answers)
    return measure_team(team, QUICK)


def test_figures_are_those_of_the_host_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = answer(all_reduce=[])
    found = asked(monkeypatch, host_memory_team(CARDS, OTHER), a=answer(), b=nothing)
    assert [point.num_bytes for point in found.all_reduce] == [4, 1 << 20]


def test_reason_of_the_host_that_has_it_wins_over_errors_and_hearsay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    team = host_memory_team(CARDS, OTHER)
    own = answer(why="its interpreter has no torch")
    found = asked(monkeypatch, team, a=answer(why="the other host: no torch"), b=own)
    assert found.why == "b: its interpreter has no torch"
    found = asked(monkeypatch, team, a=JobError("rank 1 did not come", host="a"), b=own)
    assert found.why == "b: its interpreter has no torch"


def test_failure_is_an_error_in_host_memory_and_a_reason_in_a_vendors_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead: dict[str, Mapping[str, bytes] | HetrunError] = {
        "a": answer(p2p=GOOD),
        "b": JobError("rank 1 was killed by signal 9", host="b"),
    }
    with pytest.raises(JobError, match=r"between a \(192.0.2.1\) and b .*killed by signal 9"):
        asked(monkeypatch, host_memory_team(CARDS, OTHER), **dead)
    team = native_team(needed(CARDS, OTHER)[LinkKind.INSIDE_ISLAND])
    assert team
    assert asked(monkeypatch, team, **dead).why == "b: rank 1 was killed by signal 9"
    with pytest.raises(HostError, match="gone"):
        asked(monkeypatch, team, a=answer(p2p=GOOD), b=HostError("gone", host="b"))


# --- what becomes of it -----------------------------------------------------------------------------------


def surveyed(
    monkeypatch: pytest.MonkeyPatch,
    *hosts: HostFacts,
    team: Callable[[Team, Effort], TeamResult] = team_result,
) -> Network:
    monkeypatch.setattr(
        network, "measure_pair", lambda a, b, effort: pair_result(a.spec.name, b.spec.name)
    )
    monkeypatch.setattr(network, "measure_team", team)
    return measure_network(facts(*hosts), quick=True)


def test_accelerators_in_a_box_are_measured_by_their_own_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = surveyed(monkeypatch, CARDS)
    (link,) = found.links
    assert link.source is Source.MEASURED
    assert link.bytes_per_s == pytest.approx(2e10)
    assert [(curve.kind, curve.backend, curve.num_ranks) for curve in found.curves] == [
        (CurveKind.P2P, "nccl", 3),
        (CurveKind.ALL_REDUCE, "nccl", 3),
        (CurveKind.ALL_REDUCE, "gloo", 2),
    ]
    assert found.warnings == ()
    assert num_steps(facts(CARDS)) == 1  # its links are between ends of one name


def test_box_whose_library_cannot_be_used_is_measured_through_host_memory_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def team(wanted: Team, effort: Effort) -> TeamResult:
        return team_result(wanted, why="a: no plug-in" if wanted.is_native else "")

    found = surveyed(monkeypatch, CARDS, team=team)
    (link,) = found.links
    assert link.source is Source.MEASURED
    assert link.bytes_per_s == pytest.approx(1e9)
    assert [curve.backend for curve in found.curves] == [None, "gloo"]
    assert found.warnings[0] == (
        "link inside host, nvidia to nvidia: nccl was not measured, figures are of the way through"
        " host memory: a: no plug-in"
    )


def test_island_keeps_the_streams_figures_and_both_all_reduces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = surveyed(monkeypatch, OTHER, replace(CARDS, devices=CARDS.devices[:1]))
    assert found.links[0].bytes_per_s == pytest.approx(1e9)
    assert [(curve.kind, curve.backend) for curve in found.curves] == [
        (CurveKind.P2P, None),
        (CurveKind.ALL_REDUCE, "nccl"),
        (CurveKind.ALL_REDUCE, "gloo"),
    ]


def test_all_reduce_is_derived_only_where_ranks_cannot_meet_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = surveyed(
        monkeypatch, PARTS, team=lambda team, effort: team_result(team, why="c: no torch")
    )
    p2p, reduced = found.curves
    assert (p2p.source, reduced.source) == (Source.MEASURED, Source.MODELLED)
    assert reduced.why.endswith("2 hops of 1/2 of the bytes: c: no torch")
    assert reduced.points[-1].seconds == pytest.approx(2 * (1e-5 + (1 << 25) / 1e9))
    assert found.warnings == (
        "link inside host, cpu to cpu: its all-reduce is derived, not measured: c: no torch",
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_derived_all_reduce_is_a_ring(num_ranks: int) -> None:
    link = needed(PARTS)[LinkKind.INSIDE_HOST]
    found = derived_all_reduce(p2p_curve(link, pair_result("c")), num_ranks=num_ranks, why="")
    for point in found.points:
        ring_s = 2 * (num_ranks - 1) * (1e-5 + point.num_bytes / num_ranks / 1e9)
        assert point.seconds == pytest.approx(ring_s, rel=1e-3)
        fitted_s = found.latency_s + point.num_bytes / found.bytes_per_s
        assert fitted_s == pytest.approx(ring_s, rel=1e-3)


def test_measured_and_derived_are_told_where_they_are_far_apart() -> None:
    link = needed(PARTS)[LinkKind.INSIDE_HOST]
    p2p = p2p_curve(link, pair_result("c"))
    like = team_result(host_memory_team(PARTS, PARTS))
    reduced = team_curve(link, like, CurveKind.ALL_REDUCE)
    assert disagreement(link, reduced, p2p) == [
        "link inside host, cpu to cpu: an all-reduce of 67.1 MB with gloo takes 33.6 ms, from single"
        " messages it would be 67.1 ms"
    ]
    near = replace(reduced, points=(replace(reduced.points[-1], seconds=0.05),))
    assert disagreement(link, near, p2p) == []
