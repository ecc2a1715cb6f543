"""One function over many hosts at once; a dead host never stops the others. What is said to each is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from hetrun.errors import HetrunError
from hetrun.model import HostSpec
from hetrun.transport import Transport
from hetrun.transport.connect import open_transport
from hetrun.transport.threads import call_all

T = TypeVar("T")

_TICK_S = 0.1
MAX_AT_ONCE = 32  # hosts of one call; how many may be connecting per first hop stands in ssh.py


def on_all(
    specs: Sequence[HostSpec],
    function: Callable[[Transport], T],
    *,
    progress: Callable[[str, T | HetrunError], None] | None = None,
    tick: Callable[[], None] | None = None,
    at_once: int = MAX_AT_ONCE,
) -> dict[str, T | HetrunError]:
    """Open each host, call the function on it, close it; return answers by host name in the order given.

    `progress(host, answer)` is called in the caller's thread as each host is through. An error that is
    not a HetrunError is a bug and is raised. Deadlines are the function's own. `tick` is called while waiting
    and may raise to leave.
    """
    transports = {spec.name: open_transport(spec) for spec in specs}
    answers: dict[str, T | HetrunError] = {}
    futures = call_all(
        {host: partial(_one, transport, function) for host, transport in transports.items()},
        at_once=at_once,
    )
    names = {future: host for host, future in futures.items()}
    timeout_s = _TICK_S if tick else None
    try:
        waiting: set[Future[T | HetrunError]] = set(names)
        while waiting:
            done, waiting = wait(waiting, timeout=timeout_s, return_when="FIRST_COMPLETED")
            for host in [host for host, future in futures.items() if future in done]:
                answers[host] = futures[host].result()
                if progress:
                    progress(host, answers[host])
            if tick:
                tick()
    finally:  # after Ctrl-C too: closing makes the threads that are still at work fail at once
        for future in names:
            future.cancel()
        for transport in transports.values():
            transport.close()
    return {host: answers[host] for host in transports}


def _one(transport: Transport, function: Callable[[Transport], T]) -> T | HetrunError:
    try:
        return function(transport)
    except HetrunError as error:
        return error
    finally:
        transport.close()
