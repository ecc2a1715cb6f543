"""The first bytes of a connection: both ends prove that they hold the run's secret, which never travels.

What is said then is not encrypted. The caller says who it is, whom it looks for and which plan it follows;
both sign all of that and both nonces.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from dataclasses import dataclass

from hetrun.bridge.failure import PeerGoneError

_HELLO = struct.Struct("!8sIII32s32s")
_MAGIC = b"hetrun01"
_NONCE_BYTES = 32
_SIGN_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Call:
    """Who calls whom: ranks, and which of their connections this is."""

    caller: int
    callee: int
    stream: int


class Greeter:
    """Proves and checks; one per rank."""

    def __init__(self, secret: bytes, plan_digest: bytes) -> None:
        self._secret = secret
        self._digest = plan_digest

    async def call(self, stream: socket.socket, who: Call) -> None:
        """Take the caller's part on a connected socket.

        Raises:
            PeerGoneError: the other end does not hold the secret, or closed.
            OSError: the connection broke.
        """
        loop = asyncio.get_running_loop()
        nonce = secrets.token_bytes(_NONCE_BYTES)
        hello = _HELLO.pack(_MAGIC, who.caller, who.callee, who.stream, self._digest, nonce)
        await loop.sock_sendall(stream, hello)
        answer = await _exactly(stream, _NONCE_BYTES + _SIGN_BYTES)
        text = hello + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], self._sign(b"callee" + text)):
            raise PeerGoneError("it does not hold the secret of this run")
        await loop.sock_sendall(stream, self._sign(b"caller" + text))

    async def answer(self, stream: socket.socket, me: int) -> Call:
        """Take the callee's part; return who called.

        Raises:
            PeerGoneError: a stranger, or a rank of another run or plan.
            OSError: the connection broke.
        """
        loop = asyncio.get_running_loop()
        hello = await _exactly(stream, _HELLO.size)
        magic, caller, callee, number, digest, _nonce = _HELLO.unpack(hello)
        if magic != _MAGIC or callee != me:
            raise PeerGoneError("a stranger called")
        if not hmac.compare_digest(digest, self._digest):
            raise PeerGoneError(f"rank {caller} follows another plan")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        text = hello + nonce
        await loop.sock_sendall(stream, nonce + self._sign(b"callee" + text))
        proof = await _exactly(stream, _SIGN_BYTES)
        if not hmac.compare_digest(proof, self._sign(b"caller" + text)):
            raise PeerGoneError(
                f"who says to be rank {caller} does not hold the secret of this run"
            )
        return Call(caller, callee, number)

    def _sign(self, text: bytes) -> bytes:
        return hmac.new(self._secret, text, hashlib.sha256).digest()


async def _exactly(stream: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(stream, size - len(data))
        if not part:
            raise PeerGoneError("it closed in the middle of the greeting")
        data += part
    return data
