"""Which links matter, which hosts stand for them, what is assumed, and what is said of odd pairs."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from hetrun.errors import HetrunError, HostError, JobError, PreflightError
from hetrun.model import (
    Connection,
    Facts,
    HostFacts,
    HostSpec,
    Link,
    LinkKind,
    Nic,
    Source,
)
from hetrun.profile import curves, network, num_steps
from hetrun.profile.links import NeededLink, assumed_link, data_nic, declared_link, needed_links
from hetrun.profile.network import assumed_network, compare, measure_network
from hetrun.profile.pairs import (
    FULL,
    GLANCE,
    QUICK,
    Effort,
    PairResult,
    check_answers,
    data_address,
    link_request,
    read_link,
)
from tests.unit.profile_lab import TWO, device, facts, host, pair_result, team_result


@pytest.fixture(autouse=True)
def teams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks would measure; the tests of that stand in test_profile_collectives.py."""
    monkeypatch.setattr(network, "measure_team", team_result)


def nic(name: str, address: str, speed_mbps: int | None, *, up: bool = True) -> Nic:
    return Nic(name=name, addresses=(address,), speed_mbps=speed_mbps, up=up)


def needed(*hosts: HostFacts) -> dict[LinkKind, NeededLink]:
    return {item.kind: item for item in needed_links(facts(*hosts))}


def names(item: NeededLink) -> list[tuple[str, str]]:
    return [(a.spec.name, b.spec.name) for a, b in item.pairs()]


# --- which ------------------------------------------------------------------------------------------------


def test_declared_links_win_and_the_closer_match_first() -> None:
    wide = Link(kind=LinkKind.ACROSS, latency_s=1.0, bytes_per_s=1.0, source=Source.MODELLED)
    close = replace(wide, bytes_per_s=2.0, a="nvidia", b="amd")
    declared = replace(TWO, links=(wide, close))
    found = measure_network(declared, quick=False)
    assert found.links == (replace(close, a="amd", b="nvidia"),)
    assert not found.curves
    assert num_steps(declared) == 2


def test_only_links_that_a_plan_can_use_are_there() -> None:
    assert not needed(host("a1", device(0, "cpu")))
    pair = host("a1", device(0, "cpu"), device(1, "cpu"))
    assert [link.kind for link in needed_links(facts(pair))] == [LinkKind.INSIDE_HOST]
    more = needed_links(facts(pair, host("a2", device(0, "amd"))))
    assert [(link.kind, link.a, link.b) for link in more] == [
        (LinkKind.INSIDE_HOST, "cpu", "cpu"),
        (LinkKind.ACROSS, "amd", "cpu"),
    ]
    assert declared_link(TWO, next(iter(needed_links(TWO)))) is None


def test_island_is_measured_from_each_host_to_the_next() -> None:
    found = needed(*(host(f"a{number}", device(0, "amd")) for number in range(4)))
    assert names(found[LinkKind.INSIDE_ISLAND]) == [("a0", "a1"), ("a1", "a2"), ("a2", "a3")]
    many = needed(*(host(f"a{number}", device(0, "amd")) for number in range(40)))
    assert len(names(many[LinkKind.INSIDE_ISLAND])) == 8


def test_islands_meet_in_every_host_of_the_larger() -> None:
    hosts = [host(f"a{number}", device(0, "amd")) for number in range(3)]
    found = needed(*hosts, host("b0", device(0, "nvidia")))
    assert names(found[LinkKind.ACROSS]) == [("a0", "b0"), ("a1", "b0"), ("a2", "b0")]


def test_vendors_of_one_host_meet_in_it_only_where_there_is_no_other() -> None:
    mixed = [host(name, device(0, "amd"), device(1, "nvidia")) for name in ("a", "b")]
    assert names(needed(*mixed)[LinkKind.ACROSS]) == [("a", "b")]
    assert names(needed(mixed[0])[LinkKind.ACROSS]) == [("a", "a")]


# --- assumed ----------------------------------------------------------------------------------------------


def test_slowest_interface_on_the_way_is_the_links_speed() -> None:
    fast = host("a1", device(0, "amd"), nics=(nic("eth0", "192.0.2.1", 100_000),))
    slow = host("a2", device(0, "amd"), nics=(nic("eth0", "192.0.2.2", 25_000),))
    link = assumed_link(needed(fast, slow)[LinkKind.INSIDE_ISLAND])
    assert (link.bytes_per_s, link.source) == (25e9 / 8, Source.SPEC)


def test_unknown_speed_is_assumed_and_said() -> None:
    fast = host("a1", device(0, "amd"), nics=(nic("eth0", "192.0.2.1", 100_000),))
    dark = host("a2", device(0, "amd"), nics=(nic("eth0", "192.0.2.2", None),))
    found = assumed_network(facts(fast, dark))
    (link,) = found.links
    assert (link.bytes_per_s, link.source) == (1.25e9, Source.ASSUMED)
    assert found.warnings == (
        "link inside island, amd to amd was not measured: 1.25 GB/s after 50 us, assumed",
    )


