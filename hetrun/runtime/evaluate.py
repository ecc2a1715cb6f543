"""The loss of the held-out rows: when it is due, and who computes which of them.

They are dealt out like those of a step, batch after batch, and forwarded by the whole pipeline (`engine.py`) without
gradients. Each row's loss is divided by the tokens of all held-out rows, so the sum over ranks is the mean over
tokens under every plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hetrun.model import ReplicaPlan, TrainSpec
from hetrun.runtime.data import TokenStream
from hetrun.runtime.emulate import Clock
from hetrun.runtime.engine import Lane, Microbatch, PipelineEngine, Timeline
from hetrun.runtime.sync import GradientSync


def is_due(train: TrainSpec, step: int) -> bool:
    """Whether the held-out rows are evaluated after this step: every `eval_every` steps and after the last."""
    every = train.eval_every
    return every is not None and ((step + 1) % every == 0 or step + 1 == train.steps)


def held_out_batches(
    stream: TokenStream, replica: ReplicaPlan, lane: Lane, *, batch_rows: int
) -> Iterator[dict[int, Microbatch]]:
    """A lane's microbatches of each batch of held-out rows; the last batch may have fewer of them, or none.

    Stages between the first and the last need no rows.
    """
    num_rows = stream.num_held_out
    scale = 1.0 / (num_rows * stream.seq_len)
    needs_rows = lane.plan.has_embedding or lane.plan.has_head
    for batch_start in range(0, num_rows, batch_rows):
        starts = {
            index: batch_start + replica.first_row + index * replica.microbatch_rows
            for index in lane.parts
        }
        yield {
            index: Microbatch(
                stream.held_out(start, replica.microbatch_rows) if needs_rows else None, scale
            )
            for index, start in starts.items()
            if start < num_rows
        }


def evaluate(
    batches: Iterator[Mapping[int, Microbatch]],
    *,
    engine: PipelineEngine,
    sync: GradientSync,
    clock: Clock,
) -> tuple[float, float]:
    """Forward all batches; return the mean loss, equal on all ranks, and the seconds it took on the run's clock."""
    clock.start_step()
    timeline = Timeline(clock)
    loss = sum(engine.evaluate(microbatches, timeline) for microbatches in batches)
    totals = sync.totals(loss, timeline)
    return totals.loss, clock.now_s()
