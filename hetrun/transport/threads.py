"""Calls side by side in threads that never keep the program from ending. What is called is left to the caller."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_all(calls: Mapping[str, Callable[[], T]], *, at_once: int) -> dict[str, Future[T]]:
    """Start all calls, so many at once; cancel the futures of those that shall not begin any more."""
    futures: dict[str, Future[T]] = {name: Future() for name in calls}
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in calls:
        todo.put(name)

    def work() -> None:
        while True:
            try:
                name = todo.get_nowait()
            except queue.Empty:
                return
            future = futures[name]
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(calls[name]())
            except BaseException as error:  # noqa: BLE001  raised again by future.result()
                future.set_exception(error)

    for number in range(min(at_once, len(calls))):
        threading.Thread(target=work, daemon=True, name=f"call {number}").start()
    return futures
