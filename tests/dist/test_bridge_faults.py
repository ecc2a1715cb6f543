"""What ranks of a bridge hear when something breaks: an error with a name, everywhere, at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetrun.bridge import (
    BridgeError,
    BridgeTimeoutError,
    MismatchError,
    NotBridgedError,
    PeerGoneError,
)
from tests.dist.bridges import join_bridge
from tests.dist.ranks import run_ranks

pytestmark = pytest.mark.dist

ISLANDS = "aabb"
LARGE = 40_000  # elements: more than fits the short way
HUGE = 16 * 1024 * 1024
SOON_S = 1.0

Heard = tuple[str, str, float]  # kind of error, its text, wall time


def caught(act: Callable[[], Any]) -> Heard:
    try:
        act()
    except RuntimeError as error:  # what callers of torch.distributed catch
        return type(error).__name__, str(error), time.time()
    return "nothing", "", time.time()


def survive(
    act: Callable[..., Any], folder: Path, *args: Any, dead: int | None = None
) -> list[Heard]:
    """Run on all ranks; those but `dead` say what they heard. Answers go through files, as a rank may die."""
    run_ranks(_survive, len(ISLANDS), folder, act, folder, dead, args)
    said = []
    for rank in range(len(ISLANDS)):
        if rank != dead:
            kind, when, text = (folder / f"heard-{rank}").read_text().split("|", 2)
            said.append((kind, text, float(when)))
    return said


def _survive(
    rank: int,
    store_path: Path,
    act: Callable[..., Any],
    folder: Path,
    dead: int | None,
    args: tuple[Any, ...],
) -> None:
    if rank == dead:
        pid = os.fork()
        if pid:  # run_ranks wants an answer of every rank: the child is the one that dies
            os.waitpid(pid, 0)
            return
    kind, text, when = act(rank, store_path, *args)
    (folder / f"heard-{rank}").write_text(f"{kind}|{when}|{text}")


def loop_until_killed(rank: int, store_path: Path, dead: int, note: str) -> Heard:
    join_bridge(rank, store_path, ISLANDS)
    tensor = torch.ones(HUGE // 8)
    other = torch.ones(HUGE // 8)
    dist.all_reduce(tensor)

    def work() -> None:
        for turn in range(200):
            if rank == dead and turn == 3:
                Path(note).write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(other, async_op=True)
            dist.all_reduce(tensor)

    return caught(work)


@pytest.mark.parametrize(
    "dead", [0, 3, *(pytest.param(rank, marks=pytest.mark.bench) for rank in (1, 2))]
)
def test_killed_rank_is_named_on_all_others_within_a_second(dead: int, tmp_path: Path) -> None:
    note = tmp_path / "killed"
    heard = survive(loop_until_killed, tmp_path, dead, str(note), dead=dead)
    killed_s = float(note.read_text())
    for kind, text, when_s in heard:
        assert (kind, f"rank {dead}: " in text) == ("PeerGoneError", True), (kind, text)
        assert when_s - killed_s < SOON_S


def stalled(rank: int, store_path: Path, operation: str) -> Heard:
    join_bridge(rank, store_path, ISLANDS, timeout_s=2.0)
    dist.barrier()
    if rank == 2:
        time.sleep(3.5)
        return "stalled", "", 0.0
    start_s = time.monotonic()
    if operation == "barrier":
        kind, text, _ = caught(dist.barrier)
    elif operation == "own limit":
        opts = dist.BarrierOptions()
        opts.timeout = timedelta(seconds=1)
        kind, text, _ = caught(lambda: dist.group.WORLD.barrier(opts).wait())
    else:
        kind, text, _ = caught(lambda: dist.all_reduce(torch.ones(LARGE)))
    return kind, text, time.monotonic() - start_s


@pytest.mark.parametrize(
    "operation", ["all_reduce", "own limit", pytest.param("barrier", marks=pytest.mark.bench)]
)
def test_rank_that_does_not_come_is_named_after_exactly_the_limit(
    operation: str, tmp_path: Path
) -> None:
    limit_s = 1.0 if operation == "own limit" else 2.0
    heard = survive(stalled, tmp_path, operation)
    for kind, text, took_s in heard[:2] + heard[3:]:
        assert kind == "BridgeTimeoutError"
        assert "waits for ranks [2]" in text
        assert limit_s - 0.1 < took_s < limit_s + SOON_S


def frozen(rank: int, store_path: Path) -> Heard:
    """A process that is stopped in the middle of a transfer."""
    join_bridge(rank, store_path, ISLANDS, timeout_s=3.0)
    tensor = torch.ones(HUGE // 4)
    dist.all_reduce(tensor)
    if rank == 3:
        child = os.fork()
        if child == 0:
            time.sleep(6.0)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        work = dist.all_reduce(tensor, async_op=True)
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGSTOP)
        return caught(work.wait)
    start_s = time.monotonic()

    def act() -> None:
        for _ in range(100):
            dist.all_reduce(tensor)

    kind, text, _ = caught(act)
    return kind, text, time.monotonic() - start_s


def test_frozen_rank_ends_all_others_after_the_limit(tmp_path: Path) -> None:
    heard = survive(frozen, tmp_path)
    for kind, _text, took_s in heard[:3]:
        assert kind == "BridgeTimeoutError"
        assert took_s < 3.0 + 3 * SOON_S  # operations before the freeze are included
    assert heard[3][0] != "nothing"


def differ(rank: int, store_path: Path, how: str, odd: int) -> Heard:
    join_bridge(rank, store_path, ISLANDS)
    count = LARGE if "large" in how else 10
    is_odd = rank == odd or ("island" in how and rank >= 2)

    def act() -> None:
        if "size" in how:
            dist.all_reduce(torch.ones(count + is_odd))
        elif "dtype" in how:
            dist.all_reduce(torch.ones(count, dtype=torch.int32 if is_odd else torch.float32))
        elif "root" in how:
            dist.broadcast(torch.ones(count), int(is_odd))
        elif is_odd:
            dist.all_reduce(torch.ones(count))
        else:
            dist.broadcast(torch.ones(count), 0)

    kind, text, when = caught(act)
    again = caught(dist.barrier)
    assert again[:2] == (kind, text)  # the group stays failed
    return kind, text, when


@pytest.mark.parametrize(
    "how",
    [
        "size",
        "large size",
        "large size of an island",
        *(
            pytest.param(how, marks=pytest.mark.bench)
            for how in ("large dtype", "root", "large operation")
        ),
    ],
)
def test_ranks_that_differ_all_hear_who_called_what(how: str, tmp_path: Path) -> None:
    odd = 2 if "island" in how or "large" not in how else 1
    heard = survive(differ, tmp_path, how, odd)
    assert {kind for kind, _, _ in heard} == {"MismatchError"}
    assert len({text for _, text, _ in heard}) == 1
    assert ("rank 2, 3: " if "island" in how else f"rank {odd}: ") in heard[0][1]
    if "size" in how:
        assert "[10]" in heard[0][1] or f"[{LARGE}]" in heard[0][1]
    assert max(when for _, _, when in heard) - min(when for _, _, when in heard) < SOON_S


def messages_differ(rank: int, store_path: Path, sent: int, awaited: int) -> Heard:
    join_bridge(rank, store_path, ISLANDS)
    if rank == 0:
        return caught(lambda: (dist.send(torch.ones(sent), 3), dist.barrier()))
    if rank == 3:
        return caught(lambda: dist.recv(torch.ones(awaited), 0))
    return caught(dist.barrier)


@pytest.mark.parametrize(("sent", "awaited"), [(5, 6), (LARGE, 6), (6, LARGE), (LARGE, LARGE + 1)])
def test_message_of_another_length_is_an_error_on_all_ranks(
    sent: int, awaited: int, tmp_path: Path
) -> None:
    heard = survive(messages_differ, tmp_path, sent, awaited)
    assert {kind for kind, _, _ in heard} == {"MismatchError"}
    assert str(4 * sent) in heard[3][1]
    assert str(4 * awaited) in heard[3][1]


def aborted(rank: int, store_path: Path) -> Heard:
    join_bridge(rank, store_path, ISLANDS)
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
        start_s = time.time()
        dist.group.WORLD.abort()
        return "aborted", "", start_s
    return caught(lambda: dist.all_reduce(torch.ones(LARGE)))


def test_abort_of_one_rank_reaches_all(tmp_path: Path) -> None:
    heard = survive(aborted, tmp_path)
    start_s = heard[1][2]
    for kind, text, when_s in (heard[0], heard[2], heard[3]):
        assert kind == "BridgeError"
        assert "rank 1 aborted" in text
        assert when_s - start_s < SOON_S


def futures(rank: int, store_path: Path) -> Heard:
    """What went wrong must not look well to whoever holds a future (also in C++)."""
    join_bridge(rank, store_path, ISLANDS, timeout_s=2.0)
    if rank == 3:
        time.sleep(3.0)
        return "stalled", "", 0.0
    work = dist.all_reduce(torch.ones(LARGE), async_op=True)
    future = work.get_future()
    child = future.then(lambda done: done.value()[0] + 1)
    first = caught(future.wait)
    assert "waits for ranks [3]" in first[1]
    assert "waits for ranks [3]" in caught(child.wait)[1]
    assert caught(work.wait)[0] == "BridgeTimeoutError"
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), BridgeTimeoutError)
    return caught(lambda: torch.futures.wait_all([future]))


def test_future_of_a_failed_operation_raises(tmp_path: Path) -> None:
    heard = survive(futures, tmp_path)
    assert all(kind != "nothing" for kind, _, _ in heard)


def strangers(rank: int, store_path: Path) -> Heard:
    join_bridge(rank, store_path, ISLANDS)
    said = []
    for act in (
        lambda: dist.all_reduce(torch.ones(3).to_sparse()),
        lambda: dist.all_reduce(torch.ones(3, device="meta")),
        lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn)),
        lambda: dist.group.WORLD.split_group([[0]]),
        lambda: dist.isend(torch.ones(3), (rank + 1) % 4, tag=-1),
    ):
        said.append(caught(act))
    total = torch.ones(3)
    dist.all_reduce(total)  # nothing of that hurt the group
    assert total.tolist() == [4.0] * 3
    dist.destroy_process_group()
    assert {kind for kind, _, _ in said} == {"NotBridgedError"}, said
    return "NotBridgedError", "; ".join(text for _, text, _ in said), 0.0


def test_what_is_not_carried_says_so_by_name_and_hurts_nobody(tmp_path: Path) -> None:
    text = survive(strangers, tmp_path)[0][1]
    for word in ("sparse", "meta", "BAND of torch.float32", "float8", "split_group", "tag -1"):
        assert word in text


def test_errors_are_those_that_callers_of_torch_catch() -> None:
    for kind in (BridgeError, BridgeTimeoutError, MismatchError, NotBridgedError, PeerGoneError):
        assert issubclass(kind, RuntimeError)
