"""Ranks that train with checkpoints, are killed or fail on purpose, and say what they ended with."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetrun.model import CheckpointSpec, HostSpec, Plan
from hetrun.runtime.boxes import Box, whole_box
from hetrun.runtime.checkpoint_resume import open_checkpoints
from hetrun.runtime.loop import Hooks, join, train
from hetrun.runtime.trainer import Trainer
from tests.dist.ranks import run_ranks
from tests.dist.training import open_test_stream

Fault = Callable[[int], None]  # told the rank before training


@dataclass(frozen=True)
class SavingAnswer:
    """What one rank ended with."""

    losses: dict[int, float]
    parameters: dict[str, tuple[Box, torch.Tensor]]
    events: list[Any]
    is_done: bool

    def of(self, event: str) -> list[Any]:
        """Events of one kind."""
        return [item for item in self.events if item.event == event]


def with_checkpoints(plan: Plan, folder: str, every_steps: int = 3, **changes: Any) -> Plan:
    """The same plan, saving."""
    spec = CheckpointSpec(dir=folder, every_steps=every_steps, **changes)
    return replace(plan, recipe=replace(plan.recipe, checkpoint=spec))


def on_hosts(plan: Plan, hosts: Sequence[str]) -> Plan:
    """The same plan with its ranks on these hosts, one name per rank."""
    ranks = [replace(rank, host=host) for rank, host in zip(plan.split.ranks, hosts, strict=True)]
    specs = tuple(HostSpec(name=name) for name in dict.fromkeys(hosts))
    return replace(plan, hosts=specs, split=replace(plan.split, ranks=tuple(ranks)))


def save_rank(
    rank: int, store_path: Path, plan: Plan, disks: Path | None, fault: Fault | None, stop_at: int
) -> SavingAnswer:
    """Body of one rank's process; with `disks` every host works in a folder of its own there."""
    mine = plan.split.ranks[rank]
    if disks is not None:
        (disks / mine.host).mkdir(parents=True, exist_ok=True)
        os.chdir(disks / mine.host)
    join(plan, mine, dist.FileStore(str(store_path), len(plan.split.ranks)))
    stream = open_test_stream(plan, is_ragged=True)
    trainer = Trainer(plan, rank, stream=stream, device=torch.device("cpu"))
    events: list[Any] = []
    checkpoints = open_checkpoints(
        plan, mine, state=trainer.state(), text_sha="text", write=events.append
    )
    if fault is not None:
        fault(rank)
    now = [0]
    is_done = train(
        trainer,
        Hooks(
            write=events.append,
            before_step=lambda step: now.__setitem__(0, step),
            stop_wanted=lambda: rank == 0 and now[0] + 1 == stop_at,
        ),
        checkpoints,
    )
    return SavingAnswer(
        losses={event.step: event.loss for event in events if event.event == "step"},
        parameters={
            name: (trainer.stage.boxes.get(name) or whole_box(p.shape), p.detach().clone())
            for name, p in trainer.stage.named_parameters()
        },
        events=events,
        is_done=is_done,
    )


def save_all(
    plan: Plan,
    folder: Path,
    *,
    disks: Path | None = None,
    fault: Fault | None = None,
    stop_at: int = 0,
) -> list[SavingAnswer]:
    """Run a plan in real processes."""
    return run_ranks(save_rank, len(plan.split.ranks), folder, plan, disks, fault, stop_at)


@dataclass(frozen=True)
class KillLater:
    """SIGKILL one rank a random while after training has begun."""

    victim: int
    seed: int
    within_s: float

    def __call__(self, rank: int) -> None:
        if rank == self.victim:
            delay_s = random.Random(self.seed).uniform(0.0, self.within_s)
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def merged(answers: Sequence[SavingAnswer]) -> dict[str, list[float]]:
    """Parameters of the whole model; copies must be equal."""
    whole: dict[str, torch.Tensor] = {}
    for answer in answers:
        for name, (box, values) in answer.parameters.items():
            known = whole.setdefault(name, torch.full(box.whole, float("nan"), dtype=values.dtype))
            part = box.of(known)
            assert bool((part.isnan() | (part == values)).all()), name
            part.copy_(values)
    return {name: value.flatten().tolist() for name, value in whole.items()}
