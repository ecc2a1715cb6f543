"""What can go wrong between islands, by name. Who notices and who is told is left to `context.py`.

All of them are RuntimeErrors as well, since that is what code over torch.distributed catches.
"""

from __future__ import annotations

import json

from hetrun.errors import JobError


class BridgeError(JobError, RuntimeError):
    """An operation of the bridge did not happen; the group it belongs to is of no more use."""


class PeerGoneError(BridgeError):
    """A rank closed its connection, cannot be reached or does not hold the run's secret."""


class MismatchError(BridgeError):
    """Ranks of one group called different operations, or the same with different sizes."""


class BridgeTimeoutError(BridgeError):
    """An operation was not done in time; names the ranks that it waited for."""


class NotBridgedError(BridgeError):
    """An operation, dtype or device that the bridge does not carry."""


_BY_NAME = {
    kind.__name__: kind
    for kind in (BridgeError, PeerGoneError, MismatchError, BridgeTimeoutError, NotBridgedError)
}
_LONGEST_TEXT = 2000


def pack_failure(error: BridgeError) -> bytes:
    """Write an error down for another rank: plain JSON, since torch versions differ."""
    text = {"kind": type(error).__name__, "message": error.message[:_LONGEST_TEXT]}
    return json.dumps(text).encode()


def unpack_failure(data: bytes, sender: int) -> BridgeError:
    """Read what another rank wrote; whatever it is, an error comes out."""
    try:
        said = json.loads(data)
        kind, message = _BY_NAME[said["kind"]], str(said["message"])[:_LONGEST_TEXT]
    except (ValueError, KeyError, TypeError):
        return BridgeError(f"rank {sender} failed and did not say how")
    return kind(message)
