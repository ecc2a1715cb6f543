"""Which transport reaches a host, and for how long it stays. How bytes travel is left to `local.py` and `ssh.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from hetrun.model import Connection, HostSpec
from hetrun.transport.local import LocalTransport

if TYPE_CHECKING:
    from hetrun.transport import Channel, Transport

_kept: ContextVar[list[Transport] | None] = ContextVar("kept transports", default=None)


def open_transport(spec: HostSpec) -> Transport:
    """Return the transport of a host; nothing is connected before its first `open_shell`.

    Inside `one_connection_per_host` it shares the connection that an earlier caller made, and leaves it open.
    """
    kept = _kept.get()
    if kept is None:
        return _new_transport(spec)
    for transport in kept:
        if transport.spec == spec:
            return _Shared(transport)
    kept.append(_new_transport(spec))
    return _Shared(kept[-1])


@contextmanager
def one_connection_per_host() -> Iterator[None]:
    """Let all that is opened inside share one connection per host, which ends with the block."""
    if _kept.get() is not None:  # an outer block ends it
        yield
        return
    kept: list[Transport] = []
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
        for transport in kept:
            transport.close()


class _Shared:
    """One user of a connection that others use too: it ends its own channels only."""

    def __init__(self, transport: Transport) -> None:
        self.spec = transport.spec
        self._transport = transport
        self._channels: list[Channel] = []

    def open_shell(self) -> Channel:
        """Start /bin/sh on the shared connection."""
        channel = self._transport.open_shell()
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        """End the channels that were opened here."""
        while self._channels:
            self._channels.pop().close()


def _new_transport(spec: HostSpec) -> Transport:
    if spec.connection is Connection.LOCAL:
        return LocalTransport(spec)
    # Only here: importing Fabric costs 0.3 s, and hosts on this machine do without it.
    from hetrun.transport.ssh import SshTransport

    return SshTransport(spec)
