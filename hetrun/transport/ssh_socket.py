"""The TCP connection to the first sshd, with deadlines. What is spoken over it is left to `ssh.py`."""

from __future__ import annotations

import socket
import threading
import time

from hetrun.errors import HostError
from hetrun.transport.ssh_target import SshTarget

CONNECT_S = 5.0


def open_socket(target: SshTarget, host: str) -> socket.socket:
    """Connect, and let the kernel notice within about 12 s when the other side is gone."""
    error: OSError | None = None
    deadline_s = time.monotonic() + CONNECT_S
    for family, address in _addresses(target, host):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(max(0.1, deadline_s - time.monotonic()))
        try:
            sock.connect(address)
        except OSError as failed:
            sock.close()
            error = failed
            continue
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in (
            ("TCP_KEEPIDLE", 3),
            ("TCP_KEEPINTVL", 3),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 10_000),  # ms; paramiko's own keepalive never notices a dead peer
        ):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return sock
    where = f"{target.addr}:{target.port}"
    if isinstance(error, ConnectionRefusedError):
        message, hint = f"{where} refuses connections", "is sshd running there, on this port?"
    elif isinstance(error, TimeoutError) or error is None:
        message = f"{where} did not answer within {CONNECT_S:g} s"
        hint = "is the host up, and is a firewall in between?"
    else:
        message, hint = f"{where} is unreachable: {error.strerror or error}", "is the host up?"
    who = "" if target.name == host else f"{target.name}: "
    raise HostError(who + message, hint=hint, host=host) from error


def _addresses(
    target: SshTarget, host: str
) -> list[tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]]:
    """Resolve a name in a thread of its own, since the resolver knows no deadline."""
    found: list[tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]] = []
    errors: list[OSError] = []

    def resolve() -> None:
        try:
            for family, _, _, _, address in socket.getaddrinfo(
                target.addr, target.port, type=socket.SOCK_STREAM
            ):
                found.append((family, address))  # type: ignore[arg-type]
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=resolve, daemon=True, name=f"resolve {target.addr}")
    thread.start()
    thread.join(CONNECT_S)
    if not found:
        why = errors[0].strerror if errors else f"no answer within {CONNECT_S:g} s"
        raise HostError(
            f"the name {target.addr!r} does not resolve: {why}",
            hint="set `addr` of the host to a number, or mend the name service",
            host=host,
        )
    return found
