"""One direction of one connection: frames queued for a socket, frames read from one. Which rank is at the other end
and what is done about a torn stream is left to `tcp.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from itertools import islice

from hetrun.bridge.failure import BridgeError
from hetrun.bridge.frames import HEADER_BYTES, Header, Kind, unpack_header
from hetrun.model import MIB

Done = asyncio.Future[None]
GOODBYE = (
    b"\x05"  # the one byte that a receiver ever writes: it reads no more, and that is no failure
)
_TURN_BYTES = 2 * MIB  # moved before other sockets have their turn
_VIEWS = 16  # handed to the kernel in one call


class Outgoing:
    """Writes frames; nothing is ever read from this socket but its end."""

    def __init__(
        self, stream: socket.socket, loop: asyncio.AbstractEventLoop, torn: Callable[[str], None]
    ) -> None:
        self._stream = stream
        self._loop = loop
        self._torn = torn
        self._queue: deque[tuple[memoryview, Done | None]] = deque()
        self._waits = False
        self._ended = False
        self._goodbye = False
        self.queued = 0  # bytes
        self.sent = 0
        loop.add_reader(stream, self._watch)

    def push(self, header: Header, payload: memoryview, done: Done | None) -> None:
        """Queue a frame and send what the socket takes at once."""
        if self._ended:
            self._torn("it left")
            return
        self._queue.append((memoryview(header.pack()), None if len(payload) else done))
        if len(payload):
            self._queue.append((payload, done))
        self.queued += HEADER_BYTES + len(payload)
        if not self._waits:
            self._flush()

    def load(self) -> tuple[int, int]:
        """Bytes that wait, then bytes so far: the lowest one takes the next payload."""
        return self.queued, self.sent

    async def finish(self) -> None:
        """Wait until all is with the kernel, then end this direction."""
        while self._queue and not self._ended:
            await asyncio.sleep(0.001)
        if not self._ended:
            with contextlib.suppress(OSError):  # the other end is gone already
                self._stream.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close at once."""
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self._stream)
            self._loop.remove_writer(self._stream)
        self._stream.close()

    def _flush(self) -> None:
        left = _TURN_BYTES
        try:
            while self._queue and left > 0:
                views = [view for view, _ in islice(self._queue, _VIEWS)]
                count = self._stream.sendmsg(views)
                left -= count
                self._took(count)
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error.strerror or str(error))
            return
        if bool(self._queue) != self._waits:
            self._waits = bool(self._queue)
            if self._waits:
                self._loop.add_writer(self._stream, self._flush)
            else:
                self._loop.remove_writer(self._stream)

    def _took(self, count: int) -> None:
        self.sent += count
        self.queued -= count
        while count:
            view, done = self._queue.popleft()
            if count < len(view):
                self._queue.appendleft((view[count:], done))
                return
            count -= len(view)
            if done is not None and not done.done():
                done.set_result(None)

    def _watch(self) -> None:
        try:
            data = self._stream.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error.strerror or str(error))
            return
        if data == GOODBYE:
            self._goodbye = True
        else:
            self._end("it wrote where it has to read" if data else "it closed the connection")

    def _end(self, why: str) -> None:
        if not self._ended:
            self.close()
            if not self._goodbye:
                self._torn(why)


class Incoming:
    """Reads frames and hands them on."""

    def __init__(
        self,
        stream: socket.socket,
        loop: asyncio.AbstractEventLoop,
        *,
        room_for: Callable[[Header], memoryview],
        arrived: Callable[[Header, memoryview], None],
        torn: Callable[[str], None],
    ) -> None:
        self._stream = stream
        self._loop = loop
        self._room_for = room_for
        self._arrived = arrived
        self._torn = torn
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._header: Header | None = None
        self._room = self._head  # what is being filled
        self._filled = 0
        self._ended = False
        self.received = 0
        loop.add_reader(stream, self._read)

    def say_goodbye(self) -> None:
        """Let the sender know that closing this is no failure."""
        if not self._ended:
            with contextlib.suppress(OSError):  # it is gone already
                self._stream.send(GOODBYE)

    def close(self) -> None:
        """Close at once."""
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self._stream)
        self._stream.close()

    def _read(self) -> None:
        left = _TURN_BYTES
        while left > 0 and not self._ended:
            try:
                count = self._stream.recv_into(self._room[self._filled :])
                if count == 0:
                    self._end("it closed the connection")
                    return
                left -= count
                self.received += count
                self._filled += count
                if self._filled == len(self._room):
                    self._step()
            except BlockingIOError:
                return
            except OSError as error:
                self._end(error.strerror or str(error))
            except BridgeError as error:
                self._end(error.message)

    def _step(self) -> None:
        """Go on from a header to its payload, or from a complete frame to the next header."""
        if self._header is None:
            header = unpack_header(self._head)
            if header.has_payload and header.length:
                self._header, self._room, self._filled = header, self._room_for(header), 0
                return
            room = self._room_for(header) if header.has_payload else self._head[:0]
        else:
            header, room = self._header, self._room
        self._header, self._room, self._filled = None, self._head, 0
        self._arrived(header, room)
        if header.kind is Kind.BYE:
            self.close()

    def _end(self, why: str) -> None:
        if not self._ended:
            self.close()
            self._torn(why)
