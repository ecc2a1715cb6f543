"""Runs a function once per rank in real processes, forked from a server that imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.dist.preload"])


class RankFailedError(Exception):
    """Some rank raised, died or did not answer in time."""


def run_ranks(
    function: Callable[..., Any], world_size: int, folder: Path, *args: Any, timeout_s: float = 50.0
) -> list[Any]:
    """Call `function(rank, store_path, *args)` in `world_size` processes; return the answers in order of rank.

    No process is left behind, whatever happens.
    """
    store_path = folder / f"store-{time.monotonic_ns()}"
    processes, pipes = [], []
    for rank in range(world_size):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_main, args=(sender, timeout_s, function, rank, store_path, *args)
        )
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        return _answers(pipes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def _answers(pipes: list[Connection], timeout_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    deadline_s = time.monotonic() + timeout_s
    while len(answers) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait(waiting, timeout=deadline_s - time.monotonic())
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in answers]
            raise RankFailedError(f"ranks {missing} gave no answer within {timeout_s} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                good, answer = pickle.loads(pipes[rank].recv_bytes())  # noqa: S301 - our own child
            except EOFError:
                raise RankFailedError(f"rank {rank} died") from None
            if not good:
                raise RankFailedError(f"rank {rank} raised:\n{answer}")
            answers[rank] = answer
    return [answers[rank] for rank in range(len(pipes))]


def _main(
    pipe: Connection,
    timeout_s: float,
    function: Callable[..., Any],
    rank: int,
    store_path: Path,
    *args: Any,
) -> None:
    signal.alarm(int(timeout_s) + 10)  # whoever forgets this process, it ends
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        answer = (True, function(rank, store_path, *args))
    except BaseException:  # noqa: BLE001 - told to the parent, who raises
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # communicator threads may abort in a normal exit
