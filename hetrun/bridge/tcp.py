"""The transport that is always there: TCP sockets between any two ranks, opened when first needed.

Each direction has connections of its own, from sender to receiver, spread over the addresses of both ends. Long
payloads take the one that has least to do; everything else goes in order over the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hetrun.bridge.failure import PeerGoneError
from hetrun.bridge.frames import Header, Key, Kind
from hetrun.bridge.hello import Call, Greeter
from hetrun.bridge.mailbox import Done, Mailbox
from hetrun.bridge.plan import EAGER_BYTES, BridgePlan
from hetrun.bridge.streams import Incoming, Outgoing
from hetrun.bridge.transport import Listeners, Traffic
from hetrun.errors import PreflightError

log = logging.getLogger(__name__)

CONNECT_S = 10.0
_GREETING_S = 5.0  # a stranger holds a socket for so long
_GOODBYE_S = 5.0
_SILENT_MS = 20_000  # a peer whose host answers nothing for so long is gone
_MAX_STRANGERS = 64
_NOTHING = memoryview(b"")
_NO_KEY = Key(0, 0, 0)


@dataclass(slots=True, eq=False)
class _Peer:
    outgoing: list[Outgoing] = field(default_factory=list)
    incoming: list[Incoming] = field(default_factory=list)
    opening: asyncio.Task[None] | None = None
    backlog: list[tuple[Header, memoryview, Done | None]] = field(default_factory=list)
    gone: str = ""  # why nothing more can be said to it or heard from it
    goodbyes: int = 0  # connections that it ended in order
    left: bool = False  # it ended all


def open_listeners(addrs: Sequence[str]) -> list[socket.socket]:
    """Listen on a free port of each address.

    Raises:
        PreflightError: an address is not one of this host.
    """
    listeners: list[socket.socket] = []
    for addr in addrs:
        listener = socket.socket(_family(addr), socket.SOCK_STREAM)
        listeners.append(listener)
        try:
            listener.bind((addr, 0))
        except OSError as error:
            for opened in listeners:
                opened.close()
            raise PreflightError(f"cannot listen on {addr}: {error.strerror}") from error
        listener.listen(1024)
        listener.setblocking(False)
    return listeners


class TcpTransport:
    """All connections of one rank; see `Transport`."""

    def __init__(
        self,
        plan: BridgePlan,
        rank: int,
        *,
        secret: bytes,
        sockets: Sequence[socket.socket],
        loop: asyncio.AbstractEventLoop,
        listeners: Listeners,
    ) -> None:
        """`sockets` are those of `open_listeners`, as the rank's card says."""
        self._plan = plan
        self._rank = rank
        self._loop = loop
        self._listeners = listeners
        self._sockets = sockets
        self._greeter = Greeter(secret, plan.digest())
        self._peers = {card.rank: _Peer() for card in plan.cards if card.rank != rank}
        self._greeting: dict[asyncio.Task[None], socket.socket] = {}
        self._closing = False  # whatever peers do now is no failure
        self._aborted = False
        self.mailbox = Mailbox(self._emit, loop)

    async def start(self) -> None:
        """Take calls from now on."""
        for listener in self._sockets:
            self._loop.add_reader(listener, self._accept, listener)

    async def reach(self, peers: Sequence[int]) -> None:
        """Open the connections to these peers now."""
        for peer in peers:
            self._open(self._peers[peer])
        for peer in peers:
            opening = self._peers[peer].opening
            if opening is not None:
                await opening
            if self._peers[peer].gone:
                raise PeerGoneError(f"rank {peer}: {self._peers[peer].gone}")

    def tell(self, peer: int, key: Key, news: bytes) -> None:
        """Send news; to a peer that is gone it is lost."""
        self._emit(peer, Header(Kind.TELL, key, len(news)), memoryview(news), None)

    async def close(self) -> None:
        """Say goodbye on all connections, then close; goodbyes are not waited for without end."""
        self._closing = True
        openings = [peer.opening for peer in self._peers.values() if peer.opening is not None]
        if openings:
            await asyncio.wait(openings, timeout=_GOODBYE_S)
        goodbyes = [
            self._say_goodbye(stream) for peer in self._peers.values() for stream in peer.outgoing
        ]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*goodbyes), _GOODBYE_S)
        for peer in self._peers.values():
            for incoming in peer.incoming:
                incoming.say_goodbye()
        self.abort()

    def abort(self) -> None:
        """Close everything at once; peers see torn connections. Again: nothing."""
        self._closing = self._aborted = True
        for listener in self._sockets:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener)
                listener.close()
        for task, stream in self._greeting.items():
            task.cancel()
            stream.close()
        for peer in self._peers.values():
            if peer.opening is not None:
                peer.opening.cancel()
            for outgoing in peer.outgoing:
                outgoing.close()
            for incoming in peer.incoming:
                incoming.close()

    def absent(self) -> Mapping[int, str]:
        """Peers that are gone or left, and why."""
        return {
            rank: peer.gone or "it left"
            for rank, peer in self._peers.items()
            if peer.gone or peer.left
        }

    def traffic(self) -> Mapping[int, Traffic]:
        """Bytes so far by peer."""
        return {
            rank: Traffic(
                sent=sum(stream.sent for stream in peer.outgoing),
                received=sum(stream.received for stream in peer.incoming),
            )
            for rank, peer in self._peers.items()
        }

    async def _say_goodbye(self, stream: Outgoing) -> None:
        stream.push(Header(Kind.BYE, _NO_KEY, 0), _NOTHING, None)
        await stream.finish()

    def _emit(self, rank: int, header: Header, payload: memoryview, done: Done | None) -> None:
        peer = self._peers[rank]
        if peer.gone or peer.left:
            if header.kind is not Kind.TELL:
                self._lose(rank, "it left")
        elif not peer.outgoing:
            peer.backlog.append((header, payload, done))
            self._open(peer)
        elif header.kind is Kind.DATA and len(payload) > EAGER_BYTES:
            min(peer.outgoing, key=Outgoing.load).push(header, payload, done)
        else:
            peer.outgoing[0].push(header, payload, done)

    def _open(self, peer: _Peer) -> None:
        if not peer.outgoing and peer.opening is None and not peer.gone:
            rank = next(rank for rank, known in self._peers.items() if known is peer)
            peer.opening = self._loop.create_task(self._connect(rank, peer))

    async def _connect(self, rank: int, peer: _Peer) -> None:
        theirs = self._plan.cards[rank]
        with contextlib.ExitStack() as stack:
            streams: list[socket.socket] = []
            try:
                for number in range(self._num_streams(rank)):
                    there = number % len(theirs.addrs)
                    stream = socket.socket(_family(theirs.addrs[there]), socket.SOCK_STREAM)
                    streams.append(stack.enter_context(stream))
                    call = self._call(stream, there, Call(self._rank, rank, number))
                    await asyncio.wait_for(call, CONNECT_S)
            except (OSError, PeerGoneError, asyncio.TimeoutError) as error:
                addr = f"{theirs.addrs[0]} port {theirs.ports[0]}"
                why = (
                    getattr(error, "strerror", None) or str(error) or f"silent for {CONNECT_S:g} s"
                )
                self._lose(rank, f"cannot be reached at {addr}: {why}")
                return
            if self._aborted:
                return
            stack.pop_all()
        torn = partial(self._lose, rank)
        peer.outgoing = [Outgoing(stream, self._loop, torn) for stream in streams]
        backlog, peer.backlog = peer.backlog, []
        for header, payload, done in backlog:
            self._emit(rank, header, payload, done)

    def _num_streams(self, rank: int) -> int:
        """Connections to or from a rank, the same number at both ends."""
        mine, theirs = self._plan.cards[self._rank], self._plan.cards[rank]
        return max(self._plan.streams, len(mine.addrs), len(theirs.addrs))

    async def _call(self, stream: socket.socket, there: int, who: Call) -> None:
        mine, theirs = self._plan.cards[who.caller], self._plan.cards[who.callee]
        _tune(stream)
        stream.bind((mine.addrs[who.stream % len(mine.addrs)], 0))
        await self._loop.sock_connect(stream, (theirs.addrs[there], theirs.ports[there]))
        await self._greeter.call(stream, who)

    def _accept(self, listener: socket.socket) -> None:
        try:
            stream, _ = listener.accept()
        except OSError:  # it hung up before we answered
            return
        if len(self._greeting) >= _MAX_STRANGERS:
            stream.close()
            return
        task = self._loop.create_task(self._greet(stream))
        self._greeting[task] = stream
        task.add_done_callback(lambda done: self._greeting.pop(done, None))

    async def _greet(self, stream: socket.socket) -> None:
        _tune(stream)
        try:
            call = await asyncio.wait_for(self._greeter.answer(stream, self._rank), _GREETING_S)
        except (OSError, PeerGoneError, asyncio.TimeoutError) as error:
            log.warning("a call was refused: %s", error)
            stream.close()
            return
        peer = self._peers.get(call.caller)
        if peer is None or self._aborted:
            stream.close()
            return
        peer.incoming.append(
            Incoming(
                stream,
                self._loop,
                room_for=partial(self._room_for, call.caller),
                arrived=partial(self._arrived, call.caller),
                torn=partial(self._lose, call.caller),
            )
        )

    def _room_for(self, rank: int, header: Header) -> memoryview:
        if header.kind is Kind.TELL:
            return memoryview(bytearray(header.length))
        return self.mailbox.room_for(rank, header)

    def _arrived(self, rank: int, header: Header, payload: memoryview) -> None:
        if header.kind is Kind.BYE:
            peer = self._peers[rank]
            peer.goodbyes += 1
            peer.left = peer.goodbyes == self._num_streams(rank)
            if peer.left and self.mailbox.needs({rank}):
                self._lose(rank, "it left")
        elif header.kind is Kind.TELL:
            self._listeners.told(rank, header.key, bytes(payload))
        else:
            self.mailbox.arrived(rank, header, payload)

    def _lose(self, rank: int, why: str) -> None:
        peer = self._peers[rank]
        if self._closing or peer.gone:
            return
        if peer.left and not self.mailbox.needs({rank}) and why != "it left":
            return  # it said so before
        peer.gone = why
        peer.backlog.clear()
        self._listeners.lost(rank, PeerGoneError(f"rank {rank}: {why}"))


def _tune(stream: socket.socket) -> None:
    stream.setblocking(False)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _family(addr: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in addr else socket.AF_INET