def test_hosts_on_this_machine_meet_over_loopback() -> None:
    here = [
        host(name, device(0, "cpu"), spec=HostSpec(name=name, connection=Connection.LOCAL))
        for name in ("a", "b")
    ]
    link = assumed_link(needed(*here)[LinkKind.INSIDE_ISLAND])
    assert (link.bytes_per_s, link.source) == (2e9, Source.ASSUMED)


def test_accelerators_in_a_box_are_assumed_closer_than_processes() -> None:
    cards = needed(host("a", device(0, "amd"), device(1, "amd")))[LinkKind.INSIDE_HOST]
    parts = needed(host("a", device(0, "cpu"), device(1, "cpu")))[LinkKind.INSIDE_HOST]
    assert assumed_link(cards).bytes_per_s > assumed_link(parts).bytes_per_s
    found = assumed_network(facts(host("a", device(0, "amd"), device(1, "amd"))))
    assert found.links[0].source is Source.ASSUMED
    assert "inside host, amd to amd was not measured" in found.warnings[0]


def test_training_interface_is_the_named_one_then_the_addressed_one_then_the_fastest() -> None:
    nics = (
        nic("lo", "127.0.0.1", None),
        nic("eth0", "192.0.2.1", 1_000),
        nic("eth1", "192.0.2.2", 25_000),
        nic("eth2", "192.0.2.3", 100_000, up=False),
    )

    def chosen(**keys: Any) -> str | None:
        found = data_nic(HostFacts(spec=HostSpec(name="a", **keys), nics=nics))
        return found.name if found else None

    assert chosen(nic="eth0", data_addr="192.0.2.2") == "eth0"
    assert chosen(data_addr="192.0.2.1") == "eth0"
    assert chosen(addr="192.0.2.1") == "eth0"
    assert chosen() == "eth1"
    assert data_nic(HostFacts(spec=HostSpec(name="a"))) is None


# --- measured ---------------------------------------------------------------------------------------------


def test_first_pair_is_measured_in_full_and_the_others_at_a_glance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    efforts: list[Effort] = []

    def measure(a: HostFacts, b: HostFacts, effort: Effort) -> PairResult:
        efforts.append(effort)
        return pair_result(a.spec.name, b.spec.name)

    monkeypatch.setattr(network, "measure_pair", measure)
    hosts = facts(*(host(f"a{number}", device(0, "amd")) for number in range(3)))
    measure_network(hosts, quick=False)
    assert efforts == [FULL, GLANCE]
    efforts.clear()
    measure_network(hosts, quick=True)
    assert efforts == [QUICK]


def test_pair_that_serves_two_links_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(a: HostFacts, b: HostFacts, effort: Effort) -> PairResult:
        measured.append(f"{a.spec.name} {b.spec.name}")
        return pair_result(a.spec.name, b.spec.name)

    monkeypatch.setattr(network, "measure_pair", measure)
    mixed = [host(name, device(0, "amd"), device(1, "nvidia")) for name in ("a", "b")]
    assert len(measure_network(facts(*mixed), quick=False).links) == 3
    assert measured == ["a b"]


def test_pairs_and_directions_that_differ_are_named() -> None:
    across = next(iter(needed_links(TWO)))
    like = [pair_result("a", "b"), pair_result("c", "d", factor=1.2)]
    assert compare(across, like) == []
    slow = pair_result("c", "d", factor=2.0)
    fast = pair_result("e", "f", factor=0.5)
    lame = pair_result("g", "h", asymmetry=3.0)
    assert compare(across, [like[0], slow, fast, lame]) == [
        "link across, amd to nvidia: c - d is 2.00 times as slow as a - b, whose figures count",
        "link across, amd to nvidia: e - f is 2.00 times as fast as a - b, whose figures count",
        "g - h: what g sends takes 3.00 times as long as what it gets",
    ]


def test_no_message_is_quicker_than_one_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limiter's bucket lets small messages through, so that the fit alone would say no latency at all."""

    def measure(a: HostFacts, b: HostFacts, effort: Effort) -> PairResult:
        found = pair_result(a.spec.name, b.spec.name)
        slow = [replace(p, seconds=max(4e-5, (p.num_bytes - 65536) / 25e6)) for p in found.points]
        return replace(found, points=tuple(slow))

    monkeypatch.setattr(network, "measure_pair", measure)
    found = measure_network(TWO, quick=False)
    assert found.links[0].latency_s == found.curves[0].latency_s == 4e-5
    assert found.links[0].bytes_per_s == pytest.approx(25e6, rel=0.1)


def test_no_bandwidth_is_an_error_not_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(a: HostFacts, b: HostFacts, effort: Effort) -> PairResult:
        found = pair_result(a.spec.name, b.spec.name)
        return replace(found, points=found.points[:1])

    monkeypatch.setattr(network, "measure_pair", measure)
    only = replace(TWO, links=())
    monkeypatch.setattr(curves, "fit_line", _refuse)
    with pytest.raises(JobError, match="link between a2 and a1: no bandwidth"):
        measure_network(only, quick=False)


