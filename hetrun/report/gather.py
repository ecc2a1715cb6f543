"""Adds up the events of all ranks, one file after the other, so that long runs of many ranks fit into memory.

What the sums mean is left to `build.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from hetrun.model import (
    CheckpointEvent,
    ComparisonEvent,
    EndEvent,
    ErrorEvent,
    EvaluationEvent,
    StartEvent,
    StepEvent,
    TraceEvent,
    WarningEvent,
)
from hetrun.report.events import read_events
from hetrun.report.words import printable

_FILE = re.compile(r"rank-(\d{4,9})\.jsonl")
_MOST_WARNINGS = 100  # of ranks
_KEPT_TRACES = 2  # the last one may be missing on ranks that were stopped early


@dataclass(slots=True)
class RankSums:
    """What one rank said of itself. Sums leave its first step out unless there is no other."""

    rank: int
    start: StartEvent | None = None
    error: ErrorEvent | None = None
    end: EndEvent | None = None
    first: StepEvent | None = None
    last: StepEvent | None = None
    num_later: int = 0
    busy_s: float = 0.0
    communication_s: float = 0.0
    idle_s: float = 0.0
    step_s: float = 0.0
    peak_memory_bytes: int | None = None
    traces: list[TraceEvent] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    compared: dict[int, int] = field(default_factory=dict)  # step -> parts that differed

    def add(self, event: StepEvent) -> None:
        """Count one step."""
        if event.peak_memory_bytes is not None:
            self.peak_memory_bytes = max(self.peak_memory_bytes or 0, event.peak_memory_bytes)
        if self.last is not None and self.num_later == 0:
            self.busy_s = self.communication_s = self.idle_s = self.step_s = 0.0
        if self.first is None:
            self.first = event
        else:
            self.num_later += 1
        self.last = event
        self.busy_s += event.busy_s
        self.communication_s += event.communication_s
        self.idle_s += event.idle_s
        self.step_s += event.step_s


@dataclass(slots=True)
class StepSums:
    """What the ranks said of one step."""

    step: int
    step_s: float  # of the slowest rank
    loss: float  # of the rank with the lowest number
    lowest_loss: float
    highest_loss: float
    num_tokens: int
    same_tokens: bool = True
    num_ranks: int = 1
    wall_s: float = 0.0
    real_s: float | None = None  # of the slowest rank, in paced runs
    late_s: float | None = None

    def add(self, event: StepEvent) -> None:
        """Count what one more rank said."""
        self.step_s = max(self.step_s, event.step_s)
        self.num_ranks += 1
        self.same_tokens = self.same_tokens and event.num_tokens == self.num_tokens
        self.wall_s = max(self.wall_s, event.wall_s)
        self.real_s = max(self.real_s or 0.0, event.real_s) if event.real_s is not None else None
        self.late_s = max(self.late_s or 0.0, event.late_s) if event.late_s is not None else None
        self.lowest_loss = min(self.lowest_loss, event.loss)
        self.highest_loss = max(self.highest_loss, event.loss)


@dataclass(frozen=True, slots=True)
class Gathered:
    """All ranks that left events, all steps that some rank finished, and what could not be read."""

    ranks: dict[int, RankSums]
    steps: tuple[StepSums, ...]
    held_out: dict[
        int, float
    ]  # step -> loss of the held-out rows; that of the first rank to say it
    warnings: tuple[str, ...]


def gather(folder: Path, *, num_ranks: int) -> Gathered:
    """Read every `rank-NNNN.jsonl` in the folder; events of ranks that the plan does not have are passed over.

    Raises:
        ConfigError: a line is not what the format says.
        StorageError: a file cannot be read.
    """
    ranks: dict[int, RankSums] = {}
    steps: dict[int, StepSums] = {}
    warnings: list[str] = []
    numbered = {
        int(match.group(1)): path
        for path in folder.glob("rank-*.jsonl")
        if (match := _FILE.fullmatch(path.name))
    }
    for rank, path in sorted(numbered.items()):
        if rank >= num_ranks:
            warnings.append(f"{path.name}: the plan has {num_ranks} ranks, passed over")
            continue
        sums = _read_rank(path, rank, steps, warnings)
        if sums.start or sums.first or sums.error or sums.end:
            ranks[rank] = sums
    held_out: dict[int, float] = {}
    for sums in ranks.values():
        held_out = {**sums.held_out, **held_out}
    in_order = tuple(steps[step] for step in sorted(steps))
    return Gathered(ranks, in_order, dict(sorted(held_out.items())), tuple(warnings))


def _read_rank(path: Path, rank: int, steps: dict[int, StepSums], warnings: list[str]) -> RankSums:
    """Add one rank's events to `steps` and return its own sums."""
    sums = RankSums(rank)
    num_foreign = num_repeated = 0
    for event in read_events(path, warnings.append):
        if event.rank != rank:
            num_foreign += 1
        elif isinstance(event, StepEvent):
            if sums.last is not None and event.step <= sums.last.step:
                num_repeated += 1
                continue
            sums.add(event)
            if event.step in steps:
                steps[event.step].add(event)
            else:
                steps[event.step] = _first_of(event)
        elif isinstance(event, WarningEvent):
            _keep_warning(event, warnings)
        else:
            _keep(event, sums)
    if num_foreign:
        warnings.append(f"{path.name}: {num_foreign} events name another rank, passed over")
    if num_repeated:
        warnings.append(f"{path.name}: {num_repeated} steps came twice, the first one counts")
    return sums


def _keep(
    event: StartEvent
    | TraceEvent
    | EvaluationEvent
    | CheckpointEvent
    | ComparisonEvent
    | ErrorEvent
    | EndEvent,
    sums: RankSums,
) -> None:
    if isinstance(event, StartEvent):
        sums.start = event
    elif isinstance(event, TraceEvent):
        sums.traces = [*sums.traces, event][-_KEPT_TRACES:]
    elif isinstance(event, EvaluationEvent):
        sums.held_out.setdefault(event.step, event.loss)
    elif isinstance(event, ComparisonEvent):
        sums.compared[event.step] = len(event.drifts)
    elif isinstance(event, ErrorEvent):
        sums.error = sums.error or event
    elif isinstance(event, EndEvent):
        sums.end = event


def _keep_warning(event: WarningEvent, warnings: list[str]) -> None:
    if len(warnings) < _MOST_WARNINGS:
        said = printable(event.message, max_chars=400)
        warnings.append(f"rank {event.rank} after step {event.step}: {said}")


def _first_of(event: StepEvent) -> StepSums:
    return StepSums(
        step=event.step,
        step_s=event.step_s,
        loss=event.loss,
        lowest_loss=event.loss,
        highest_loss=event.loss,
        num_tokens=event.num_tokens,
        wall_s=event.wall_s,
        real_s=event.real_s,
        late_s=event.late_s,
    )
