"""What any transport of the bridge must do; ranks are threads of this process, sockets are real."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import TypeVar

import pytest

from hetrun.bridge.failure import MismatchError, PeerGoneError
from hetrun.bridge.frames import Key
from hetrun.bridge.loop import LoopThread
from hetrun.bridge.plan import EAGER_BYTES, BridgePlan, make_plan
from hetrun.bridge.tcp import TcpTransport, open_listeners
from hetrun.bridge.topology import Card
from hetrun.bridge.transport import Listeners, Transport
from hetrun.model import MIB

pytestmark = pytest.mark.dist

SECRET = b"s" * 32
WAIT_S = 10.0
KEY = Key(7, 1, 2)
T = TypeVar("T")
LONG = EAGER_BYTES + 1


class End:
    """One rank: its transport, its loop and what it was told."""

    def __init__(
        self, plan: BridgePlan, rank: int, sockets: list[socket.socket], secret: bytes
    ) -> None:
        self.lost: list[tuple[int, PeerGoneError]] = []
        self.news: list[tuple[int, Key, bytes]] = []
        self.thread = LoopThread()
        self.transport: Transport = TcpTransport(
            plan,
            rank,
            secret=secret,
            sockets=sockets,
            loop=self.thread.loop,
            listeners=Listeners(
                lost=lambda peer, error: self.lost.append((peer, error)),
                told=lambda *news: self.news.append(news),
            ),
        )
        assert isinstance(self.transport, TcpTransport)
        self.thread.call(self.transport.start(), timeout_s=WAIT_S)

    def run(self, act: Callable[[], object]) -> None:
        async def inside() -> None:
            act()

        self.thread.call(inside(), timeout_s=WAIT_S)

    def wait(self, act: Callable[[], asyncio.Future[T]]) -> T:
        async def inside() -> T:
            return await act()

        return self.thread.call(inside(), timeout_s=WAIT_S)

    def send(self, peer: int, key: Key, data: bytes, *, announce: bool = False) -> None:
        self.wait(
            lambda: self.transport.mailbox.send(peer, key, memoryview(data), announce=announce)
        )

    def start_send(self, peer: int, key: Key, data: bytes, *, announce: bool = False) -> None:
        self.run(
            lambda: self.transport.mailbox.send(peer, key, memoryview(data), announce=announce)
        )

    def receive(self, peer: int, key: Key, size: int) -> bytes:
        into = bytearray(size)
        self.wait(lambda: self.transport.mailbox.receive(peer, key, memoryview(into)))
        return bytes(into)


Ends = Callable[..., list[End]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as stack:

        def start(count: int, *, secrets: tuple[bytes, ...] = (), addrs: int = 1) -> list[End]:
            sockets = [open_listeners(["127.0.0.1"] * addrs) for _ in range(count)]
            plan = make_plan(
                [
                    Card(
                        rank=rank,
                        island=str(rank),
                        backend="gloo",
                        torch="2",
                        addrs=("127.0.0.1",) * addrs,
                        ports=tuple(one.getsockname()[1] for one in listening),
                    )
                    for rank, listening in enumerate(sockets)
                ]
            )
            made = []
            for rank, listening in enumerate(sockets):
                end = End(plan, rank, listening, secrets[rank] if secrets else SECRET)
                made.append(end)
                stack.callback(end.thread.stop)
                stack.callback(end.run, end.transport.abort)
            return made

        yield start


def soon(condition: Callable[[], object]) -> bool:
    deadline_s = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.002)
    return bool(condition())


@pytest.mark.parametrize("size", [0, 1, EAGER_BYTES, LONG, 5 * MIB + 3])
@pytest.mark.parametrize("receiver_first", [True, False])
def test_bytes_arrive_whoever_is_first(ends: Ends, size: int, receiver_first: bool) -> None:
    one, two = ends(2)
    data = os.urandom(size)
    into = bytearray(size)
    if receiver_first:
        two.run(lambda: two.transport.mailbox.receive(0, KEY, memoryview(into)))
        one.send(1, KEY, data)
        assert soon(lambda: bytes(into) == data)
    else:
        one.start_send(1, KEY, data)
        time.sleep(0.02)
        assert two.receive(0, KEY, size) == data


@pytest.mark.parametrize("receiver_first", [True, False])
def test_short_message_needs_no_length(ends: Ends, receiver_first: bool) -> None:
    one, two = ends(2)
    got: list[bytes] = []
    wait = threading.Thread(
        target=lambda: got.append(two.wait(lambda: two.transport.mailbox.receive_short(0, KEY)))
    )
    if receiver_first:
        wait.start()
        time.sleep(0.05)
    one.send(1, KEY, b"seven b")
    if not receiver_first:
        wait.start()
    wait.join()
    assert got == [b"seven b"]


def test_messages_are_told_apart_by_key_not_by_order(ends: Ends) -> None:
    one, two = ends(2)
    keys = [Key(1, slot, seq) for slot in range(3) for seq in range(3)]
    for number, key in enumerate(keys):
        one.start_send(1, key, bytes([number]) * (1 + number % 2 * LONG))
    for number, key in reversed(list(enumerate(keys))):
        assert set(two.receive(0, key, 1 + number % 2 * LONG)) == {number}


def test_both_directions_at_once_do_not_wait_for_each_other(ends: Ends) -> None:
    both = ends(2)
    data = [os.urandom(20 * MIB) for _ in both]
    got: dict[int, bytes] = {}

    def exchange(rank: int) -> None:
        both[rank].start_send(1 - rank, KEY, data[rank])
        got[rank] = both[rank].receive(1 - rank, KEY, 20 * MIB)

    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {0: data[1], 1: data[0]}


def test_long_message_stays_with_its_sender_until_somebody_wants_it(ends: Ends) -> None:
    one, two = ends(2)
    one.start_send(1, KEY, bytes(8 * MIB))
    one.send(1, Key(7, 1, 3), b"x")
    assert two.receive(0, Key(7, 1, 3), 1) == b"x"
    assert one.transport.traffic()[1].sent < EAGER_BYTES
    assert two.receive(0, KEY, 8 * MIB) == bytes(8 * MIB)


def test_traffic_counts_what_was_moved(ends: Ends) -> None:
    one, two = ends(2)
    one.start_send(1, KEY, bytes(4 * MIB))
    two.receive(0, KEY, 4 * MIB)
    received = two.transport.traffic()[0].received
    assert soon(lambda: one.transport.traffic()[1].sent == received)
    assert 4 * MIB < received < 4 * MIB + 200


@pytest.mark.parametrize("sent", [3, LONG])
@pytest.mark.parametrize("awaited", [4, LONG + 1])
def test_other_length_than_awaited_is_a_named_error(ends: Ends, sent: int, awaited: int) -> None:
    one, two = ends(2)
    one.start_send(1, KEY, bytes(sent), announce=True)
    with pytest.raises(MismatchError, match=rf"rank 0 sends {sent} bytes where {awaited} are"):
        two.receive(0, KEY, awaited)


def test_first_of_many_senders_is_found(ends: Ends) -> None:
    three = ends(3)
    mailbox = three[0].transport.mailbox
    found: list[object] = []
    thread = threading.Thread(
        target=lambda: found.append(three[0].wait(lambda: mailbox.first_of({1: KEY, 2: KEY})))
    )
    thread.start()
    time.sleep(0.05)
    three[2].start_send(0, KEY, bytes(LONG), announce=True)
    thread.join()
    assert found == [2]
    assert three[0].receive(2, KEY, LONG) == bytes(LONG)


def test_wrong_secret_lets_nobody_in_and_names_the_peer(ends: Ends) -> None:
    one, two = ends(2, secrets=(b"a" * 32, b"b" * 32))
    with pytest.raises(PeerGoneError, match=r"rank 1: cannot be reached.*secret") as caught:
        one.thread.call(one.transport.reach([1]), timeout_s=WAIT_S)
    assert "aaaa" not in str(caught.value)
    assert two.news == []


def test_peer_that_is_not_there_is_named(ends: Ends) -> None:
    one, two = ends(2)
    two.run(two.transport.abort)
    with pytest.raises(PeerGoneError, match=r"rank 1: cannot be reached at 127\.0\.0\.1"):
        one.thread.call(one.transport.reach([1]), timeout_s=WAIT_S)


@pytest.mark.parametrize("sender_dies", [True, False])
def test_torn_connection_is_noticed_by_the_other_end_at_once(ends: Ends, sender_dies: bool) -> None:
    one, two = ends(2)
    one.send(1, KEY, b"x")
    two.receive(0, KEY, 1)
    dead, alive = (one, two) if sender_dies else (two, one)
    start_s = time.monotonic()
    dead.run(dead.transport.abort)
    assert soon(lambda: alive.lost)
    assert time.monotonic() - start_s < 1.0
    assert "closed the connection" in str(alive.lost[0][1])


def test_goodbye_is_no_failure_and_loses_no_byte(ends: Ends) -> None:
    one, two = ends(2)
    data = os.urandom(3 * MIB)
    into = bytearray(len(data))
    two.run(lambda: two.transport.mailbox.receive(0, KEY, memoryview(into)))
    one.start_send(1, KEY, data)
    one.start_send(1, Key(7, 2, 2), b"last")
    assert soon(lambda: one.transport.traffic()[1].sent > 0)
    one.thread.call(one.transport.close(), timeout_s=WAIT_S)
    assert two.receive(0, Key(7, 2, 2), 4) == b"last"
    assert soon(lambda: bytes(into) == data)
    time.sleep(0.05)
    assert two.lost == []
    assert two.transport.absent() == {0: "it left"}


def test_who_only_ever_received_leaves_in_peace_too(ends: Ends) -> None:
    one, two = ends(2)
    one.send(1, KEY, b"x")
    two.receive(0, KEY, 1)
    two.thread.call(two.transport.close(), timeout_s=WAIT_S)
    time.sleep(0.05)
    assert one.lost == []


def test_who_waits_for_one_that_left_is_told(ends: Ends) -> None:
    one, two = ends(2)
    one.send(1, KEY, b"x")
    two.run(lambda: two.transport.mailbox.receive(0, Key(7, 9, 9), memoryview(bytearray(9))))
    one.thread.call(one.transport.close(), timeout_s=WAIT_S)
    assert soon(lambda: two.lost)
    assert str(two.lost[0][1]) == "rank 0: it left"


def test_stranger_is_refused_and_disturbs_nobody(ends: Ends) -> None:
    one, two = ends(2)
    transport = two.transport
    assert isinstance(transport, TcpTransport)
    with socket.create_connection(transport._sockets[0].getsockname()) as stranger:
        stranger.sendall(os.urandom(300))
        stranger.settimeout(WAIT_S)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    one.send(1, KEY, b"x")
    assert two.receive(0, KEY, 1) == b"x"
    assert two.lost == []


def test_garbage_after_the_greeting_ends_that_peer_only(ends: Ends) -> None:
    three = ends(3)
    three[0].send(2, KEY, b"x")
    three[1].send(2, KEY, b"x")
    transport = three[0].transport
    assert isinstance(transport, TcpTransport)
    raw = transport._peers[2].outgoing[0]._stream
    three[0].run(lambda: raw.send(b"\0" * 32))
    assert soon(lambda: three[2].lost)
    assert "no frame" in str(three[2].lost[0][1])
    assert [peer for peer, _ in three[2].lost] == [0]
    three[1].send(2, Key(7, 1, 3), b"y")
    assert three[2].receive(1, Key(7, 1, 3), 1) == b"y"


def test_several_addresses_carry_a_part_each(ends: Ends) -> None:
    one, two = ends(2, addrs=3)
    for number in range(6):
        one.start_send(1, Key(1, number, 0), bytes(4 * MIB))
    mailbox, room = two.transport.mailbox, [bytearray(4 * MIB) for _ in range(6)]
    futures: list[asyncio.Future[bytes]] = []

    def post() -> None:
        for number, into in enumerate(room):
            futures.append(mailbox.receive(0, Key(1, number, 0), memoryview(into)))

    two.run(post)
    assert soon(lambda: all(future.done() for future in futures))
    transport = one.transport
    assert isinstance(transport, TcpTransport)
    streams = transport._peers[1].outgoing
    assert len(streams) == 3
    assert soon(lambda: all(stream.sent > 4 * MIB for stream in streams))


def test_news_arrive_without_being_asked_for(ends: Ends) -> None:
    one, two = ends(2)
    one.run(lambda: one.transport.tell(1, KEY, b"it broke"))
    assert soon(lambda: two.news == [(0, KEY, b"it broke")])


def test_forgotten_group_gives_up_what_it_waits_for(ends: Ends) -> None:
    one, two = ends(2)
    mailbox = one.transport.mailbox
    futures: list[asyncio.Future[bytes]] = []
    one.run(lambda: futures.append(mailbox.receive(1, KEY, memoryview(bytearray(5)))))
    one.run(lambda: futures.append(mailbox.receive(1, Key(8, 0, 0), memoryview(bytearray(5)))))
    assert mailbox.waits_for(7) == {1}
    one.run(lambda: mailbox.forget(7))
    assert [future.cancelled() for future in futures] == [True, False]
    assert mailbox.waits_for(7) == set()
    assert two.lost == []
