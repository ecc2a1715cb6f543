"""Keys that a person accepts once, hop by hop; a key that changed is never replaced. What to ask is left to the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from hetrun.errors import AuthError, HostKeyError
from hetrun.model import Connection, HostSpec
from hetrun.transport.ssh import SshTransport
from hetrun.transport.ssh_keys import UnknownKeyError, fingerprint, known_name, pin
from hetrun.transport.ssh_target import pin_file

_MOST_HOPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedKey:
    """A key of which nothing is known, as its owner would read it aloud."""

    host: str  # of the inventory
    hop: str  # the host itself, or "jump host <address>"
    known_as: str  # name in known_hosts: address, and port where it is not 22
    fingerprint: str  # kind and SHA256


class Trust(Enum):
    """What became of a host."""

    LOCAL = "this machine"
    KNOWN = "known already"
    PINNED = "pinned"
    REFUSED = "not accepted"


def trust(spec: HostSpec, accept: Callable[[OfferedKey], bool]) -> Trust:
    """Connect hop by hop, ask for each unknown key, pin what is accepted; return what became of the host.

    Raises:
        HostKeyError: a key is not the known one; nothing is pinned, whatever `accept` says.
        HostError: a hop cannot be reached, or a jump host does not let us in.
        StorageError: the pin file cannot be written.
    """
    if spec.connection is Connection.LOCAL:
        return Trust.LOCAL
    became = Trust.KNOWN
    for _ in range(_MOST_HOPS):
        transport = SshTransport(spec)
        try:
            transport.connect()
            break
        except HostKeyError as error:
            cause, target = error.__cause__, transport.last_target
            is_new = isinstance(cause, UnknownKeyError) and not (cause.known or cause.is_revoked)
            if not isinstance(cause, UnknownKeyError) or not is_new or target is None:
                raise
            offered = OfferedKey(
                host=spec.name,
                hop=target.name,
                known_as=known_name(target),
                fingerprint=fingerprint(cause.key),
            )
            if not accept(offered):
                return Trust.REFUSED
            pin(target, cause.key, pin_file())
            became = Trust.PINNED
        except AuthError:
            if transport.last_target is None or transport.last_target.name != spec.name:
                raise
            break  # its key is known; letting us in is another matter
        finally:
            transport.close()
    return became
