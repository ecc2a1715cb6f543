"""A run that goes on from a checkpoint, under whatever plan, is the run that was never interrupted."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import pytest

from hetrun.model import Order, Plan
from hetrun.runtime import checkpoint_files
from tests.dist.jobs import free_port, read_events, start_worker, wait, write_job
from tests.dist.plans import MODEL, Pipeline, make_plan, with_train
from tests.dist.ranks import RankFailedError
from tests.dist.saving import (
    SavingAnswer,
    merged,
    on_hosts,
    save_all,
    with_checkpoints,
)

pytestmark = pytest.mark.dist

STEPS = 12
TOLERANCE = 1e-10
TIED = MODEL.__class__(
    num_layers=8, hidden_size=16, num_heads=4, ffn_size=24, vocab_size=257, tied_embeddings=True
)
CUT = (Pipeline((5, 3), 1, 4),)
CUT_ELSEWHERE = (Pipeline((2, 3, 3), 1, 4),)
TWO_REPLICAS = (Pipeline((8,), 1, 3), Pipeline((3, 5), 1, 1))
REAL_CUT = (Pipeline((4, 5), 1, 4, order=Order.ZERO_BUBBLE, cuts=(3.4,), more_window=1),)
LANES = (Pipeline((5, 3), 1, 4, lanes=(2, 1)),)
SHARED = (Pipeline((8,), 1, 3, tp=(2,)), Pipeline((3, 5), 1, 1, tp=(1, 1)))
SHARED_BY_MORE = (Pipeline((5, 3), 1, 4, tp=(1, 4)),)
LOCAL = "/proc/self/cwd/checkpoints"  # in the folder that each host of a test has to itself


def until(plan: Plan, steps: int) -> Plan:
    return with_train(plan, steps=steps)


def losses(answers: Sequence[SavingAnswer]) -> dict[int, float]:
    for answer in answers:
        assert answer.losses == answers[0].losses
    return answers[0].losses


def largest_difference(a: dict[str, list[float]], b: dict[str, list[float]]) -> float:
    assert set(a) == set(b)
    return max(abs(x - y) for n in a for x, y in zip(a[n], b[n], strict=True))


def saved_steps(folder: Path) -> list[int]:
    return sorted(checkpoint_files.step_folders(folder))


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["plain", "tied"])
def test_resumed_under_other_cuts_is_bit_identical(model: object, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    before = with_train(make_plan(CUT, model=model, steps=STEPS), clip_norm=None)  # type: ignore[arg-type]
    after = with_train(make_plan(CUT_ELSEWHERE, model=model, steps=STEPS), clip_norm=None)  # type: ignore[arg-type]
    whole = save_all(before, tmp_path)
    save_all(until(with_checkpoints(before, folder), 6), tmp_path)
    resumed = save_all(with_checkpoints(after, folder), tmp_path)
    assert losses(resumed) == {n: loss for n, loss in losses(whole).items() if n >= 6}
    assert merged(resumed) == merged(whole)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(CUT, TWO_REPLICAS, id="more replicas"),
        pytest.param(TWO_REPLICAS, CUT, id="fewer"),
        pytest.param(REAL_CUT, LANES, id="from a real cut to lanes"),
        pytest.param(LANES, REAL_CUT, id="from lanes to a real cut"),
        pytest.param(SHARED, SHARED_BY_MORE, id="from tp 2 and 1 to 1 and 4"),
    ],
)
def test_resumed_with_other_replicas_is_equal(
    before: tuple[Pipeline, ...], after: tuple[Pipeline, ...], tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoints")
    model = replace(MODEL, num_kv_heads=4)
    whole = save_all(make_plan(before, model=model, steps=STEPS), tmp_path)
    save_all(until(with_checkpoints(make_plan(before, model=model), folder), 6), tmp_path)
    resumed = save_all(
        with_checkpoints(make_plan(after, model=model, steps=STEPS), folder), tmp_path
    )
    assert sorted(losses(resumed)) == list(range(6, STEPS))
    for step, loss in losses(resumed).items():
        assert loss == pytest.approx(losses(whole)[step], abs=TOLERANCE)
    assert largest_difference(merged(resumed), merged(whole)) < TOLERANCE


def test_hosts_without_a_common_directory_pass_on_what_others_lack(tmp_path: Path) -> None:
    disks = tmp_path / "disks"
    before = with_train(make_plan(CUT, steps=STEPS), clip_norm=None)
    after = with_train(make_plan(CUT_ELSEWHERE, steps=STEPS), clip_norm=None)
    whole = save_all(before, tmp_path)
    saving = on_hosts(until(with_checkpoints(before, LOCAL), 6), ["a", "b"])
    first = save_all(saving, tmp_path, disks=disks)
    for host in "ab":
        (shard,) = (disks / host / "checkpoints" / "step-6").glob("rank-*")
        assert shard.stat().st_size > 0
    warnings = [event.message for event in first[0].of("warning")]
    assert [text.split(",")[0] for text in warnings] == ["if host a is lost", "if host b is lost"]
    going_on = on_hosts(with_checkpoints(after, LOCAL), ["b", "a", "new"])
    resumed = save_all(going_on, tmp_path, disks=disks)
    assert losses(resumed) == {n: loss for n, loss in losses(whole).items() if n >= 6}
    assert merged(resumed) == merged(whole)


def test_losing_a_host_loses_nothing_that_another_replica_has(tmp_path: Path) -> None:
    disks = tmp_path / "disks"
    plan = make_plan(TWO_REPLICAS, steps=STEPS)
    whole = save_all(plan, tmp_path)
    saving = until(with_checkpoints(plan, LOCAL), 6)
    first = save_all(on_hosts(saving, ["a", "b", "b"]), tmp_path, disks=disks)
    assert first[0].of("warning") == []
    shutil.rmtree(disks / "a")
    resumed = save_all(
        on_hosts(with_checkpoints(make_plan(CUT, steps=STEPS), LOCAL), ["b", "c"]),
        tmp_path,
        disks=disks,
    )
    assert sorted(losses(resumed)) == list(range(6, STEPS))
    assert largest_difference(merged(resumed), merged(whole)) < TOLERANCE


def test_lost_host_that_had_the_only_copy_is_an_error_and_not_a_new_beginning(
    tmp_path: Path,
) -> None:
    disks = tmp_path / "disks"
    plan = with_checkpoints(make_plan(CUT, steps=STEPS), LOCAL)
    save_all(on_hosts(until(plan, 6), ["a", "b"]), tmp_path, disks=disks)
    with pytest.raises(RankFailedError, match=r"step 6 lacks head\.norm\.weight"):
        save_all(on_hosts(plan, ["a", "c"]), tmp_path, disks=disks)
    assert saved_steps(disks / "a" / "checkpoints") == [3, 6]


def test_directory_must_be_shared_as_the_recipe_says(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    plan = on_hosts(make_plan(CUT, steps=2), ["a", "b"])
    with pytest.raises(RankFailedError, match="2 hosts see the same directory"):
        save_all(with_checkpoints(plan, folder), tmp_path)
    save_all(with_checkpoints(plan, folder, shared=True), tmp_path)
    assert saved_steps(tmp_path / "checkpoints") == [2]
    with pytest.raises(RankFailedError, match="not all of the 2 hosts see the same directory"):
        save_all(with_checkpoints(plan, LOCAL, shared=True), tmp_path, disks=tmp_path / "disks")


def test_a_wish_to_stop_saves_the_same_step_on_all_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    plan = with_train(make_plan(CUT, steps=STEPS), clip_norm=None)
    whole = save_all(plan, tmp_path)
    stopped = save_all(with_checkpoints(plan, folder), tmp_path, stop_at=5)
    for answer in stopped:
        assert not answer.is_done
        assert max(answer.losses) == 4
        assert answer.of("end") == []
    assert saved_steps(tmp_path / "checkpoints") == [3, 5]
    resumed = save_all(with_checkpoints(plan, folder), tmp_path)
    assert min(losses(resumed)) == 5
    assert merged(resumed) == merged(whole)


@dataclass(frozen=True)
class KillInside:
    """SIGKILL one rank just before it calls a function of the checkpoint's files for the nth time."""

    victim: int
    function: str
    nth: int
    after_s: float = 0.0

    def __call__(self, rank: int) -> None:
        if rank != self.victim:
            return
        real = getattr(checkpoint_files, self.function)
        calls = [0]

        def dying(*args: object) -> object:
            calls[0] += 1
            if calls[0] == self.nth:
                time.sleep(self.after_s)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        setattr(checkpoint_files, self.function, dying)


