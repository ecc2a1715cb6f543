"""Root cause among many failures."""

from __future__ import annotations

from typing import Any

from hetrun.launch.diagnose import (
    Evidence,
    Kind,
    RankProgress,
    main_frame,
    name_hang,
    root_first,
    to_failure,
)


def _piece(kind: Kind, rank: int | None, when_s: float, what: str = "x", **more: Any) -> Evidence:
    host = more.pop("host", "h1" if rank in (0, 1, 2) else "h2")
    return Evidence(kind=kind, host=host, rank=rank, when_s=when_s, what=what, **more)


def _order(*pieces: Evidence) -> list[tuple[str, int | None, str]]:
    return [(piece.host, piece.rank, piece.what) for piece in root_first(pieces)]


LOST_PEER = "raised RuntimeError: Connection closed by peer [10.0.0.1]:3021"


def test_the_earliest_failure_is_the_root_whatever_came_in_first() -> None:
    late = _piece(Kind.RAISED, 0, 12.0, "raised ValueError: b")
    early = _piece(Kind.RAISED, 3, 11.0, "raised ValueError: a")
    assert _order(late, early)[0] == ("h2", 3, "raised ValueError: a")


def test_a_silent_death_seen_late_comes_before_the_lost_connection_it_caused() -> None:
    lost = _piece(Kind.RAISED, 0, 10.00, LOST_PEER)
    died = _piece(Kind.DIED, 3, 10.04, "was killed by signal 9", signal=9)
    assert _order(lost, died) == [
        ("h2", 3, "was killed by signal 9"),
        ("h1", 0, LOST_PEER),
    ]


def test_a_lost_host_comes_before_the_connections_it_broke() -> None:
    broken = _piece(Kind.RAISED, 0, 10.0, LOST_PEER)
    lost = _piece(Kind.LOST, None, 10.5, "lost contact", host="h2")
    assert _order(broken, lost)[0] == ("h2", None, "lost contact")


def test_an_exception_of_its_own_is_not_outdone_by_a_later_death() -> None:
    raised = _piece(Kind.RAISED, 0, 10.0, "raised ValueError: bad row")
    died = _piece(Kind.DIED, 3, 10.1, "was killed by signal 6", signal=6)
    assert _order(died, raised)[0] == ("h1", 0, "raised ValueError: bad row")


def test_a_death_long_after_a_lost_connection_is_not_its_cause() -> None:
    lost = _piece(Kind.RAISED, 0, 10.0, LOST_PEER)
    died = _piece(Kind.DIED, 3, 30.0, "was killed by signal 9", signal=9)
    assert _order(lost, died)[0] == ("h1", 0, LOST_PEER)


def test_what_a_rank_raised_and_its_exit_code_are_one_failure() -> None:
    raised = _piece(Kind.RAISED, 1, 10.0, "raised ValueError: bad row")
    died = _piece(Kind.DIED, 1, 9.9, "ended with exit code 1")
    for pieces in ((raised, died), (died, raised)):
        (root,) = root_first(pieces)
        assert (root.what, root.when_s) == ("raised ValueError: bad row", 9.9)


def test_what_torchrun_does_after_a_failure_is_left_out() -> None:
    raised = _piece(Kind.RAISED, 1, 10.0, "raised ValueError: bad row")
    ended = _piece(Kind.DIED, 2, 10.2, "was killed by signal 15", signal=15)
    agent = _piece(Kind.AGENT, None, 10.3, "torchrun ended with exit code 1", host="h1")
    assert len(_order(agent, ended, raised)) == 1
    assert _order(agent) == [("h1", None, "torchrun ended with exit code 1")]


def test_a_failure_carries_over_to_the_outcome() -> None:
    failure = to_failure(_piece(Kind.DIED, 3, 10.0, "was killed by signal 9", last_lines=("a",)))
    assert (failure.host, failure.rank, failure.last_lines) == ("h2", 3, ("a",))


def _rank(rank: int, **changes: Any) -> RankProgress:
    values: dict[str, Any] = {"host": "h1", "rank": rank, "started": True, "last_step": 4}
    values |= {"state": "S", "frame": "groups.py:9 in wait", "waits_for_peers": True}
    return RankProgress(**{**values, **changes})


def _hang(*ranks: RankProgress) -> list[tuple[int | None, str]]:
    return [(piece.rank, piece.what) for piece in name_hang(ranks, 60.0, 1.0)]


def test_a_stopped_rank_is_the_one_that_hangs() -> None:
    assert _hang(_rank(0), _rank(1, state="T", frame=None), _rank(2)) == [
        (1, "is stopped (SIGSTOP) after step 4: nothing for 60 s")
    ]


def test_the_rank_that_is_a_step_behind_hangs() -> None:
    assert [rank for rank, _ in _hang(_rank(0), _rank(1, last_step=3), _rank(2))] == [1]


def test_among_equals_the_one_that_waits_for_nobody_hangs() -> None:
    busy = _rank(2, frame="data.py:7 in read", waits_for_peers=False)
    assert _hang(_rank(0), _rank(1), busy) == [
        (2, "hangs after step 4: nothing for 60 s, at data.py:7 in read")
    ]


def test_when_nothing_tells_them_apart_all_are_named() -> None:
    assert [rank for rank, _ in _hang(_rank(0), _rank(1))] == [0, 1]


def test_ranks_that_never_came_up_are_named_before_those_that_did() -> None:
    late = _rank(1, started=False, last_step=None, frame=None)
    assert _hang(_rank(0, last_step=None), late) == [
        (1, "hangs before it was ready: nothing for 60 s")
    ]


DUMP = """Fatal Python error: Aborted

Thread 0x00007f3a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f3b (most recent call first):
  File "/b.zip/hetrun/runtime/data.py", line 12 in read
  File "/b.zip/hetrun/runtime/loop.py", line 67 in train
"""


def test_the_main_threads_frame_is_read_from_a_dump() -> None:
    assert main_frame(DUMP.splitlines()) == ("/b.zip/hetrun/runtime/data.py", 12, "read")
    assert main_frame(["no dump"]) is None
