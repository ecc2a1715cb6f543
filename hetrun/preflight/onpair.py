"""Runs on each host beside all others: calls every peer on its data address and has 1 MiB echoed.

Standard library only; sent as source. Strangers on the network are let in nowhere: both ends prove that they hold
the one-time token (`hetrun/greeting.py`).
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from typing import Any

from hetrun.greeting import family_of, greet, listen, receive

ATTEMPT_S = 2.0
RETRY_S = 0.05
AT_ONCE = 8
PINGS = 5


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Serve and call until all pairs are through or `deadline_s` has passed."""
    token = bytes.fromhex(config["token"])
    ends_s = time.monotonic() + config["deadline_s"]
    try:
        server = _Server(config, token, ends_s)
    except OSError as error:
        return {"pairs": [], "listen_error": f"{error.strerror or error}"}
    todo: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for peer in config["peers"]:
        todo.put(peer)
    results: list[dict[str, Any]] = []

    def work() -> None:
        while True:
            try:
                peer = todo.get_nowait()
            except queue.Empty:
                return
            results.append({"to": peer["name"], **_call(config, peer, token, ends_s)})

    threads = [threading.Thread(target=work, daemon=True) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends_s + ATTEMPT_S - time.monotonic()))
    server.await_all(len(config["peers"]))
    return {"pairs": results}


class _Server:
    """Echoes for everybody who holds the token."""

    def __init__(self, config: dict[str, Any], token: bytes, ends_s: float) -> None:
        self._token = token
        self._ends_s = ends_s
        self._size = int(config["echo_bytes"])
        self._served = threading.Semaphore(0)
        self._socket = listen(config["addr"], config["ports"], backlog=128)
        threading.Thread(target=self._accept, daemon=True).start()

    def await_all(self, count: int) -> None:
        """Return once so many peers were served, or at the deadline."""
        for _ in range(count):
            left_s = self._ends_s - time.monotonic()
            if left_s <= 0 or not self._served.acquire(timeout=left_s):
                return

    def _accept(self) -> None:
        while True:
            stream, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        try:
            with stream:
                stream.settimeout(ATTEMPT_S)
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not greet(stream, self._token, is_server=True):
                    return
                for _ in range(PINGS):
                    stream.sendall(receive(stream, 8))
                stream.sendall(receive(stream, self._size))
                receive(stream, 1)
                self._served.release()
        except OSError:  # the caller says what went wrong
            return


def _call(
    config: dict[str, Any], peer: dict[str, Any], token: bytes, ends_s: float
) -> dict[str, Any]:
    """Try the peer's ports in turn until the one behind it proves that it holds the token."""
    why = "nobody answered"
    while time.monotonic() < ends_s:
        for port in peer["ports"]:
            stream = socket.socket(family_of(peer["addr"]), socket.SOCK_STREAM)
            try:
                with stream:
                    left_s = max(0.1, ends_s - time.monotonic())
                    stream.settimeout(min(ATTEMPT_S, left_s))
                    stream.bind((config["addr"], 0))
                    stream.connect((peer["addr"], port))
                    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    if greet(stream, token, is_server=False):
                        return _measure(stream, int(config["echo_bytes"]))
                    why = f"port {port} belongs to somebody else"
            except TimeoutError:
                why = "no answer in time"
            except OSError as error:
                why = error.strerror or str(error)
            if time.monotonic() >= ends_s:
                break
        time.sleep(RETRY_S)
    return {"error": why}


def _measure(stream: socket.socket, size: int) -> dict[str, Any]:
    shortest_s = float("inf")
    for number in range(PINGS):
        sent = number.to_bytes(8, "big")
        started_s = time.perf_counter()
        stream.sendall(sent)
        if receive(stream, 8) != sent:
            return {"error": "what came back was not what was sent"}
        shortest_s = min(shortest_s, time.perf_counter() - started_s)
    data = os.urandom(size)
    started_s = time.perf_counter()
    stream.sendall(data)
    back = receive(stream, size)
    took_s = time.perf_counter() - started_s
    stream.sendall(b"!")
    if back != data:
        return {"error": "what came back was not what was sent"}
    # There and back one after the other, since the peer answers when it has all.
    return {"latency_s": shortest_s / 2, "bytes_per_s": 2 * size / max(took_s, 1e-9)}