@pytest.mark.parametrize(
    ("fault", "resumes_at"),
    [
        (KillInside(1, "write_shard", 2), 3),
        (KillInside(1, "memory_of", 166), 3),  # tensor 50 of the second file
        (KillInside(0, "write_index", 2), 3),
        (KillInside(0, "remove_folder", 2), 3),  # just before the rename
        (KillInside(0, "remove_others", 2), 6),  # committed, older ones still there
    ],
    ids=["file", "in the file", "index", "rename", "clean"],
)
def test_death_inside_a_save_loses_at_most_that_save(
    fault: KillInside, resumes_at: int, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    plan = with_train(make_plan(CUT, steps=STEPS), clip_norm=None)
    other = with_train(make_plan(CUT_ELSEWHERE, steps=STEPS), clip_norm=None)
    whole = save_all(plan, tmp_path)
    with pytest.raises(RankFailedError):
        save_all(with_checkpoints(plan, str(folder)), tmp_path, fault=fault)
    resumed = save_all(with_checkpoints(other, str(folder)), tmp_path)
    assert min(losses(resumed)) == resumes_at
    assert merged(resumed) == merged(whole)
    assert sorted(path.name for path in folder.iterdir()) == ["step-12", "step-9"]


def test_what_only_one_of_two_hosts_finished_is_passed_over(tmp_path: Path) -> None:
    disks = tmp_path / "disks"
    plan = with_train(make_plan(CUT, steps=STEPS), clip_norm=None)
    whole = save_all(plan, tmp_path)
    saving = on_hosts(with_checkpoints(plan, LOCAL), ["a", "b"])
    with pytest.raises(RankFailedError):
        save_all(saving, tmp_path, disks=disks, fault=KillInside(1, "write_index", 2, after_s=0.5))
    assert saved_steps(disks / "a" / "checkpoints") == [3, 6]  # it renamed before the other died
    assert saved_steps(disks / "b" / "checkpoints") == [3]
    resumed = save_all(saving, tmp_path, disks=disks)
    assert min(losses(resumed)) == 3
    assert merged(resumed) == merged(whole)
    warnings = [event.message for event in resumed[0].of("warning")]
    assert "the checkpoint of step 6 lacks head.norm.weight" in warnings[0]
    assert [event.step for event in resumed[0].of("checkpoint")] == [6, 9, 12]
    for host in "ab":
        assert saved_steps(disks / host / "checkpoints") == [9, 12]


@dataclass(frozen=True)
class FullDisk:
    """The disk of one rank has no room for the rest of its nth file."""

    victim: int
    nth: int

    def __call__(self, rank: int) -> None:
        if rank != self.victim:
            return
        real = checkpoint_files._write
        calls = [0]

        def failing(file: BinaryIO, data: memoryview) -> None:
            calls[0] += len(data) % 8 == 0 and file.tell() == 0  # a header: a new file
            if calls[0] == self.nth and file.tell() > 10_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(file, data)

        checkpoint_files._write = failing


def test_full_disk_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    plan = make_plan(CUT, steps=STEPS)
    whole = save_all(plan, tmp_path)
    answers = save_all(
        with_checkpoints(plan, str(folder), keep=9), tmp_path, fault=FullDisk(victim=1, nth=2)
    )
    (warning,) = answers[0].of("warning")
    said = f"no checkpoint of step 6: rank 1: cannot write {folder}/step-6.tmp: No space left on device"
    assert warning.message == said
    assert [event.step for event in answers[1].of("checkpoint")] == [3, 9, 12]
    assert sorted(path.name for path in folder.iterdir()) == ["step-12", "step-3", "step-9"]
    assert losses(answers) == losses(whole)
    assert merged(answers) == merged(whole)


def test_seconds_of_a_save_are_told_and_without_a_recipe_nothing_happens(tmp_path: Path) -> None:
    plan = make_plan(CUT, steps=4)
    silent = save_all(plan, tmp_path)
    assert silent[0].of("checkpoint") == []
    answers = save_all(with_checkpoints(plan, str(tmp_path / "checkpoints")), tmp_path)
    for answer in answers:
        assert [event.step for event in answer.of("checkpoint")] == [3, 4]
        for event in answer.of("checkpoint"):
            assert 0 < event.blocked_s < 5
            assert event.saved_s > 0
            assert event.num_bytes > 100_000
        steps = [event.step_s for event in answer.of("step")]
        assert steps == [event.step_s for event in silent[0].of("step")]


def test_sigterm_ends_a_worker_by_that_signal_after_a_save(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    plan = with_checkpoints(make_plan(CUT, steps=5000), str(folder), every_steps=4000)
    job = write_job(tmp_path / "job", plan)
    port = free_port()
    with (
        start_worker(job, 0, world_size=2, port=port) as first,
        start_worker(job, 1, world_size=2, port=port) as second,
    ):
        path = job / "events" / "rank-0000.jsonl"
        deadline_s = time.monotonic() + 40
        while not (path.exists() and '"step": 3' in path.read_text()):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        second.send_signal(signal.SIGTERM)
        assert [wait(process).code for process in (first, second)] == [-signal.SIGTERM] * 2
    events = read_events(job, 0)
    (save,) = (event for event in events if event["event"] == "checkpoint")
    last = max(event["step"] for event in events if event["event"] == "step")
    assert save["step"] == last + 1
    assert saved_steps(folder) == [last + 1]


def test_recipe_of_another_run_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    plan = with_checkpoints(make_plan(CUT, steps=6), folder)
    save_all(plan, tmp_path)
    with pytest.raises(RankFailedError, match=r"another train\.seed: 7, the recipe has 8"):
        save_all(with_train(plan, seed=8, steps=9), tmp_path)
    with pytest.raises(RankFailedError, match=r"6 steps are done, the recipe has train\.steps 6"):
        save_all(plan, tmp_path)
    with pytest.raises(
        RankFailedError, match=r"holds checkpoints, and checkpoint\.resume is never"
    ):
        save_all(with_checkpoints(plan, folder, resume="never"), tmp_path)


def test_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    plan = make_plan(CUT, steps=9)
    whole = save_all(with_checkpoints(plan, str(folder)), tmp_path)
    shard = folder / "step-9" / "rank-0001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    resumed = save_all(with_checkpoints(plan, str(folder)), tmp_path)
    assert sorted(losses(resumed)) == [6, 7, 8]
    assert merged(resumed) == merged(whole)
    (warning,) = resumed[0].of("warning")
    assert "rank-0001.safetensors" in warning.message
    assert warning.message.endswith("passed over")


def test_named_folder_starts_a_new_directory(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    plan = make_plan(CUT, steps=9)
    save_all(with_checkpoints(plan, str(old)), tmp_path)
    again = with_checkpoints(plan, str(new), resume=str(old / "step-6"), every_steps=2)
    answers = save_all(again, tmp_path)
    assert sorted(losses(answers)) == [6, 7, 8]
    assert saved_steps(new) == [8, 9]
    assert saved_steps(old) == [6, 9]
    missing = with_checkpoints(plan, str(tmp_path / "third"), resume=str(old / "step-7"))
    with pytest.raises(RankFailedError, match="step-7 is not there"):
        save_all(missing, tmp_path)
