"""Small plans for launch tests: so many ranks on each host, one layer each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetrun.launch import WorkerCode
from hetrun.model import (
    Cost,
    DataSpec,
    Efficiency,
    Event,
    HostSpec,
    LaunchSpec,
    Link,
    LinkKind,
    ModelSpec,
    Plan,
    RankPlan,
    Recipe,
    ReplicaPlan,
    Share,
    Source,
    Split,
    StagePlan,
    TrainSpec,
)

FAKE = WorkerCode(
    module="hetrun_fake_worker",
    extra={"hetrun_fake_worker.py": Path(__file__).with_name("fake_worker.py").read_bytes()},
)
UNKNOWN = Share(value=None, kind=Source.ASSUMED)


class Recorder:
    """An observer that keeps all it is told."""

    def __init__(self) -> None:
        self.status: list[tuple[str, str]] = []
        self.events: list[Event] = []
        self.lines: list[tuple[str, int | None, str]] = []

    def on_status(self, host: str, text: str) -> None:
        self.status.append((host, text))

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def on_line(self, host: str, rank: int | None, line: str) -> None:
        self.lines.append((host, rank, line))


def make_plan(hosts: Sequence[tuple[HostSpec, int]], device: str = "cpu", **launch: Any) -> Plan:
    """One pipeline over all ranks; `launch` goes into the recipe's launch section."""
    ranks: list[RankPlan] = []
    for spec, count in hosts:
        for local_rank in range(count):
            number = len(ranks)
            ranks.append(
                RankPlan(
                    rank=number,
                    host=spec.name,
                    local_rank=local_rank,
                    device_index=local_rank,
                    vendor="cpu",
                    model="cpu",
                    replica=0,
                    stage=number,
                    torch_device=device,
                )
            )
    num_ranks = len(ranks)
    checkpoint = launch.pop("checkpoint", None)
    stages = tuple(_stage(number, num_ranks) for number in range(num_ranks))
    replica = ReplicaPlan(first_row=0, microbatch_rows=1, num_microbatches=4, stages=stages)
    cost = Cost(step_s=1, compute_s=1, bubble_s=0, p2p_s=0, sync_s=0, optimizer_s=0)
    efficiency = Efficiency(e1=UNKNOWN, e2=UNKNOWN, u=UNKNOWN)
    recipe = Recipe(
        name="tiny",
        model=ModelSpec(
            num_layers=num_ranks, hidden_size=32, num_heads=2, ffn_size=64, vocab_size=256
        ),
        data=DataSpec(seq_len=16),
        train=TrainSpec(steps=5, global_batch_rows=4),
        launch=LaunchSpec(**{"stop_grace_s": 2.0, "start_timeout_s": 50.0, **launch}),
        checkpoint=checkpoint,
    )
    return Plan(
        created="2030-01-01T00:00:00+00:00",
        recipe=recipe,
        hosts=tuple(spec for spec, _ in hosts),
        links=tuple(Link(kind=kind, latency_s=1e-4, bytes_per_s=1e9) for kind in LinkKind),
        emulated=False,
        split=Split(ranks=tuple(ranks), replicas=(replica,), cost=cost, efficiency=efficiency),
        even_split=None,
        bound_s=1.0,
        gap=0.0,
        gap_reason="none",
    )


def _stage(number: int, num_ranks: int) -> StagePlan:
    return StagePlan(
        ranks=(number,),
        first_layer=number,
        num_layers=1,
        has_embedding=number == 0,
        has_head=number == num_ranks - 1,
        window=num_ranks - number,
        forward_s=0.01,
        backward_s=0.02,
        send_s=0.001 if number < num_ranks - 1 else 0.0,
        optimizer_s=0.001,
        memory_bytes=1 << 20,
        memory_limit_bytes=None,
    )


def fake_env(meet: Path, fault: str = "", **more: str) -> Mapping[str, str]:
    """Environment of the recipe for the fake worker."""
    meet.mkdir(exist_ok=True)
    return {"HETRUN_FAKE_MEET": str(meet), "HETRUN_FAKE": fault, **more}
