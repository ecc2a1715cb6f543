"""What a worker process owes its host: it ends with its parent, and its end leaves no thread behind.

What runs in between is left to `worker.py` and to what profile starts.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from hetrun.errors import HetrunError

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29  # in nanoseconds; 0 is the default, 1 the least


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, even by SIGKILL; leave if it is dead already."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        log.warning("cannot follow the parent's death: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:
        leave(1)


def sleep_tightly() -> None:
    """Ask the kernel to end this thread's sleeps on time (33 us late instead of 85, measured); where it cannot, nothing changes."""
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is None or prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0) != 0:
        log.info("sleeps may be late by the system's timer slack")


class Stop:
    """A wish to stop in order: the first SIGTERM or SIGINT is kept until it is asked for, later ones change nothing.

    Whoever will not wait sends SIGKILL.
    """

    def __init__(self) -> None:
        self._signal: int | None = None

    def watch(self) -> None:
        """Take the signals over."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def is_wanted(self) -> bool:
        """Whether a signal came."""
        return self._signal is not None

    def end(self) -> NoReturn:
        """End by the signal that came, or by SIGTERM where another rank got it: for the parent it is as if it had hit."""
        number = self._signal or signal.SIGTERM
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        leave(128 + number)  # it is blocked

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal = number


def leave(code: int) -> NoReturn:
    """Flush and end at once.

    Communicator threads that still run at interpreter exit abort some of the time ("terminate called
    without an active exception"), so no destructor gets a chance to run.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def measuring(run: Callable[[Sequence[str]], None]) -> int:
    """Call `run` with the arguments of a process that profile started; return its exit code, the error told."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    die_with_parent()
    try:
        run(sys.argv[1:])
    except HetrunError as error:
        log.error("error: %s", error)  # noqa: TRY400 - the message says all
        if error.hint:
            log.error("hint: %s", error.hint)  # noqa: TRY400
        return 1
    return 0
