"""Real jobs on prepared data: one preparation per host, one stream on all ranks, words where it cannot be."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.model import DataKind, DataSpec, Plan
from tests.dist.jobs import ROOT, read_events, run_workers, running, write_job
from tests.dist.plans import SEQ_LEN, Pipeline, make_plan
from tests.unit.token_files import write_tokenizer_json

pytestmark = pytest.mark.dist

TWO_STAGES = (Pipeline((5, 3), 2, 2),)


def _plan(folder: Path, path: str | None = None) -> Plan:
    """Two stages that learn from JSON lines with a tokenizer of six words."""
    write_tokenizer_json(folder / "tokenizer.json")
    lines = [json.dumps({"text": "a rose is red " * n}) for n in range(1, 30)]
    (folder / "d.jsonl").write_text("\n".join(lines))
    data = DataSpec(
        seq_len=SEQ_LEN,
        kind=DataKind.JSONL,
        path=path or str(folder / "d.jsonl"),
        field="text",
        tokenizer=str(folder / "tokenizer.json"),
        end_token="<end>",
    )
    plan = make_plan(TWO_STAGES, steps=15)
    return replace(plan, recipe=replace(plan.recipe, data=data))


def test_a_job_tokenises_once_for_all_ranks_and_the_next_one_not_at_all(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    cache = tmp_path / "host" / "data"
    states = []
    for name in ("first", "second"):  # as launch lays them out: HOST/jobs/NAME
        job = write_job(tmp_path / "host" / "jobs" / name, plan)
        for ended in run_workers([job, job]):
            assert ended.code == 0, ended.output
        losses = [e["loss"] for e in read_events(job, 1) if e["event"] == "step"]
        assert losses[-1] < 0.5 * losses[0]
        (tokens,) = cache.glob("*.tokens-*")
        states.append((tokens.name, tokens.stat().st_mtime_ns, losses))
        assert sorted(path.suffix for path in cache.iterdir()) == [".lock", tokens.suffix]
    assert states[0] == states[1]


def test_ids_beyond_the_vocabulary_end_a_job_before_its_first_step(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    model = replace(plan.recipe.model, vocab_size=5)
    text = '{"text": "unheard"}\n' * 30  # all of it <unknown>, id 5
    (tmp_path / "d.jsonl").write_text(text)
    plan = replace(plan, recipe=replace(plan.recipe, model=model))
    job = write_job(tmp_path / "job", plan)
    for rank, ended in enumerate(run_workers([job, job])):
        assert ended.code == 1
        (event,) = read_events(job, rank)
        assert event["kind"] == "ConfigError"
        assert "holds token id 5, model.vocab_size is 5" in event["message"]
        assert "hint: model.vocab_size must be at least 6" in ended.output


def test_hosts_with_different_lines_are_both_named(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "/proc/self/cwd/d.jsonl")  # beside each job
    first, second = plan.split.ranks
    ranks = (first, replace(second, host="there"))
    there = replace(plan.hosts[0], name="there")
    plan = replace(plan, hosts=(*plan.hosts, there), split=replace(plan.split, ranks=ranks))
    jobs = [write_job(tmp_path / name, plan) for name in ("a", "b")]
    for number, job in enumerate(jobs):
        lines = [{"text": "a rose " * 9}] * 8 + [{"text": ("is", "red")[number]}]
        (job / "d.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    for rank, ended in enumerate(run_workers(jobs)):
        assert ended.code == 1
        (event,) = read_events(jobs[rank], rank)
        assert event["kind"] == "DisagreementError"
        assert "on here has" in event["message"]
        assert "on there has" in event["message"]


def test_tokenising_that_is_killed_leaves_no_token_file(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_bytes(b"a rose is a rose\n" * (2 << 20))
    out = tmp_path / "out.bin"
    command = [
        sys.executable, "-m", "hetrun.runtime.tokenize", str(out), "--path", str(tmp_path / "big.txt"),
    ]  # fmt: skip
    with running(command, {"PYTHONPATH": str(ROOT)}) as process:
        deadline_s = time.monotonic() + 30
        while not any(part.stat().st_size for part in tmp_path.glob(".out.bin.*.part")):
            assert time.monotonic() < deadline_s
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
    assert not out.exists()
    subprocess.run(command, check=True, capture_output=True, timeout=50, cwd=ROOT)
    assert out.stat().st_size == 512 + 2 * (17 * (2 << 20) + 1)
