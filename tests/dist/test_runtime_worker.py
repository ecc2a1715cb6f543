"""One rank as a process: what it writes, how it ends, and that it refuses to train beside the wrong ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.model import DataKind, DataSpec, Dtype, Plan
from tests.dist.jobs import (
    kinds,
    read_events,
    run_torchrun,
    run_workers,
    running,
    wait,
    write_job,
)
from tests.dist.plans import SEQ_LEN, Pipeline, make_plan, with_train

pytestmark = pytest.mark.dist

TWO_RANKS = (Pipeline((5, 3), 1, 4),)
ONE_RANK = (Pipeline((8,), 1, 2),)


def test_torchrun_trains_a_plan_and_every_rank_says_so(tmp_path: Path) -> None:
    plan = make_plan(TWO_RANKS, steps=4, dtype=Dtype.FP32)
    job = write_job(tmp_path / "job", plan)
    ended = run_torchrun(job, 2)
    assert ended.code == 0, ended.output
    expected = ["start", "step", "step", "trace", "step", "step", "trace", "end"]
    both = [read_events(job, rank) for rank in range(2)]
    for rank, events in enumerate(both):
        assert kinds(events) == expected
        assert {event["rank"] for event in events} == {rank}
        assert events[0]["device"].startswith("emulated")
        assert events[-1]["steps"] == 4
        steps = [event for event in events if event["event"] == "step"]
        for step in steps:
            parts = step["busy_s"] + step["communication_s"] + step["idle_s"]
            assert parts == pytest.approx(step["step_s"])
            assert step["num_tokens"] == 4 * SEQ_LEN
    losses = [[e["loss"] for e in events if e["event"] == "step"] for events in both]
    assert losses[0] == losses[1]
    assert both[0][-1]["parameters_sha"] != both[1][-1]["parameters_sha"]


def test_real_clock_adds_up_to_the_step(tmp_path: Path) -> None:
    plan = make_plan(TWO_RANKS, steps=2, emulated=False)
    job = write_job(tmp_path / "job", plan)
    for ended in run_workers([job, job]):
        assert ended.code == 0, ended.output
    for rank in range(2):
        step = read_events(job, rank)[2]
        assert step["busy_s"] > 0
        assert step["busy_s"] + step["communication_s"] + step["idle_s"] == pytest.approx(
            step["step_s"]
        )


@pytest.mark.parametrize(
    ("fault", "code", "kind"),
    [("raise", 1, "RuntimeError"), ("exit", 3, None), ("kill", -signal.SIGKILL, None)],
)
def test_fault_on_one_rank_ends_the_other_with_its_name(
    fault: str, code: int, kind: str | None, tmp_path: Path
) -> None:
    plan = make_plan(TWO_RANKS, steps=50)
    job = write_job(tmp_path / "job", plan, {"HETRUN_TEST_FAULT": f"{fault}:1:2"})
    healthy, faulty = run_workers([job, job])
    assert (healthy.code, faulty.code) == (1, code)
    last = read_events(job, 1)[-1]
    if kind is not None:
        assert (last["kind"], last["step"]) == (kind, 2)
        assert "HETRUN_TEST_FAULT" in last["traceback"]
    else:
        assert last["event"] != "error"
    follower = read_events(job, 0)[-1]
    assert follower["kind"] == "PeerLostError"
    assert "rank 1" in follower["message"]


def _other_plan(plan: Plan) -> Plan:
    return with_train(plan, learning_rate=0.5)


def test_ranks_with_different_plans_all_stop_before_the_first_step(tmp_path: Path) -> None:
    plan = make_plan(TWO_RANKS)
    jobs = [write_job(tmp_path / "a", plan), write_job(tmp_path / "b", _other_plan(plan))]
    for rank, ended in enumerate(run_workers(jobs)):
        assert ended.code == 1
        (event,) = read_events(jobs[rank], rank)
        assert event["kind"] == "DisagreementError"
        assert "plan differs: rank" in event["message"]


def test_ranks_with_different_texts_all_stop_before_the_first_step(tmp_path: Path) -> None:
    data = DataSpec(
        seq_len=SEQ_LEN, kind=DataKind.TEXT, path="/proc/self/cwd/text"
    )  # beside each job
    plan = make_plan(TWO_RANKS)
    plan = replace(plan, recipe=replace(plan.recipe, data=data))
    jobs = [write_job(tmp_path / name, plan) for name in ("rose", "nose")]
    for job in jobs:
        (job / "text").write_text(f"a {job.name} is a {job.name} " * 20)
    for rank, ended in enumerate(run_workers(jobs)):
        assert ended.code == 1
        (event,) = read_events(jobs[rank], rank)
        assert event["kind"] == "DisagreementError"
        assert "training text differs" in event["message"]
        assert "one file copied to all hosts" in ended.output


def test_wrong_world_size_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", make_plan(TWO_RANKS))
    (ended,) = run_workers([job])
    assert ended.code == 1
    assert "torchrun started 1 ranks, the plan has 2" in ended.output


def test_wrong_host_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", make_plan(ONE_RANK), {"HETRUN_HOST": "elsewhere"})
    (ended,) = run_workers([job])
    assert ended.code == 1
    assert read_events(job, 0)[0]["kind"] == "ConfigError"
    assert "'elsewhere'" in ended.output


def test_emulated_chip_without_memory_refuses_its_stage(tmp_path: Path) -> None:
    plan = make_plan(ONE_RANK)
    small = tuple(replace(rank, memory_bytes=999) for rank in plan.split.ranks)
    plan = replace(plan, split=replace(plan.split, ranks=small))
    job = write_job(tmp_path / "job", plan)
    (ended,) = run_workers([job])
    assert ended.code == 1
    assert read_events(job, 0)[0]["kind"] == "OutOfMemoryError"


def test_full_disk_ends_the_run_with_a_message(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", make_plan(ONE_RANK))
    (job / "events").mkdir()
    (job / "events" / "rank-0000.jsonl").symlink_to("/dev/full")
    (ended,) = run_workers([job])
    assert ended.code == 1
    assert "cannot write events to" in ended.output
    assert "No space left on device" in ended.output
    assert "this error is in no event" in ended.output


def test_diverged_loss_is_an_error_not_a_number(tmp_path: Path) -> None:
    plan = with_train(make_plan(ONE_RANK), learning_rate=1e300, warmup_steps=0, clip_norm=None)
    job = write_job(tmp_path / "job", plan)
    (ended,) = run_workers([job])
    assert ended.code == 1
    assert read_events(job, 0)[-1]["kind"] == "JobError"
    assert "lower learning_rate" in ended.output


def test_worker_dies_with_its_parent(tmp_path: Path) -> None:
    child = (
        "from hetrun.runtime.process import die_with_parent; import time;"
        "die_with_parent(); print('up', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys, time;"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE);"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)"
    )
    with running([sys.executable, "-c", parent], {}) as process:
        assert process.stdout is not None
        child_pid = int(process.stdout.readline())
        process.kill()
        deadline_s = time.monotonic() + 30
        while _is_alive(child_pid) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not _is_alive(child_pid)


def test_worker_without_arguments_says_what_it_needs() -> None:
    with running([sys.executable, "-m", "hetrun.runtime.worker"], {}) as process:
        ended = wait(process)
    assert ended.code == 1
    assert "need the job directory" in ended.output


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"