def _refuse(points: object) -> None:
    raise ValueError("no line")


def test_both_ends_get_random_ports_and_a_token_of_their_own() -> None:
    one, other = (link_request(("192.0.2.1", "192.0.2.2"), FULL) for _ in range(2))
    assert (one["server_addr"], one["client_addr"]) == ("192.0.2.1", "192.0.2.2")
    assert one["token"] != other["token"]
    assert one["ports"] != other["ports"]
    assert (one["sizes"][0], one["sizes"][-1]) == (1 << 10, 64 << 20)


def test_failed_measurement_names_both_ends_and_the_next_thing_to_do() -> None:
    ends = {"a": JobError("no client came", host="a"), "b": JobError("no way", host="b")}
    with pytest.raises(JobError) as caught:
        check_answers(("a", "b"), ("192.0.2.1", "192.0.2.2"), ends)
    assert str(caught.value) == (
        "link between a (192.0.2.1) and b (192.0.2.2): a: no client came; b: no way"
    )
    assert "firewall" in (caught.value.hint or "")
    gone: Mapping[str, Mapping[str, bytes] | HetrunError] = {
        "a": {"link.json": b""},
        "b": HostError("gone", host="b", hint="try: ssh b"),
    }
    with pytest.raises(HostError, match="b: gone") as away:
        check_answers(("a", "b"), ("192.0.2.1", "192.0.2.2"), gone)
    assert away.value.hint == "try: ssh b"
    check_answers(("a", "b"), ("192.0.2.1", "192.0.2.2"), {"a": {}, "b": {}})


def answer(*timings: tuple[int, float, float]) -> dict[str, bytes]:
    items = [f'{{"num_bytes": {n}, "to_s": {to}, "from_s": {back}}}' for n, to, back in timings]
    return {"link.json": f'{{"round_trip_s": 2e-5, "timings": [{",".join(items)}]}}'.encode()}


def test_slower_direction_counts() -> None:
    result = read_link(("a", "b"), ("1", "2"), answer((1024, 0.1, 0.2), (4096, 0.3, 0.9)))
    assert [(p.num_bytes, p.seconds) for p in result.points] == [
        (1, 1e-5),
        (1024, 0.2),
        (4096, 0.9),
    ]
    assert result.asymmetry == pytest.approx(3.0)
    assert result.slower_from == "a"
    back = read_link(("a", "b"), ("1", "2"), answer((4096, 0.9, 0.3)))
    assert (back.points[-1].seconds, back.slower_from) == (0.9, "b")


@pytest.mark.parametrize(
    "files", [{}, {"link.json": b"{"}, answer(), answer((4096, 1.0, 0.0)), answer((0, 1.0, 1.0))]
)
def test_damaged_answer_is_a_job_error(files: dict[str, bytes]) -> None:
    with pytest.raises(JobError, match="in a wrong way") as caught:
        read_link(("a", "b"), ("1", "2"), files)
    assert caught.value.host == "b"


# --- addresses --------------------------------------------------------------------------------------------


def at(name: str = "a", *, nics: tuple[Nic, ...] = (), **keys: Any) -> HostFacts:
    return HostFacts(spec=HostSpec(name=name, **keys), nics=nics)


def test_address_is_the_declared_one_then_the_interfaces_then_that_of_ssh() -> None:
    nics = (Nic(name="eth1", addresses=("2001:db8::1", "192.0.2.7")),)
    peer = at("b", addr="192.0.2.2")
    assert data_address(at(data_addr="192.0.2.9", nic="eth1", nics=nics), peer) == "192.0.2.9"
    assert data_address(at(nic="eth1", nics=nics), peer) == "192.0.2.7"
    assert data_address(at(data_addr="data.a"), peer, lookup=lambda _: "192.0.2.5") == "192.0.2.5"
    assert data_address(peer, at()) == "192.0.2.2"
    with pytest.raises(PreflightError, match="interface eth9 had no address"):
        data_address(at(nic="eth9", nics=nics), peer)


def test_name_that_does_not_resolve_is_told() -> None:
    def lookup(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(PreflightError, match=r"'data\.a' does not resolve") as caught:
        data_address(at(data_addr="data.a"), at("b"), lookup=lookup)
    assert caught.value.host == "a"


def test_this_machine_needs_an_address_to_meet_another() -> None:
    here = at(connection=Connection.LOCAL)
    assert data_address(here, at("b", connection=Connection.LOCAL)) == "127.0.0.1"
    with pytest.raises(PreflightError, match="need an address") as caught:
        data_address(here, at("b"))
    assert "data_addr" in (caught.value.hint or "")


def test_silent_hosts_have_no_links() -> None:
    silent = HostFacts(spec=HostSpec(name="a2"), error="gone")
    assert (
        measure_network(Facts(created="", inventory="", hosts=(silent,)), quick=False).links == ()
    )
