"""What the engine adds to the arithmetic: a training step beside a plain loop over the same model, in one process.

Prints the figure for docs/benchmarks.md.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from hetrun.model import Dtype, ModelSpec, Plan
from hetrun.runtime.data import ByteText, Rows, TokenStream
from hetrun.runtime.loop import join
from hetrun.runtime.network import Stage
from hetrun.runtime.optimizer import make_optimizer
from hetrun.runtime.trainer import Trainer
from tests.dist.plans import Pipeline, make_plan, with_data
from tests.dist.training import TEXT, whole_model

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

MODEL = ModelSpec(
    num_layers=4, hidden_size=128, num_heads=4, num_kv_heads=2, ffn_size=352, vocab_size=512
)
SEQ_LEN = 128
MICROBATCHES = 4
ROWS = 2
TURNS = 24
WARM_UP = 4
LIMIT = 1.03


def test_a_step_takes_three_percent_longer_than_a_plain_loop_at_most(tmp_path: Path) -> None:
    """Pairs of steps in turn, either first every other time."""
    torch.set_num_threads(1)
    plan = with_data(
        make_plan(
            (Pipeline((MODEL.num_layers,), ROWS, MICROBATCHES),),
            model=MODEL,
            dtype=Dtype.FP32,
            emulated=False,
        ),
        seq_len=SEQ_LEN,
    )
    stream = TokenStream(ByteText(TEXT * 40, vocab_size=MODEL.vocab_size), seq_len=SEQ_LEN, seed=0)
    with _alone(plan, tmp_path):
        trainer = Trainer(plan, 0, stream=stream, device=torch.device("cpu"))
        plain = plain_step(plan, stream, whole_model(plan)[0])
        assert trainer.step(0).event.loss == pytest.approx(plain(0), rel=1e-5)  # the same work
        spent: dict[str, list[tuple[float, float]]] = {"hetrun": [], "plain": []}
        both: list[tuple[str, Callable[[int], object]]] = [
            ("hetrun", trainer.step),
            ("plain", plain),
        ]
        for turn in range(1, WARM_UP + TURNS):
            gc.collect()
            for name, step in both[:: 1 if turn % 2 else -1]:
                spent[name].append(_seconds(step, turn))
    wall, cpu = (_medians(spent, which) for which in (0, 1))
    for what, (ours_s, plain_s) in (("wall", wall), ("CPU", cpu)):
        sys.stdout.write(
            f"\n{what} time of a step: hetrun {ours_s * 1e3:.1f} ms, plain loop {plain_s * 1e3:.1f} ms,"
            f" ratio of medians {ours_s / plain_s:.4f}"
        )
    assert cpu[0] / cpu[1] <= LIMIT  # wall time says the same on an idle machine only


def _seconds(step: Callable[[int], object], number: int) -> tuple[float, float]:
    """Wall and CPU seconds of a step."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    step(number)
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def _medians(spent: dict[str, list[tuple[float, float]]], which: int) -> tuple[float, float]:
    ours_s, plain_s = (
        statistics.median(seconds[which] for seconds in spent[name][WARM_UP:])
        for name in ("hetrun", "plain")
    )
    return ours_s, plain_s


def plain_step(plan: Plan, stream: TokenStream, model: Stage) -> Callable[[int], float]:
    """What a user writes by hand: accumulate over microbatches, clip, AdamW."""
    train = plan.recipe.train
    optimizer = make_optimizer(model.parameters(), train)
    num_tokens = train.global_batch_rows * SEQ_LEN

    def one(rows: Rows) -> float:  # of its own, so that nothing of it outlives it
        logits = model(rows.inputs)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), rows.targets.flatten(), reduction="sum"
        )
        loss = loss / num_tokens
        loss.backward()
        return loss.item()

    def step(number: int) -> float:
        first = number * train.global_batch_rows
        starts = range(first, first + train.global_batch_rows, ROWS)
        loss = sum(one(stream.rows(start, ROWS)) for start in starts)
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm or 0.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@contextmanager
def _alone(plan: Plan, folder: Path) -> Iterator[None]:
    join(plan, plan.split.ranks[0], dist.FileStore(str(folder / "store"), 1))
    try:
        yield
    finally:
        dist.destroy_process_group()
