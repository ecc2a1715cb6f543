"""Where callbacks of futures run: one after the other, in the order in which the futures were asked for.

So operations that callbacks start come in the same order on all ranks, whichever finishes first. A callback may wait
for operations that it starts itself: their futures are completed one level deeper, by a thread of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_Item = tuple[threading.Event, Callable[[], None]]


class Callbacks:
    """The threads of one process; a level's thread starts with its first future."""

    def __init__(self) -> None:
        self._levels: list[queue.SimpleQueue[_Item | None]] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._here = threading.local()

    def level(self) -> int:
        """The level that futures asked for by this thread are completed on."""
        return getattr(self._here, "level", -1) + 1

    def run(self, level: int, ready: threading.Event, complete: Callable[[], None]) -> None:
        """Call `complete` once `ready` is set and all that was put on this level before has run."""
        with self._lock:
            while len(self._levels) <= level:
                self._start(len(self._levels))
        self._levels[level].put((ready, complete))

    def stop(self, timeout_s: float) -> None:
        """End the threads; one that a callback holds is left behind."""
        for level in self._levels:
            level.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _start(self, level: int) -> None:
        waiting: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        name = f"hetrun-bridge-callbacks-{level}"
        thread = threading.Thread(target=self._work, args=(level, waiting), name=name, daemon=True)
        self._levels.append(waiting)
        self._threads.append(thread)
        thread.start()

    def _work(self, level: int, waiting: queue.SimpleQueue[_Item | None]) -> None:
        self._here.level = level
        while (item := waiting.get()) is not None:
            ready, complete = item
            ready.wait()
            complete()
