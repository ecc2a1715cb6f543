"""Matches what arrives with who waits for it. Moving bytes is left to a transport, which calls and is called here.

Short messages are sent at once and kept until somebody asks. Long ones wait until the receiver has room (READY),
which it says when it posts the receive, so that they are written where they belong and nobody's memory overflows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from hetrun.bridge.failure import BridgeError, MismatchError
from hetrun.bridge.frames import Header, Key, Kind
from hetrun.bridge.plan import EAGER_BYTES
from hetrun.model import MIB

Done = asyncio.Future[None]
_MAX_UNREAD_BYTES = 256 * MIB  # short messages of one peer that nobody asked for
_NOTHING = memoryview(b"")


@dataclass(slots=True)
class _Posted:
    into: memoryview | None  # None: as long as it comes, but short
    done: asyncio.Future[bytes]
    announced: bool = False


@dataclass(slots=True)
class _Waiting:
    data: memoryview
    done: Done
    announced: bool


class Mailbox:
    """The messages of one rank; lives on one event loop."""

    def __init__(
        self,
        emit: Callable[[int, Header, memoryview, Done | None], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`emit(peer, header, payload, done)` sends a frame, and sets `done` when the payload may change again."""
        self._emit = emit
        self._loop = loop
        self._posted: dict[tuple[int, Key], _Posted] = {}
        self._unread: dict[tuple[int, Key], bytearray] = {}
        self._unread_bytes: dict[int, int] = {}
        self._waiting: dict[tuple[int, Key], _Waiting] = {}
        self._granted: dict[tuple[int, Key], int] = {}
        self._announced: dict[tuple[int, Key], int] = {}
        self._late: set[tuple[int, Key]] = set()  # DATA that overtook its ANNOUNCE
        self._any: list[tuple[Mapping[int, Key], asyncio.Future[int]]] = []

    def send(self, peer: int, key: Key, data: memoryview, *, announce: bool = False) -> Done:
        """Send bytes; `announce` tells the peer of long ones first, for receivers that do not know what will come."""
        done: Done = self._loop.create_future()
        address = (peer, key)
        if len(data) <= EAGER_BYTES:
            self._emit(peer, Header(Kind.DATA, key, len(data)), data, done)
        elif address in self._granted:
            self._release(
                address, _Waiting(data, done, announced=False), self._granted.pop(address)
            )
        else:
            self._waiting[address] = _Waiting(data, done, announce)
            if announce:
                self._emit(peer, Header(Kind.ANNOUNCE, key, len(data)), _NOTHING, None)
        return done

    def receive(self, peer: int, key: Key, into: memoryview) -> asyncio.Future[bytes]:
        """Fill `into` with the message of that name; the future's value means nothing."""
        posted = self._post(peer, key, into)
        if len(into) > EAGER_BYTES and not posted.done():
            self._emit(peer, Header(Kind.READY, key, len(into)), _NOTHING, None)
        return posted

    def receive_short(self, peer: int, key: Key) -> asyncio.Future[bytes]:
        """Return a message of at most EAGER_BYTES whose length is not known."""
        return self._post(peer, key, None)

    def first_of(self, keys: Mapping[int, Key]) -> asyncio.Future[int]:
        """Return the peer whose message, of those named here, is there first; it still has to be received."""
        found: asyncio.Future[int] = self._loop.create_future()
        self._any.append((keys, found))
        for peer, key in keys.items():
            if (peer, key) in self._unread or (peer, key) in self._announced:
                self._notice((peer, key))
                break
        return found

    def room_for(self, peer: int, header: Header) -> memoryview:
        """Where the payload of a DATA frame goes that begins to arrive.

        Raises:
            BridgeError: nobody asked for it and it is long, or too much was not asked for.
        """
        posted = self._posted.get((peer, header.key))
        if posted is None:
            unread = self._unread_bytes.get(peer, 0) + header.length
            if header.length > EAGER_BYTES or unread > _MAX_UNREAD_BYTES:
                raise BridgeError(f"rank {peer} sends {header.length} bytes that nobody asked for")
            return memoryview(bytearray(header.length))
        if posted.into is not None and len(posted.into) == header.length:
            return posted.into
        if posted.into is not None or header.length > EAGER_BYTES:
            self._wrong_length((peer, header.key), posted, header.length)
        return memoryview(bytearray(header.length))

    def arrived(self, peer: int, header: Header, payload: memoryview) -> None:
        """Take a frame that is complete; of DATA, `payload` is what `room_for` returned."""
        address = (peer, header.key)
        if header.kind is Kind.DATA:
            self._data(address, header, payload)
        elif header.kind is Kind.READY:
            waiting = self._waiting.pop(address, None)
            if waiting is None:
                self._granted[address] = header.length
            else:
                self._release(address, waiting, header.length)
        elif header.kind is Kind.ANNOUNCE:
            self._announce(address, header.length)

    def waits_for(self, group: int, seq: int | None = None) -> set[int]:
        """Peers that some message of a group (and operation) is awaited from, or that are to make room for one."""
        addresses = (*self._posted, *self._waiting)
        return {peer for peer, key in addresses if key.group == group and seq in (None, key.seq)}

    def needs(self, peers: Collection[int]) -> bool:
        """Whether something is still awaited from any of these peers."""
        return any(peer in peers for peer, _ in (*self._posted, *self._waiting))

    def forget(self, group: int) -> None:
        """Drop all messages of a group; their futures are cancelled."""
        for address in [address for address in self._posted if address[1].group == group]:
            self._posted.pop(address).done.cancel()
        for address in [address for address in self._waiting if address[1].group == group]:
            self._waiting.pop(address).done.cancel()
        tables: tuple[dict[tuple[int, Key], int], ...] = (self._granted, self._announced)
        for sizes in tables:
            for address in [address for address in sizes if address[1].group == group]:
                del sizes[address]
        for address in [address for address in self._unread if address[1].group == group]:
            self._unread_bytes[address[0]] -= len(self._unread.pop(address))

    def _post(self, peer: int, key: Key, into: memoryview | None) -> asyncio.Future[bytes]:
        address = (peer, key)
        posted = _Posted(into, self._loop.create_future())
        unread = self._unread.pop(address, None)
        if unread is not None:
            self._unread_bytes[peer] -= len(unread)
            if into is not None and len(into) != len(unread):
                self._wrong_length(address, posted, len(unread))
                return posted.done
            if into is not None:
                into[:] = unread
            posted.done.set_result(bytes(unread) if into is None else b"")
            return posted.done
        announced = self._announced.pop(address, None)
        if announced is not None and (into is None or announced != len(into)):
            self._wrong_length(address, posted, announced)
            return posted.done
        posted.announced = announced is not None
        self._posted[address] = posted
        return posted.done

    def _data(self, address: tuple[int, Key], header: Header, payload: memoryview) -> None:
        posted = self._posted.pop(address, None)
        known = posted is not None and posted.announced
        if header.announced and not known and self._announced.pop(address, None) is None:
            self._late.add(address)
        if posted is None:
            peer = address[0]
            self._unread[address] = bytearray(payload)
            self._unread_bytes[peer] = self._unread_bytes.get(peer, 0) + len(payload)
            self._notice(address)
        elif not posted.done.done():
            posted.done.set_result(bytes(payload) if posted.into is None else b"")

    def _announce(self, address: tuple[int, Key], length: int) -> None:
        if address in self._late:
            self._late.remove(address)
            return
        posted = self._posted.get(address)
        if posted is None:
            self._announced[address] = length
            self._notice(address)
            return
        posted.announced = True
        if posted.into is None or len(posted.into) != length:
            self._wrong_length(address, posted, length)

    def _release(self, address: tuple[int, Key], waiting: _Waiting, room: int) -> None:
        if room != len(waiting.data):
            text = f"rank {address[0]} has room for {room} bytes where {len(waiting.data)} are sent"
            waiting.done.set_exception(MismatchError(text))
            return
        header = Header(Kind.DATA, address[1], room, announced=waiting.announced)
        self._emit(address[0], header, waiting.data, waiting.done)

    def _notice(self, address: tuple[int, Key]) -> None:
        peer, key = address
        for number, (keys, found) in enumerate(self._any):
            if keys.get(peer) == key and not found.done():
                del self._any[number]
                found.set_result(peer)
                return

    def _wrong_length(self, address: tuple[int, Key], posted: _Posted, length: int) -> None:
        self._posted.pop(address, None)
        room = EAGER_BYTES if posted.into is None else len(posted.into)
        if not posted.done.done():
            text = f"rank {address[0]} sends {length} bytes where {room} are awaited"
            posted.done.set_exception(MismatchError(text))
