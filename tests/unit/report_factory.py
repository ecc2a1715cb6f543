"""Made-up but valid plans, and the events that their ranks would have written on modelled time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hetrun import store
from hetrun.model import (
    GIB,
    Baseline,
    DataSpec,
    Efficiency,
    EmulatedChip,
    EndEvent,
    ErrorEvent,
    Failure,
    HostSpec,
    Link,
    LinkKind,
    ModelSpec,
    Plan,
    RankPlan,
    Recipe,
    ReplicaPlan,
    RunOutcome,
    Share,
    Source,
    Split,
    StagePlan,
    StartEvent,
    StepEvent,
    TraceEvent,
    TrainSpec,
    plan_sha,
)
from hetrun.schedule.step import StepRun, simulate_step

LAYERS = 24
SEQ_LEN = 128
LAYER_S = 0.004  # forward of one layer at speed 1
SPEEDS = {"aurora": 2.0, "borealis": 1.2, "corona": 0.8}
MODEL = ModelSpec(num_layers=LAYERS, hidden_size=256, num_heads=4, ffn_size=704, vocab_size=512)
LINKS = tuple(
    Link(kind=kind, latency_s=latency_s, bytes_per_s=rate)
    for kind, latency_s, rate in (
        (LinkKind.INSIDE_HOST, 1e-5, 2e10),
        (LinkKind.INSIDE_ISLAND, 5e-5, 5e9),
        (LinkKind.ACROSS, 2e-4, 5e8),
    )
)


@dataclass(frozen=True)
class Shape:
    """Vendor and number of layers of each stage, the same in every replica."""

    stages: Sequence[tuple[str, int]]
    num_replicas: int = 1
    num_microbatches: int = 16


TWO_VENDORS = Shape((("aurora", 7), ("aurora", 8), ("borealis", 5), ("borealis", 4)))


def make_split(shape: Shape) -> Split:
    """One rank per stage; hosts are named after vendor and replica."""
    depth = len(shape.stages)
    ranks: list[RankPlan] = []
    replicas: list[ReplicaPlan] = []
    for number in range(shape.num_replicas):
        stages: list[StagePlan] = []
        first_layer = 0
        for index, (vendor, num_layers) in enumerate(shape.stages):
            host = f"{vendor[0]}{number + 1}"
            place = sum(rank.host == host for rank in ranks)
            rank = RankPlan(
                rank=len(ranks),
                host=host,
                local_rank=place,
                device_index=place,
                vendor=vendor,
                model=f"{vendor}-100",
                replica=number,
                stage=index,
                torch_device="cpu",
                emulated=True,
                memory_bytes=16 * GIB,
            )
            forward_s = num_layers * LAYER_S / SPEEDS[vendor]
            stage = StagePlan(
                ranks=(rank.rank,),
                first_layer=first_layer,
                num_layers=num_layers,
                has_embedding=index == 0,
                has_head=index == depth - 1,
                window=depth - index,
                forward_s=forward_s,
                backward_s=2 * forward_s,
                send_s=0.0003 if index < depth - 1 else 0.0,
                optimizer_s=0.002 * num_layers,
                memory_bytes=int((1 + 0.9 * num_layers) * GIB),
                memory_limit_bytes=int(16 * GIB * 0.92),
            )
            ranks.append(rank)
            stages.append(stage)
            first_layer += num_layers
        replica = ReplicaPlan(
            first_row=number * shape.num_microbatches,
            microbatch_rows=1,
            num_microbatches=shape.num_microbatches,
            stages=tuple(stages),
        )
        replicas.append(replica)
    run = simulate_step(
        ranks, replicas, LINKS, MODEL, TrainSpec(steps=1, global_batch_rows=1).dtype
    )
    rows = shape.num_replicas * shape.num_microbatches
    return Split(
        ranks=tuple(ranks),
        replicas=tuple(replicas),
        cost=run.cost,
        efficiency=_efficiency(run.cost.step_s, rows, make_baselines(shape)),
    )


def make_baselines(shape: Shape) -> tuple[Baseline, ...]:
    """Each vendor at 95 % of its summed speed."""
    found = []
    for vendor in sorted({vendor for vendor, _ in shape.stages}):
        devices = shape.num_replicas * sum(1 for name, _ in shape.stages if name == vendor)
        ideal = devices * SPEEDS[vendor] / (3 * LAYER_S * LAYERS)
        base = Baseline(
            vendor=vendor,
            num_devices=devices,
            rows_per_s=0.95 * ideal,
            scaled_batch_rows=8,
            scaled_rows_per_s=0.93 * ideal,
            ideal_rows_per_s=ideal,
            shape=f"1 replica x {devices} stages",
        )
        found.append(base)
    return tuple(found)


def make_plan(
    shape: Shape = TWO_VENDORS,
    *,
    steps: int = 12,
    emulated: bool = True,
    baselines: tuple[Baseline, ...] | None = None,
) -> Plan:
    """A whole plan with the even split beside it where the layers divide."""
    split = make_split(shape)
    depth = len(shape.stages)
    even = None
    if LAYERS % depth == 0:
        layers = LAYERS // depth
        even = make_split(replace(shape, stages=[(vendor, layers) for vendor, _ in shape.stages]))
    rows = shape.num_replicas * shape.num_microbatches
    bases = make_baselines(shape) if baselines is None else baselines
    ideal_s = rows / sum(base.ideal_rows_per_s for base in make_baselines(shape))
    hosts = sorted({rank.host for rank in split.ranks})
    return Plan(
        created="2030-01-01T00:00:00Z",
        recipe=Recipe(
            name="tiny",
            model=MODEL,
            data=DataSpec(seq_len=SEQ_LEN),
            train=TrainSpec(steps=steps, global_batch_rows=rows),
        ),
        hosts=tuple(
            HostSpec(
                name=host,
                emulate=(
                    EmulatedChip(
                        vendor="aurora",
                        model="aurora-100",
                        num_devices=2,
                        flops_per_s=1e12,
                        memory_bytes=16 * GIB,
                    ),
                ),
            )
            for host in hosts
        ),
        links=LINKS,
        emulated=emulated,
        split=split,
        even_split=even,
        even_split_why="" if even else f"{LAYERS} layers do not divide by {depth} stages",
        bound_s=ideal_s,
        gap=split.cost.step_s / ideal_s - 1,
        gap_reason="pipeline bubble and whole layers",
        baselines=bases,
        verdict="Mixing pays: 1.6 times the throughput of the best single vendor (aurora, 2 devices).",
        runner_up="2 replicas x 2 stages, 3.1 % slower",
    )


def make_outcome(
    plan: Plan, status: str = "done", failures: tuple[Failure, ...] = ()
) -> RunOutcome:
    return RunOutcome(
        run_id="20300101-000000-tiny",
        plan_sha=plan_sha(plan),
        started="2030-01-01T00:00:00Z",
        wall_s=83.2,
        exit_code=0 if status == "done" else 1,
        status=status,
        failures=failures,
    )


Event = StartEvent | StepEvent | TraceEvent | ErrorEvent | EndEvent


def rank_events(
    plan: Plan, rank: int, *, steps: int | None = None, run: StepRun | None = None
) -> list[Event]:
    """What one rank of a healthy run writes; each step takes what the plan says, the first one 30 % more."""
    train = plan.recipe.train
    num_steps = train.steps if steps is None else steps
    run = run or one_step(plan)
    spans = run.rank_spans[rank]
    busy_s = sum(span.end_s - span.start_s for span in spans if span.kind != "sync")
    pipeline_end_s = max(span.end_s for span in spans if span.kind == "B")
    first_sync_s = min(
        (span.start_s for span in spans if span.kind == "sync"), default=pipeline_end_s
    )
    communication_s = sum(s.end_s - s.start_s for s in spans if s.kind == "sync")
    communication_s += first_sync_s - pipeline_end_s
    step_s = run.cost.step_s
    events: list[Event] = [
        StartEvent(
            rank=rank,
            host=plan.split.ranks[rank].host,
            pid=100 + rank,
            wall_s=1000.0,
            torch_version="2.13.0",
            device="cpu",
        )
    ]
    for step in range(num_steps):
        slower = 1.3 if step == 0 else 1.0
        event = StepEvent(
            rank=rank,
            step=step,
            wall_s=1001.0 + step,
            step_s=step_s * slower,
            busy_s=busy_s * slower,
            communication_s=communication_s * slower,
            idle_s=(step_s - busy_s - communication_s) * slower,
            loss=loss_at(step),
            num_tokens=train.global_batch_rows * (SEQ_LEN - 1),
            grad_norm=1.0,
            learning_rate=3e-4,
            peak_memory_bytes=3 * GIB + rank,
        )
        events.append(event)
        if step == num_steps - 1:
            events.append(TraceEvent(rank=rank, step=step, spans=spans))
    if num_steps == train.steps:
        events.append(EndEvent(rank=rank, wall_s=1100.0, steps=num_steps, parameters_sha="a" * 64))
    return events


def one_step(plan: Plan) -> StepRun:
    dtype = plan.recipe.train.dtype
    split = plan.split
    return simulate_step(split.ranks, split.replicas, plan.links, plan.recipe.model, dtype)


def loss_at(step: int) -> float:
    """A curve that falls from ln(512) and wobbles a little."""
    return 2.0 + (math.log(512) - 2.0) * math.exp(-step / 60) + 0.03 * math.sin(1.7 * step)


def write_events(folder: Path, rank: int, events: Iterable[Event]) -> Path:
    path = folder / "events" / f"rank-{rank:04d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(event)) + "\n" for event in events))
    return path


def write_run(
    folder: Path,
    plan: Plan,
    *,
    outcome: RunOutcome | None,
    change: Callable[[int, list[Event]], list[Event]] = lambda rank, events: events,
) -> Path:
    """A run folder; `change` may spoil the events of a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    store.save(plan, folder / "plan.json")
    if outcome is not None:
        store.save(outcome, folder / "launch.json")
    run = one_step(plan)
    for rank in range(len(plan.split.ranks)):
        write_events(folder, rank, change(rank, rank_events(plan, rank, run=run)))
    return folder


def _efficiency(step_s: float, rows: int, baselines: Sequence[Baseline]) -> Efficiency:
    def against(rates: Iterable[float | None]) -> Share:
        return Share(value=rows / step_s / sum(rate or 0.0 for rate in rates), kind=Source.MODELLED)

    return Efficiency(
        e1=against(base.rows_per_s for base in baselines),
        e2=against(base.scaled_rows_per_s for base in baselines),
        u=against(base.ideal_rows_per_s for base in baselines),
    )
