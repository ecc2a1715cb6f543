"""How two processes on two hosts prove to each other that both hold one token, which never travels.

What they say then, and where they look for each other, is left to `preflight/onpair.py` and `runtime/handshake.py`.
Standard library only, and no other module of ours: preflight sends it to hosts as source.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import socket
from collections.abc import Sequence

NONCE_BYTES = 32
_MOST_AT_ONCE = 1 << 18


def greet(stream: socket.socket, token: bytes, *, is_server: bool) -> bool:
    """Prove that we hold the token and see whether the other does: each signs both nonces with its own name.

    Raises:
        OSError: closed before, or silent for longer than the stream's timeout.
    """
    own = os.urandom(NONCE_BYTES)
    stream.sendall(own)
    other = receive(stream, NONCE_BYTES)
    both = own + other if is_server else other + own
    names = (b"server", b"client") if is_server else (b"client", b"server")
    stream.sendall(_sign(token, names[0] + both))
    theirs = receive(stream, hashlib.sha256().digest_size)
    return hmac.compare_digest(theirs, _sign(token, names[1] + both))


def _sign(token: bytes, text: bytes) -> bytes:
    return hmac.new(token, text, hashlib.sha256).digest()


def receive(stream: socket.socket, size: int) -> bytes:
    """Return exactly so many bytes.

    Raises:
        OSError: closed before, or silent for longer than the stream's timeout.
    """
    data = bytearray()
    while len(data) < size:
        part = stream.recv(min(_MOST_AT_ONCE, size - len(data)))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "closed in the middle of a message")
        data += part
    return bytes(data)


def family_of(addr: str) -> socket.AddressFamily:
    """Return the address family of a numeric address."""
    return socket.AF_INET6 if ":" in addr else socket.AF_INET


def listen(addr: str, ports: Sequence[int], *, backlog: int) -> socket.socket:
    """Listen on this address only, at the first of these ports that is free.

    Raises:
        OSError: the address is not one of this host, or (EADDRINUSE) all ports are taken.
    """
    last = OSError(errno.EADDRINUSE, "no port given")
    for port in ports:
        listener = socket.socket(family_of(addr), socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((addr, port))
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            last = error
            continue
        return listener
    raise last
