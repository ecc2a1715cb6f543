"""How two processes on two hosts find each other: a random port, and proof that both hold the same one-time token.

The token never travels, so a stranger learns nothing and is let in nowhere. What is said then is left to
`linkbench.py` and `collectivebench.py`. Standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hetrun.errors import JobError, PreflightError

log = logging.getLogger(__name__)

NONCE_BYTES = 32
_HANDSHAKE_S = 3.0  # a stranger may hold the server up for so long
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Appointment:
    """Where and how long two ends look for each other."""

    server_addr: str  # numeric
    client_addr: str  # numeric
    ports: tuple[int, ...]
    token: str  # hex
    connect_s: float

    def __post_init__(self) -> None:
        if not all(1024 <= port < 65536 for port in self.ports):
            raise ValueError(f"ports {list(self.ports)[:5]}, need 1024 to 65535")
        if len(bytes.fromhex(self.token)) < NONCE_BYTES:
            raise ValueError(f"token is too short, need {NONCE_BYTES} bytes")


def listen(addr: str, ports: Sequence[int]) -> socket.socket:
    """Listen on one address at the first of these ports that is free.

    Raises:
        PreflightError: the address is not one of this host, or all ports are taken.
    """
    for port in ports:
        listener = socket.socket(_family(addr), socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((addr, port))
            listener.listen(16)
        except OSError as error:
            listener.close()
            if isinstance(error, PermissionError) or "in use" not in str(error):
                raise PreflightError(f"cannot listen on {addr}: {error.strerror}") from error
            continue
        return listener
    raise PreflightError(f"ports {list(ports)} of {addr} are all taken")


def await_client(where: Appointment) -> socket.socket:
    """Return the stream to the one client that holds the token.

    Raises:
        PreflightError: as `listen`.
        JobError: no client in time.
    """
    deadline_s = time.monotonic() + where.connect_s
    with listen(where.server_addr, where.ports) as listener:
        while (left_s := deadline_s - time.monotonic()) > 0:
            listener.settimeout(left_s)
            try:
                stream, _ = listener.accept()
            except TimeoutError:
                continue
            if _greet(stream, where.token, mine=b"server", theirs=b"client"):
                return stream
            stream.close()
            log.warning("a stranger called; not measured")
    raise JobError(f"no client came to {where.server_addr} within {where.connect_s:g} s")


def find_server(where: Appointment) -> socket.socket:
    """Try the ports in turn until the one behind it proves that it holds the token.

    Raises:
        JobError: nobody who holds it, in time.
    """
    deadline_s = time.monotonic() + where.connect_s
    last = "nobody answered"
    while time.monotonic() < deadline_s:
        for port in where.ports:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            stream = socket.socket(_family(where.server_addr), socket.SOCK_STREAM)
            try:
                stream.settimeout(min(left_s, _HANDSHAKE_S))
                stream.bind((where.client_addr, 0))
                stream.connect((where.server_addr, port))
                if _greet(stream, where.token, mine=b"client", theirs=b"server"):
                    return stream
                last = f"port {port} belongs to somebody else"
            except OSError as error:
                last = error.strerror or str(error)
            stream.close()
        time.sleep(_RETRY_S)
    raise JobError(
        f"from {where.client_addr}, no way to {where.server_addr} within"
        f" {where.connect_s:g} s: {last}"
    )


def receive(stream: socket.socket, size: int) -> bytes:
    """Return exactly so many bytes.

    Raises:
        OSError: closed before, or silent for longer than the stream's timeout.
    """
    data = bytearray()
    while len(data) < size:
        part = stream.recv(size - len(data))
        if not part:
            raise ConnectionResetError("closed in the middle of a message")
        data += part
    return bytes(data)


def _greet(stream: socket.socket, token: str, *, mine: bytes, theirs: bytes) -> bool:
    """Prove that we hold the token and see that the other does: each signs both nonces with its own name."""
    stream.settimeout(_HANDSHAKE_S)
    own = secrets.token_bytes(NONCE_BYTES)
    try:
        stream.sendall(own)
        other = receive(stream, NONCE_BYTES)
        nonces = {mine: own, theirs: other}
        both = nonces[b"client"] + nonces[b"server"]
        stream.sendall(_sign(token, mine + both))
        return hmac.compare_digest(
            receive(stream, hashlib.sha256().digest_size), _sign(token, theirs + both)
        )
    except OSError:
        return False


def _sign(token: str, text: bytes) -> bytes:
    return hmac.new(bytes.fromhex(token), text, hashlib.sha256).digest()


def _family(addr: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in addr else socket.AF_INET
