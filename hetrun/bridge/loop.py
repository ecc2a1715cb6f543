"""The one thread on which the bridge of a process lives: sockets, timers and operations under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="hetrun-bridge", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """Run a coroutine there and wait for what it returns.

        Raises:
            TimeoutError: it took longer (it is cancelled then).
        """
        handle = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return handle.result(timeout_s)
        finally:
            handle.cancel()

    def stop(self) -> None:
        """End the thread; what still runs there is cancelled."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
