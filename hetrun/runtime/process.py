"""What a worker process owes its host: it ends with its parent, and its end leaves no thread behind.

What runs in between is left to `worker.py` and `bench.py`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from typing import NoReturn

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, even by SIGKILL; leave if it is dead already."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        log.warning("cannot follow the parent's death: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:
        leave(1)


def leave(code: int) -> NoReturn:
    """Flush and end at once.

    Communicator threads that still run at interpreter exit abort some of the time ("terminate called
    without an active exception"), so no destructor gets a chance to run.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
