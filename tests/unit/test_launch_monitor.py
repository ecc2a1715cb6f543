"""What frames of the hosts say about a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

import hetrun.runtime.worker
from hetrun.launch.diagnose import Kind, root_first
from hetrun.launch.monitor import Monitor, waits_for_peers
from hetrun.launch.rundir import RunDir
from hetrun.model import HostSpec
from tests.ssh.plans import Recorder, make_plan

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def monitor(tmp_path: Path, recorder: Recorder) -> Iterator[Monitor]:
    plan = make_plan([(HostSpec(name="a1"), 1), (HostSpec(name="b1"), 1)])
    run_dir = RunDir(tmp_path, "tiny", NOW, ["s3cret-value"])
    yield Monitor(plan, run_dir, recorder)
    run_dir.close()


def _event(monitor: Monitor, at: str, rank: int, **fields: Any) -> None:
    line = json.dumps({"rank": rank, "wall_s": 100.0, **fields}).encode() + b"\n"
    meta = {"t": "chunk", "file": f"events/rank-{rank:04}.jsonl", "dropped": 0}
    monitor.on_frame(at, meta, line, 0.0)


START = {"event": "start", "host": "x", "pid": 1, "torch_version": "2", "device": "cpu"}
END = {"event": "end", "steps": 5, "parameters_sha": "0"}
ERROR = {"event": "error", "host": "b1", "step": 2, "kind": "ValueError", "message": "bad"}


def test_times_of_failures_are_put_on_our_clock(monitor: Monitor) -> None:
    monitor.on_clock("b1", 150.0, 99.0, 101.0)  # 50 s ahead
    monitor.on_clock("b1", 190.0, 95.0, 105.0)  # a slower answer tells less
    _event(monitor, "b1", 1, **ERROR, traceback="")
    (piece,) = monitor.evidence
    assert (piece.when_s, piece.what) == (50.0, "raised ValueError: bad")


def test_all_started_only_when_every_rank_said_so(monitor: Monitor) -> None:
    seen = []
    for rank, host in enumerate(("a1", "b1")):
        _event(monitor, host, rank, **START)
        seen.append(monitor.all_started)
    assert seen == [False, True]
    assert monitor.progressed


def test_an_end_before_the_end_event_is_a_failure(monitor: Monitor) -> None:
    for rank, host in enumerate(("a1", "b1")):
        meta = {
            "t": "rank",
            "rank": rank,
            "local_rank": 0,
            "status": 0,
            "wall_s": 5.0,
            "oom": False,
        }
        if rank == 0:
            _event(monitor, host, rank, **END)
        monitor.on_frame(host, meta, b"", 0.0)
    (piece,) = monitor.evidence
    assert (piece.rank, piece.what) == (1, "ended with exit code 0 before its last step")


def test_an_exit_that_was_missed_is_read_from_torchruns_words(monitor: Monitor) -> None:
    line = b"E1130 failed (exitcode: -9) local_rank: 0 (pid: 77) of binary: /usr/bin/python\n"
    monitor.on_frame("b1", {"t": "chunk", "file": "agent", "dropped": 0}, line, 0.0)
    meta = {"t": "rank", "rank": 1, "local_rank": 0, "status": None, "wall_s": 5.0, "oom": False}
    monitor.on_frame("b1", meta, b"", 0.0)
    (piece,) = monitor.evidence
    assert piece.what == "was killed by signal 9"


def test_a_death_for_want_of_memory_is_called_so(monitor: Monitor) -> None:
    meta = {"t": "rank", "rank": 1, "local_rank": 0, "status": 9, "wall_s": 5.0, "oom": True}
    monitor.on_frame("b1", meta, b"", 0.0)
    (piece,) = monitor.evidence
    assert (piece.what, piece.signal) == ("was killed by signal 9 (out of memory)", 9)


def test_a_torchrun_that_hangs_after_its_ranks_is_named(monitor: Monitor) -> None:
    for rank, host in enumerate(("a1", "b1")):
        _event(monitor, host, rank, **END)
    monitor.on_frame("a1", {"t": "empty", "left": []}, b"", 0.0)
    monitor.hang(60.0, 5.0)
    (piece,) = monitor.evidence
    assert (piece.host, piece.what) == ("b1", "torchrun hangs though its ranks are done")


def test_the_death_of_all_processes_of_a_host_comes_before_the_peers_that_miss_them(
    monitor: Monitor,
) -> None:
    words = {"kind": "PeerLostError", "message": "rank 1 did not send the gradient"}
    _event(monitor, "a1", 0, **{**ERROR, **words, "wall_s": 4.9, "traceback": ""})
    monitor.on_frame("b1", {"t": "lost"}, b"", 5.0)
    root, *_ = root_first(monitor.evidence)
    assert (root.host, root.rank) == ("b1", None)


def test_a_host_cannot_speak_for_ranks_of_another(monitor: Monitor) -> None:
    meta = {"t": "chunk", "file": "logs/rank-0001.stdout", "dropped": 0}
    with pytest.raises(ValueError, match="a1 speaks for rank 1"):
        monitor.on_frame("a1", meta, b"hello\n", 0.0)


def test_a_port_that_was_taken_in_between_is_said(monitor: Monitor) -> None:
    line = b"RuntimeError: The server socket has failed to bind. EADDRINUSE\n"
    monitor.on_frame("a1", {"t": "chunk", "file": "agent", "dropped": 0}, line, 0.0)
    monitor.on_frame("a1", {"t": "agent", "status": 256, "wall_s": 5.0}, b"", 0.0)
    (piece,) = monitor.evidence
    assert piece.kind is Kind.AGENT
    assert "its port was taken in between" in piece.what


def test_lines_go_to_the_ranks_log_and_the_merged_one_without_secrets(
    monitor: Monitor, recorder: Recorder, tmp_path: Path
) -> None:
    for part in (b"key=s3cret-", b"value\x1b[31m!\nunfinished"):
        meta = {"t": "chunk", "file": "logs/rank-0001.stdout", "dropped": 0}
        monitor.on_frame("b1", meta, part, 0.0)
    monitor.flush()
    run = tmp_path / "20300102-030405-tiny"
    assert (run / "logs/rank-0001.log").read_text() == "key=***!\nunfinished\n"
    assert (run / "all.log").read_text() == "b1/1 key=***!\nb1/1 unfinished\n"
    assert recorder.lines == [("b1", 1, "key=***!"), ("b1", 1, "unfinished")]


@pytest.mark.parametrize(
    "line",
    [b"not json", b"[]", b'{"event": "unknown"}', b'{"event": "end", "rank": 1}', b"[" * 5000],
)
def test_bad_events_are_counted_and_do_no_harm(
    monitor: Monitor, recorder: Recorder, line: bytes
) -> None:
    meta = {"t": "chunk", "file": "events/rank-0001.jsonl", "dropped": 0}
    monitor.on_frame("b1", meta, line + b"\n", 0.0)
    monitor.flush()
    assert recorder.events == []
    assert monitor.warnings == ["1 lines of event files could not be read"]


def test_a_rank_cannot_speak_for_another(monitor: Monitor, recorder: Recorder) -> None:
    line = json.dumps({"rank": 0, "wall_s": 1.0, **END}).encode() + b"\n"
    meta = {"t": "chunk", "file": "events/rank-0001.jsonl", "dropped": 0}
    monitor.on_frame("b1", meta, line, 0.0)
    assert recorder.events == []


def test_waiting_for_peers_is_told_from_own_work() -> None:
    assert waits_for_peers("/x/torch/distributed/distributed_c10d.py", 1, "f")
    assert waits_for_peers("/b.zip/somewhere.py", 1, "barrier")
    source = Path(hetrun.runtime.worker.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "time.sleep(" in text)
    assert not waits_for_peers("/b.zip/hetrun/runtime/worker.py", line, "_fail")
