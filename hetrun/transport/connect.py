"""Which transport reaches a host. How bytes travel is left to `local.py` and `ssh.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetrun.model import Connection, HostSpec
from hetrun.transport.local import LocalTransport

if TYPE_CHECKING:
    from hetrun.transport import Transport


def open_transport(spec: HostSpec) -> Transport:
    """Return the transport of a host; nothing is connected before its first `open_shell`."""
    if spec.connection is Connection.LOCAL:
        return LocalTransport(spec)
    # Only here: importing Fabric costs 0.3 s, and hosts on this machine do without it.
    from hetrun.transport.ssh import SshTransport

    return SshTransport(spec)
