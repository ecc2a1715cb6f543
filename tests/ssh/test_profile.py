"""Profile over real sshds: links with a known limit, strangers, cables that are out; nothing is left running."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from hetrun.errors import HetrunError, JobError
from hetrun.model import CurveKind, Facts, HostFacts, Inventory, LinkKind, Source
from hetrun.probe import probe
from hetrun.profile import collectives, pairs
from hetrun.profile.collectives import host_memory_team, measure_team
from hetrun.profile.network import Network, measure_network
from hetrun.profile.pairs import GLANCE, QUICK, link_request, measure_pair
from hetrun.transport.fanout import on_all
from hetrun.transport.jobs import run_module
from tests.ssh.lab import GATEWAY, LabHost, call

pytestmark = pytest.mark.ssh
Hosts = tuple[LabHost, LabHost, LabHost]

RATE_BITS_PER_S = 200e6
# What TCP can carry of it: 1448 bytes of each frame of 1514, which is what tbf counts.
GOODPUT_BYTES_PER_S = RATE_BITS_PER_S / 8 * 1448 / 1514


@contextmanager
def limited(host: LabHost) -> Iterator[None]:
    """Limit what a host sends."""
    nsenter = ("nsenter", "-t", str(host.init_pid), "-n", "--")
    limit = ("tbf", "rate", f"{RATE_BITS_PER_S:.0f}bit", "burst", "64kb", "latency", "200ms")
    call(*nsenter, "tc", "qdisc", "add", "dev", "eth0", "root", *limit)
    try:
        yield
    finally:
        call(*nsenter, "tc", "qdisc", "del", "dev", "eth0", "root")


def probed(*hosts: LabHost) -> Facts:
    return probe(Inventory(name="lab", hosts=tuple(host.spec() for host in hosts)))


def plain(host: LabHost) -> HostFacts:
    return HostFacts(spec=host.spec())


def measured(facts: Facts) -> Network:
    heard: list[tuple[str, str]] = []
    found = measure_network(facts, quick=False, progress=lambda *said: heard.append(said))
    assert [who for who, _ in heard] == ["h1 - h2"]
    return found


@pytest.mark.slow
def test_bandwidth_of_a_limited_cable_is_found_within_ten_percent(hosts: Hosts) -> None:
    facts = probed(*hosts[:2])
    with limited(hosts[0]):
        found = measured(facts)
    link = next(link for link in found.links if link.kind is LinkKind.INSIDE_ISLAND)
    assert link.source is Source.MEASURED
    assert link.bytes_per_s == pytest.approx(GOODPUT_BYTES_PER_S, rel=0.10)
    assert 1e-6 < link.latency_s < 2e-3
    p2p, all_reduce = found.curves
    assert (p2p.kind, p2p.hosts, p2p.addresses) == (
        CurveKind.P2P,
        ("h1", "h2"),
        ("10.77.0.1", "10.77.0.2"),
    )
    assert p2p.points[0].num_bytes == 1
    assert (all_reduce.kind, all_reduce.source) == (CurveKind.ALL_REDUCE, Source.MEASURED)
    assert (all_reduce.backend, all_reduce.num_ranks) == ("gloo", 2)
    assert all_reduce.hosts == ("h1", "h2")
    largest = all_reduce.points[-1]
    # h1 sends half of the bytes to add them up there, and half to spread the sums
    assert largest.num_bytes >= 4 << 20
    assert largest.seconds == pytest.approx(largest.num_bytes / GOODPUT_BYTES_PER_S, rel=0.10)
    assert all_reduce.bytes_per_s == pytest.approx(GOODPUT_BYTES_PER_S, rel=0.10)
    (said,) = found.warnings  # only what h1 sends is limited; nothing odd about the all-reduce
    assert said.startswith("h1 - h2: what h1 sends takes")


def test_host_is_measured_with_itself_and_nothing_is_left(hosts: Hosts) -> None:
    found = measure_pair(plain(hosts[0]), plain(hosts[0]), QUICK)
    assert (found.hosts, found.addresses) == (("h1",), ("127.0.0.1",))
    assert found.bytes_per_s > 100e6
    assert 0 < found.points[0].seconds < 5e-3
    hosts[0].wait_empty(5.0)


def test_closed_way_is_an_error_that_names_both_ends(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SSH gets through, training traffic does not: the data address of one belongs to another host."""
    monkeypatch.setattr(pairs, "_CONNECT_S", 2.0)
    stray = HostFacts(spec=hosts[0].spec(data_addr=hosts[2].addr))
    with pytest.raises(HetrunError) as caught:
        measure_pair(stray, plain(hosts[1]), QUICK)
    assert f"link between h1 ({hosts[2].addr}) and h2 ({hosts[1].addr})" in str(caught.value)
    assert f"cannot listen on {hosts[2].addr}" in str(caught.value)
    assert "data_addr" in (caught.value.hint or "")
    for host in hosts[:2]:
        host.wait_empty(5.0)


