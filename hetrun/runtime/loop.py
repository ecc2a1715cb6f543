"""The life of one rank between start and end: meet the others, agree, train, part. Process matters are left to `worker.py`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from hetrun.model import EndEvent, Event, Plan, RankPlan, StartEvent, TraceEvent, plan_sha
from hetrun.runtime.agreement import Agreement
from hetrun.runtime.data import TokenStream, open_stream
from hetrun.runtime.device import local_index, open_device
from hetrun.runtime.evaluate import is_due
from hetrun.runtime.groups import collective_timeout
from hetrun.runtime.prepare import Cache
from hetrun.runtime.trainer import Trainer

log = logging.getLogger(__name__)


def meet(plan: Plan) -> dist.Store:
    """The key-value store that torchrun's variables lead to."""
    timeout = timedelta(seconds=plan.recipe.launch.start_timeout_s)
    store, _rank, _world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return store


def run(
    plan: Plan,
    rank: RankPlan,
    *,
    store: dist.Store,
    cache_dir: Path,
    write: Callable[[Event], None],
    before_step: Callable[[int], None],
) -> None:
    """Train as the plan says; `before_step` is told the number of each step before it begins.

    `cache_dir` is this host's, for data that is prepared once for all its ranks.
    """
    if rank.emulated:
        torch.set_num_threads(1)  # emulated chips share the cores of their host
    recipe = plan.recipe
    index = local_index(plan.split.ranks, rank)
    device = open_device(rank.torch_device, rank.torch_plugin, index)
    stream = open_stream(
        recipe.data,
        vocab_size=recipe.model.vocab_size,
        seed=recipe.train.seed,
        cache=Cache(folder=cache_dir, timeout_s=recipe.launch.start_timeout_s),
    )
    agree(plan, rank, stream, store)
    join(plan, rank, store)
    trainer = Trainer(plan, rank.rank, stream=stream, device=device)
    write(start_event(rank, device=device))
    train(trainer, write, before_step=before_step)
    dist.destroy_process_group()


def train(
    trainer: Trainer,
    write: Callable[[Event], None],
    *,
    before_step: Callable[[int], None],
) -> None:
    """Run all steps and write their events; `before_step` is told the number of each step."""
    steps = trainer.plan.recipe.train.steps
    traced = {min(1, steps - 1), steps - 1}
    rank = trainer.rank.rank
    for number in range(steps):
        before_step(number)
        result = trainer.step(number)
        write(result.event)
        if is_due(trainer.plan.recipe.train, number):
            write(trainer.evaluate(number))
        if number in traced:
            write(TraceEvent(rank=rank, step=number, spans=result.spans))
    write(
        EndEvent(
            rank=rank,
            wall_s=time.time(),
            steps=steps,
            parameters_sha=trainer.parameters_sha(),
        )
    )


def agree(plan: Plan, rank: RankPlan, stream: TokenStream, store: dist.Store) -> None:
    """Check through the store that all ranks hold the same plan and the same text.

    Raises:
        DisagreementError: on every rank, if any two differ.
    """
    agreement = Agreement(store, rank=rank.rank, host=rank.host, world_size=len(plan.split.ranks))
    agreement.check("plan", plan_sha(plan), hint="start the run again: hetrun launch plan.json")
    agreement.check(
        "training text",
        stream.fingerprint(),
        hint="hosts have other files, or other versions of Python or of the tokenizer's package: use `kind: tokens`"
        " or `kind: text` with one file copied to all hosts",
    )
    agreement.conclude(timedelta(seconds=plan.recipe.launch.start_timeout_s))


def join(plan: Plan, rank: RankPlan, store: dist.Store) -> None:
    """Create the default process group, over gloo."""
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("hetrun/groups", store),
        rank=rank.rank,
        world_size=len(plan.split.ranks),
        timeout=collective_timeout(plan),
    )


def start_event(rank: RankPlan, *, device: torch.device) -> StartEvent:
    """What a rank says once it agrees with all others."""
    name = f"emulated {rank.vendor} {rank.model}" if rank.emulated else str(device)
    return StartEvent(
        rank=rank.rank,
        host=rank.host,
        pid=os.getpid(),
        wall_s=time.time(),
        torch_version=torch.__version__,
        device=name,
    )
