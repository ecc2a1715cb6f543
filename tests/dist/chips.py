"""Clusters of emulated chips of several speeds, planned by the planner and run by real processes with real gradients.

One unit of time is a layer's forward at speed 1.0 on one row. Backward takes twice that, half of it for the weights. The head
weighs a layer; a layer's AdamW takes 0.3. Links are so slow that an all-reduce of a layer's gradients takes one unit: over all
chips where each replica is one chip, over the two stages that hold a layer at a real cut. The same links carry activations. All of it is charged to the
mix and to each vendor alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from hetrun import arch
from hetrun.efficiency import efficiency
from hetrun.model import (
    Dtype,
    Efficiency,
    Link,
    LinkKind,
    ModelSpec,
    Pins,
    Plan,
    PlanLimits,
    Profile,
    Source,
    Split,
    StepEvent,
)
from hetrun.planner import plan
from hetrun.runtime.loop import join
from hetrun.runtime.trainer import Trainer
from hetrun.schedule import StepRun, simulate_step
from tests.dist.plans import SEQ_LEN
from tests.dist.ranks import run_ranks
from tests.dist.training import open_test_stream
from tests.unit.planner_lab import Chips, Lab

UNIT_S = 0.01  # a layer's forward at speed 1.0
OPTIMIZER = 0.3  # of a unit, per layer
MODEL = ModelSpec(
    num_layers=24, hidden_size=16, num_heads=2, num_kv_heads=1, ffn_size=32, vocab_size=257
)


@dataclass(frozen=True)
class Executed:
    """What the ranks of a plan did in their last step."""

    step_s: float  # modelled
    loss: float
    gradient_norm: float
    peaks: tuple[int, ...]  # most microbatches that a rank held between forward and last use


def mixed(
    speeds: Sequence[float],
    rows: Sequence[int],
    *,
    limits: PlanLimits | None = None,
    num_layers: int = MODEL.num_layers,
) -> Plan:
    """Two chips of each speed, a vendor each; replicas take these rows, microbatches are of one row."""
    model = replace(MODEL, num_layers=num_layers)
    layer_bytes = arch.BYTES_PER_PARAMETER[Dtype.FP64] * arch.layer_parameters(model)
    size = len(speeds)
    rings = 1.0 + 2 * (size - 1) / size  # of the two of a vendor, then of the vendors
    passes = 1.0 if len(rows) == 1 else rings  # of each byte
    lab = Lab(
        chips=[
            Chips(vendor="abc"[number], num_devices=2, layer_s=3 * UNIT_S / speed)
            for number, speed in enumerate(speeds)
        ],
        model=model,
        batch=sum(rows),
        rows=(1,),
        seq_len=SEQ_LEN,
        links=tuple(
            Link(kind=kind, latency_s=0.0, bytes_per_s=passes * layer_bytes / UNIT_S)
            for kind in LinkKind
        ),
        dtype=Dtype.FP64,
        limits=replace(limits or PlanLimits(), pins=Pins(rows=tuple(rows))),
    )
    profile = _figures(lab.profile, speeds, arch.layer_parameters(model))
    return plan(lab.facts, profile, lab.recipe, targets={})


def execute(plan_: Plan, folder: Path, *, timeout_s: float = 50.0) -> Executed:
    """Run all steps of a plan in a process per rank."""
    ranks = plan_.split.ranks
    answers = run_ranks(_train, len(ranks), folder, plan_, timeout_s=timeout_s)
    (event, *_), *_ = answers
    return Executed(
        step_s=max(event.step_s for event, _ in answers),
        loss=event.loss,
        gradient_norm=event.grad_norm,
        peaks=tuple(peak for _, peak in answers),
    )


def reached(plan_: Plan, done: Executed) -> Efficiency:
    """E1, E2 and U of what was executed, against the vendors alone as the planner has them."""
    rows = plan_.recipe.train.global_batch_rows
    return efficiency(done.step_s, rows, plan_.baselines, kind=Source.MODELLED)


def simulated(plan_: Plan) -> StepRun:
    """The step of a plan, by the simulator."""
    split, recipe = plan_.split, plan_.recipe
    return simulate_step(split.ranks, split.replicas, plan_.links, recipe.model, recipe.train.dtype)


def with_split(plan_: Plan, split: Split) -> Plan:
    """The same recipe and chips, split otherwise."""
    return replace(plan_, split=split)


def _figures(profile: Profile, speeds: Sequence[float], layer_parameters: int) -> Profile:
    """Let the head weigh a layer, half of a backward be for the weights, and AdamW take its time."""
    devices = []
    for device, speed in zip(profile.devices, speeds, strict=True):
        timings = tuple(
            replace(
                timing,
                head_forward_s=timing.layer_forward_s,
                head_backward_s=timing.layer_backward_s,
                head_weights_s=timing.layer_weights_s,
            )
            for timing in device.timings
        )
        update_s = OPTIMIZER * UNIT_S / speed / layer_parameters
        devices.append(replace(device, timings=timings, optimizer_s_per_parameter=update_s))
    return replace(profile, devices=tuple(devices))


def _train(rank: int, store_path: Path, plan_: Plan) -> tuple[StepEvent, int]:
    """Body of one rank's process: its last step, and the most activations that it held in it."""
    join(plan_, plan_.split.ranks[rank], dist.FileStore(str(store_path), len(plan_.split.ranks)))
    trainer = Trainer(
        plan_, rank, stream=open_test_stream(plan_, is_ragged=False), device=torch.device("cpu")
    )
    for step in range(plan_.recipe.train.steps):
        result = trainer.step(step)
    kinds = [span.kind for span in result.spans]
    frees = "W" if "W" in kinds else "B"
    held = peak = 0
    for kind in kinds:
        held += (kind == "F") - (kind == frees)
        peak = max(peak, held)
    return result.event, peak
