"""The life of one rank between start and end: meet the others, agree, train, part. Process matters are left to `worker.py`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from hetrun.model import EndEvent, Event, Plan, RankPlan, StartEvent, TraceEvent, plan_sha
from hetrun.runtime import drift
from hetrun.runtime.agreement import Agreement
from hetrun.runtime.checkpoint import Checkpoints
from hetrun.runtime.checkpoint_resume import open_checkpoints
from hetrun.runtime.data import TokenStream, open_stream
from hetrun.runtime.device import local_index, open_device
from hetrun.runtime.evaluate import is_due
from hetrun.runtime.groups import collective_timeout
from hetrun.runtime.heartbeat import Heartbeat
from hetrun.runtime.hf_model import need_transformers
from hetrun.runtime.prepare import Cache
from hetrun.runtime.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What training tells and asks its process."""

    write: Callable[[Event], None]
    before_step: Callable[[int], None] = lambda step: None  # told the number of each step
    stop_wanted: Callable[[], bool] = lambda: False  # save and end after this step
    heartbeat: Heartbeat = field(default_factory=Heartbeat)


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
    hooks: Hooks,
) -> bool:
    """Train as the plan says, from the newest checkpoint on; return whether all steps are done.

    `cache_dir` is this host's, for data that is prepared once for all its ranks.
    """
    if rank.emulated:
        torch.set_num_threads(1)  # emulated chips share the cores of their host
    recipe = plan.recipe
    if recipe.model.config is not None:
        need_transformers()  # before others wait for this rank
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
    hooks.write(start_event(rank, device=device))
    checkpoints = open_checkpoints(
        plan,
        rank,
        state=trainer.state(),
        text_sha=stream.fingerprint(),
        write=hooks.write,
    )
    is_done = train(trainer, hooks, checkpoints)
    dist.destroy_process_group()
    return is_done


def train(trainer: Trainer, hooks: Hooks, checkpoints: Checkpoints | None = None) -> bool:
    """Run all steps that are left and write their events; return False if it was asked to stop before the last.

    Without checkpoints there is nothing to stop in order for, and nobody is asked.
    """
    steps = trainer.plan.recipe.train.steps
    first = 0 if checkpoints is None else checkpoints.first_step
    traced = {min(first + 1, steps - 1), steps - 1}
    rank = trainer.rank.rank
    write = hooks.write
    for number in range(first, steps):
        hooks.before_step(number)
        hooks.heartbeat.step(number)
        result = trainer.step(number, stop_wanted=hooks.stop_wanted, tick=hooks.heartbeat.tick)
        write(result.event)
        hooks.heartbeat.outside()
        if drift.is_due(trainer.plan.recipe.train, number):
            for event in trainer.compare(number):
                write(event)
        if is_due(trainer.plan.recipe.train, number) and not result.stop:
            write(trainer.evaluate(number))
        if number in traced:
            write(TraceEvent(rank=rank, step=number, spans=result.spans))
        if checkpoints is not None:
            rate = result.event.learning_rate
            checkpoints.after_step(number + 1, learning_rate=rate, write=write, stop=result.stop)
        if result.stop and number + 1 < steps:
            return False
    write(
        EndEvent(
            rank=rank,
            wall_s=time.time(),
            steps=steps,
            parameters_sha=trainer.parameters_sha(),
        )
    )
    return True


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
