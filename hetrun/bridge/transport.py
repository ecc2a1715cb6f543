"""What the bridge needs of whatever moves bytes between ranks. Sockets are in `tcp.py`.

All methods but `traffic` are called on the transport's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from hetrun.bridge.failure import PeerGoneError
from hetrun.bridge.frames import Key
from hetrun.bridge.mailbox import Mailbox


@dataclass(slots=True)
class Traffic:
    """Bytes exchanged with one peer, headers included."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class Listeners:
    """Whom a transport tells what happens."""

    lost: Callable[[int, PeerGoneError], None]  # a peer is gone without goodbye
    told: Callable[[int, Key, bytes], None]  # news came from a peer


class Transport(Protocol):
    """Moves messages between ranks; each is named by a key that both ends know and is used once."""

    @property
    def mailbox(self) -> Mailbox:
        """Sends and receives."""
        ...

    def tell(self, peer: int, key: Key, news: bytes) -> None:
        """Send news of at most LONGEST_NEWS bytes, which need no receive."""
        ...

    async def reach(self, peers: list[int]) -> None:
        """Open the connections to these peers now.

        Raises:
            PeerGoneError: one cannot be reached; names it.
        """
        ...

    async def close(self) -> None:
        """Send what is queued, say goodbye and close."""
        ...

    def abort(self) -> None:
        """Close at once, without goodbye."""
        ...

    def absent(self) -> Mapping[int, str]:
        """Peers that are gone or left, and why."""
        ...

    def traffic(self) -> Mapping[int, Traffic]:
        """Bytes so far by peer; may be called from any thread."""
        ...
