"""What a host is asked about its ranks, how it finds its interface, and how often a size is run."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.errors import PreflightError
from hetrun.model import CurvePoint
from hetrun.runtime.collectivebench import (
    CollectiveRequest,
    Seat,
    interface_of,
    why_not_meet,
)
from hetrun.runtime.collectives import repeats_for
from hetrun.runtime.handshake import listen

REQUEST = CollectiveRequest(
    backend="gloo",
    world_size=2,
    seats=(Seat(rank=0),),
    server_addr="192.0.2.1",
    client_addr="192.0.2.2",
    ports=(20001, 20002),
    token="0" * 64,
    p2p=False,
    sizes=(1024, 4096),
    min_repeats=3,
    max_repeats=20,
    budget_s=0.3,
    connect_s=20.0,
    start_s=60.0,
    deadline_s=60.0,
)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sizes": ()}, "sizes"),
        ({"sizes": (3,)}, "need 4 to"),
        ({"seats": ()}, "0 ranks here, of 2"),
        ({"seats": (Seat(rank=2),)}, "ranks here, of 2"),
        ({"ports": (80,)}, "ports"),
        ({"token": "00"}, "token is too short"),
    ],
)
def test_request_that_makes_no_sense_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(REQUEST, **changes)  # type: ignore[arg-type]


def test_host_of_rank_0_is_the_server() -> None:
    other = replace(REQUEST, seats=(Seat(rank=1),))
    assert (REQUEST.is_server, REQUEST.own_addr) == (True, "192.0.2.1")
    assert (other.is_server, other.own_addr) == (False, "192.0.2.2")
    assert not other.is_alone
    assert replace(REQUEST, seats=(Seat(rank=0), Seat(rank=1))).is_alone


def test_interface_is_the_one_that_has_the_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None
    if Path("/proc/net/if_inet6").exists() and "lo" in Path("/proc/net/if_inet6").read_text():
        assert interface_of("::1") == "lo"


@pytest.mark.parametrize(
    ("torch", "theirs", "says"),
    [
        ("2.13.0", {"why": "", "torch": "2.6.0+cpu"}, ""),
        ("2.5.1", {"why": "", "torch": "2.4.0"}, ""),
        ("2.5.1", {"why": "", "torch": "2.13.0"}, "torch 2.5.1 cannot meet torch 2.13.0"),
        ("2.5.1", {"why": "", "torch": "vendor-7"}, ""),
        ("2.13.0", {"why": "no torch", "torch": ""}, "the other host: no torch"),
    ],
)
def test_why_two_hosts_cannot_meet(torch: str, theirs: dict[str, str], says: str) -> None:
    found = why_not_meet(torch, theirs)
    assert found.startswith(says)
    assert bool(found) == bool(says)


def points(*seconds: float) -> list[CurvePoint]:
    return [CurvePoint(num_bytes=4 << number, seconds=s) for number, s in enumerate(seconds)]


def test_size_is_run_within_its_budget_and_left_out_where_it_takes_too_long() -> None:
    assert repeats_for(REQUEST, [], 0.0) == 20
    assert repeats_for(REQUEST, points(1e-4), 0.0) == 20
    assert repeats_for(REQUEST, points(0.01), 0.0) == 7  # expected to take 4 times as long
    assert repeats_for(REQUEST, points(1.0), 0.0) == 3
    few = [1e-4] * 4
    assert repeats_for(REQUEST, points(*few, 0.3), 0.0) == 3
    assert repeats_for(REQUEST, points(*few, 0.4), 0.0) == 0
    assert repeats_for(REQUEST, points(*few, 0.3), 29.0) == 0  # half of the time is spent


def test_port_that_is_taken_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PreflightError, match="are all taken"):
            listen("127.0.0.1", (port,))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            other = free.getsockname()[1]
        with listen("127.0.0.1", (port, other)) as listener:
            assert listener.getsockname() == ("127.0.0.1", other)
    with pytest.raises(PreflightError, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", (port,))
