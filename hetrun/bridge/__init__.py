"""One torch.distributed backend over the communicators of several vendors.

`register()` makes `init_process_group("het")` work. The rest is found where it is made.
"""

from hetrun.bridge.backend import register, traffic
from hetrun.bridge.failure import (
    BridgeError,
    BridgeTimeoutError,
    MismatchError,
    NotBridgedError,
    PeerGoneError,
)
from hetrun.bridge.topology import Settings

__all__ = [
    "BridgeError",
    "BridgeTimeoutError",
    "MismatchError",
    "NotBridgedError",
    "PeerGoneError",
    "Settings",
    "register",
    "traffic",
]
