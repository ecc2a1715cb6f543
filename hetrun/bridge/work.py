"""What a caller holds of an operation under way: it waits, and failures really raise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetrun.bridge.callbacks import Callbacks
from hetrun.bridge.failure import BridgeError, BridgeTimeoutError

_NO_LIMIT_S = 0.0


class BridgeWork(dist.Work):
    """One operation, or several that are waited for as one.

    Futures are completed by `callbacks`, never by the bridge's own thread.
    """

    def __init__(self, what: str, results: Sequence[Any], callbacks: Callbacks) -> None:
        """`results` are what the future's value is; the tensors are filled when the work is done."""
        super().__init__()
        self.what = what
        self._results = list(results)
        self._callbacks = callbacks
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BridgeError | None = None
        self._then: list[Callable[[], None]] = []
        self._future: torch.futures.Future[Any] | None = None
        self.source: int | None = None  # sender of a message, as number in the group
        self._patience_s = (
            _NO_LIMIT_S  # of a wait without limit; 0: the operation has a deadline itself
        )
        self._impatient: Callable[[BridgeError], None] | None = None

    def be_patient_for(self, limit_s: float, impatient: Callable[[BridgeError], None]) -> None:
        """Let `wait` give up after so long, and call `impatient` then or when its own limit is over."""
        self._patience_s, self._impatient = limit_s, impatient

    def finish(self, error: BridgeError | None, *, source: int | None = None) -> None:
        """Say that it is over; once."""
        with self._lock:
            if self._done.is_set():
                return
            self._error, self.source = error, source
            self._done.set()
            then, self._then = self._then, []
        for call in then:
            call()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call something when it is over, or now; it must not wait for anything."""
        with self._lock:
            if not self._done.is_set():
                self._then.append(call)
                return
        call()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is over.

        Raises:
            BridgeError: it failed.
            BridgeTimeoutError: it is not over in time; the group is of no more use.
        """
        limit_s = timeout.total_seconds() if timeout is not None else _NO_LIMIT_S
        if limit_s <= _NO_LIMIT_S:  # what torch passes for "none"
            limit_s = self._patience_s
        if not self._done.wait(limit_s if limit_s > _NO_LIMIT_S else None):
            error = BridgeTimeoutError(f"{self.what} was not done within {limit_s:g} s")
            if self._impatient is not None:
                self._impatient(error)
            raise error
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As `wait`: results are in host memory."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BridgeError | None:
        """What went wrong, if it did."""
        return self._error

    def source_rank(self) -> int:
        """The sender of what a receive from any rank got."""
        if self.source is None:
            raise BridgeError(f"{self.what} has no sender")
        return self.source

    _source_rank = source_rank  # the name that torch.distributed calls

    def result(self) -> list[Tensor]:
        """The tensors that it fills, after waiting."""
        self.wait()
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of `result`; errors raise from its `wait` and `value`, in C++ as well."""
        with self._lock:
            if self._future is None:
                base: torch.futures.Future[Any] = torch.futures.Future()
                # An exception set from Python is none for C++; one that a callback raises is.
                self._future = base.then(self._value)
                level = self._callbacks.level()

                def complete() -> None:
                    self._callbacks.run(level, self._done, lambda: base.set_result(None))

                if self._patience_s > _NO_LIMIT_S and not self._done.is_set():
                    self._then.append(
                        complete
                    )  # a message may take its time: others must not wait for it
                else:
                    complete()
            return self._future

    def _value(self, _base: torch.futures.Future[Any]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._results


def joined(works: Sequence[BridgeWork], what: str, callbacks: Callbacks) -> BridgeWork:
    """Several works as one: over when all are, failed when one did."""
    whole = BridgeWork(what, [result for work in works for result in work._results], callbacks)  # noqa: SLF001
    left = [len(works)]
    lock = threading.Lock()

    def one_less() -> None:
        with lock:
            left[0] -= 1
            last = left[0] == 0
        if last:
            errors = [error for work in works if (error := work.exception()) is not None]
            whole.finish(errors[0] if errors else None)

    for work in works:
        work.when_done(one_less)
    if not works:
        whole.finish(None)
    return whole
