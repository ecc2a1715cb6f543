"""How two processes on two hosts find each other: a random port, and proof that both hold the same one-time token.

The proof is `hetrun/greeting.py`; what is said then is left to `linkbench.py` and `collectivebench.py`. Standard
library only.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hetrun import greeting
from hetrun.errors import JobError, PreflightError
from hetrun.greeting import NONCE_BYTES, family_of

log = logging.getLogger(__name__)

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
    try:
        return greeting.listen(addr, ports, backlog=16)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"ports {list(ports)} of {addr} are all taken"
        else:
            what = f"cannot listen on {addr}: {error.strerror}"
        raise PreflightError(what) from error


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
            if _greet(stream, where, is_server=True):
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
            stream = socket.socket(family_of(where.server_addr), socket.SOCK_STREAM)
            try:
                stream.settimeout(min(left_s, _HANDSHAKE_S))
                stream.bind((where.client_addr, 0))
                stream.connect((where.server_addr, port))
                if _greet(stream, where, is_server=False):
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


def _greet(stream: socket.socket, where: Appointment, *, is_server: bool) -> bool:
    """Say whether the other end holds the token, too; one that is silent or goes away does not."""
    stream.settimeout(_HANDSHAKE_S)
    try:
        return greeting.greet(stream, bytes.fromhex(where.token), is_server=is_server)
    except OSError:
        return False