def test_ranks_that_add_up_leave_nothing_and_a_dead_way_ends_them_in_bounded_time(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "_CONNECT_S", 3.0)
    monkeypatch.setattr(collectives, "_START_S", 20.0)
    team = host_memory_team(plain(hosts[0]), plain(hosts[1]))
    found = measure_team(team, GLANCE)
    assert [point.num_bytes for point in found.all_reduce] == [4, *GLANCE.sizes]
    for host in hosts[:2]:
        host.wait_empty(5.0)
    long = replace(GLANCE, min_repeats=100_000, max_repeats=100_000)
    cut = threading.Timer(
        8.0, hosts[0].inside, ("ip", "route", "add", "blackhole", f"{hosts[1].addr}/32")
    )
    started_s = time.monotonic()
    cut.start()
    try:
        with pytest.raises(JobError, match=r"link between h1 .* and h2 "):
            measure_team(team, long)
        assert time.monotonic() - started_s < 45
    finally:
        cut.join()
        hosts[0].inside("ip", "route", "del", "blackhole", f"{hosts[1].addr}/32")


def test_packets_that_vanish_end_in_an_error_in_bounded_time(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the way between the two is dead; both still answer to SSH."""
    monkeypatch.setattr(pairs, "_CONNECT_S", 3.0)
    hosts[0].inside("ip", "route", "add", "blackhole", f"{hosts[1].addr}/32")
    try:
        started_s = time.monotonic()
        with pytest.raises(JobError, match=r"link between h1 .* and h2 ") as caught:
            measure_pair(plain(hosts[0]), plain(hosts[1]), QUICK)
        assert time.monotonic() - started_s < 10
        assert "no client came" in str(caught.value)
        assert "no way to 10.77.0.1" in str(caught.value)
    finally:
        hosts[0].inside("ip", "route", "del", "blackhole", f"{hosts[1].addr}/32")


def test_stranger_is_neither_measured_nor_in_the_way(hosts: Hosts) -> None:
    """Somebody without the token calls first, echoes all it hears, and gets nothing."""
    server, client = plain(hosts[0]), plain(hosts[1])
    request = link_request((server.spec.addr or "", client.spec.addr or ""), GLANCE)
    heard: list[bytes] = []
    stranger = threading.Thread(target=_echo, args=(server.spec.addr, request["ports"], heard))
    stranger.start()
    files = {
        host.spec.name: {"link.json": json.dumps({**request, "role": role}).encode()}
        for host, role in ((server, "server"), (client, "client"))
    }
    client_waits = threading.Event()

    def run(transport: object) -> object:
        if transport.spec.name == "h2":  # type: ignore[attr-defined]
            client_waits.wait(10)
        return run_module(
            transport,  # type: ignore[arg-type]
            pairs.LINK_MODULE,
            files[transport.spec.name],  # type: ignore[attr-defined]
            timeout_s=60,
        )

    threading.Timer(3.0, client_waits.set).start()
    answers = on_all([server.spec, client.spec], run)
    stranger.join(20)
    assert heard, "the stranger never got through to the server"
    assert request["token"].encode() not in b"".join(heard)
    assert len(b"".join(heard)) == 64  # a nonce and a signature
    answer = answers["h2"]
    assert not isinstance(answer, HetrunError), answer
    assert json.loads(answer["link.json"])["timings"]  # type: ignore[index]


def _echo(addr: str, ports: list[int], heard: list[bytes]) -> None:
    deadline_s = time.monotonic() + 15
    while time.monotonic() < deadline_s and not heard:
        for port in ports:
            try:
                with socket.create_connection((addr, port), timeout=5) as stream:
                    while data := stream.recv(4096):
                        heard.append(data)
                        stream.sendall(data)
            except OSError:
                continue
        time.sleep(0.02)


def test_wrong_token_is_never_measured(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = plain(hosts[0]), plain(hosts[1])
    monkeypatch.setattr(pairs, "_CONNECT_S", 2.0)
    request = link_request((server.spec.addr or "", client.spec.addr or ""), GLANCE)
    other = {**request, "token": secrets.token_hex(32)}
    files = {
        "h1": {"link.json": json.dumps({**request, "role": "server"}).encode()},
        "h2": {"link.json": json.dumps({**other, "role": "client"}).encode()},
    }
    answers = on_all(
        [server.spec, client.spec],
        lambda transport: run_module(
            transport, pairs.LINK_MODULE, files[transport.spec.name], timeout_s=60
        ),
    )
    assert "no client came" in str(answers["h1"])
    assert "belongs to somebody else" in str(answers["h2"]) or "no way" in str(answers["h2"])


def test_host_that_is_away_is_named(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_CONNECT_S", 2.0)
    away = HostFacts(spec=replace(hosts[1].spec(), port=1))
    with pytest.raises(HetrunError, match=r"link between h1 .* and h2 ") as caught:
        measure_pair(plain(hosts[0]), away, QUICK)
    assert "h2: " in str(caught.value)
    assert GATEWAY not in str(caught.value)
