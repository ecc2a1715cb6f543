"""A run folder -> RunReport. How it looks is left to `html.py`, what is odd about the run to `doubts.py`.

Times are on the run's clock; the first step is left out of every mean, since it pays for set-up.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetrun.efficiency import efficiency
from hetrun.errors import ConfigError, JobError
from hetrun.model import (
    Efficiency,
    EvenSplitReport,
    Failure,
    HeldOutLoss,
    LossCurve,
    Pacing,
    Plan,
    RankTrace,
    RankUse,
    RunOutcome,
    RunReport,
    Share,
    Source,
    StageUse,
)
from hetrun.report.doubts import doubts
from hetrun.report.gather import Gathered, RankSums, StepSums, gather
from hetrun.report.share import shareable
from hetrun.report.words import shape_of
from hetrun.store import load

UNFINISHED = "unfinished"  # status of a run whose launch left no record
_SIMULATED = "the vendors alone were simulated"


def build_report(run_dir: Path, *, share: bool = False) -> RunReport:
    """Return what the run was worth, also where it failed or was stopped, as long as one step was finished.

    With `share` it names no host, address, user or path.

    Raises:
        ConfigError: no run folder, or a file in it is not what its format says.
        JobError: no rank finished a step.
        StorageError: a file cannot be read.
    """
    plan, outcome = _load(run_dir)
    gathered = gather(run_dir / "events", num_ranks=len(plan.split.ranks))
    failures = _failures(outcome, gathered)
    if not gathered.steps:
        raise _no_steps(run_dir, outcome, failures)
    step_s = step_seconds(gathered.steps)
    kind = Source.MODELLED if plan.emulated else Source.MEASURED
    ranks = rank_uses(plan, gathered.ranks)
    predicted_step_s = plan.split.cost.step_s
    report = RunReport(
        run_id=outcome.run_id if outcome else run_dir.name,
        recipe=plan.recipe.name,
        kind=kind.value,
        status=outcome.status if outcome else UNFINISHED,
        steps=len(gathered.steps),
        loss=_loss(gathered.steps),
        tokens_per_s=statistics.fmean(s.num_tokens for s in _later(gathered.steps)) / step_s,
        step_s=step_s,
        predicted_step_s=predicted_step_s,
        prediction_error=step_s / predicted_step_s - 1,
        wall_s=outcome.wall_s if outcome else _wall_s(gathered),
        efficiency=_efficiency(plan, step_s, kind),
        even_split=_even_split(plan),
        even_split_why=plan.even_split_why,
        predicted=plan.split.cost,
        bound_s=plan.bound_s,
        gap=plan.gap,
        gap_reason=plan.gap_reason,
        baselines=plan.baselines,
        verdict=plan.verdict,
        ranks=ranks,
        timeline=_timeline(gathered.ranks),
        started=outcome.started if outcome else "",
        shape=shape_of(plan.split.replicas),
        planned_steps=plan.recipe.train.steps,
        first_step=gathered.steps[0].step,
        global_batch_rows=plan.recipe.train.global_batch_rows,
        predicted_efficiency=plan.split.efficiency,
        stages=_stage_uses(plan, ranks, gathered.ranks),
        failures=failures,
        skipped=outcome.skipped if outcome else (),
        idle_devices=plan.idle_devices,
        runner_up=plan.runner_up,
        held_out=tuple(HeldOutLoss(step=step, loss=x) for step, x in gathered.held_out.items()),
        pacing=_pacing(plan, gathered.steps),
        num_comparisons=len({step for sums in gathered.ranks.values() for step in sums.compared}),
        num_drifts=sum(sum(sums.compared.values()) for sums in gathered.ranks.values()),
    )
    report = replace(report, warnings=doubts(report, plan, outcome, gathered=gathered))
    return shareable(report, plan) if share else report


def _pacing(plan: Plan, steps: Sequence[StepSums]) -> Pacing | None:
    """How well real time followed, where launch wanted a pace."""
    pace = plan.recipe.launch.pace
    paced = [
        (s.real_s, s.step_s, s.late_s) for s in _later(steps) if s.real_s and s.late_s is not None
    ]
    if pace is None or not paced:
        return None
    return Pacing(
        pace=pace,
        error=statistics.median(real_s / (pace * step_s) for real_s, step_s, _ in paced) - 1,
        late_s=max(late_s for *_, late_s in paced),
    )


def step_seconds(steps: Sequence[StepSums]) -> float:
    """Median seconds of a step of the slowest rank, first step left out unless there is no other."""
    return statistics.median(step.step_s for step in _later(steps))


def rank_uses(plan: Plan, sums_of: dict[int, RankSums]) -> tuple[RankUse, ...]:
    """Return the shares of every rank that finished a step; time that a rank does not account for is idle."""
    uses = []
    for rank in plan.split.ranks:
        sums = sums_of.get(rank.rank)
        if sums is None or sums.first is None:
            continue
        stage = plan.split.replicas[rank.replica].stages[rank.stage]
        total_s = max(sums.step_s, sums.busy_s + sums.communication_s + sums.idle_s)
        busy = max(0.0, sums.busy_s / total_s)
        communication = max(0.0, sums.communication_s / total_s)
        use = RankUse(
            rank=rank.rank,
            host=rank.host,
            vendor=rank.vendor,
            replica=rank.replica,
            stage=rank.stage,
            num_layers=stage.num_layers,
            busy=busy,
            communication=communication,
            idle=max(0.0, 1.0 - busy - communication),
        )
        uses.append(use)
    return tuple(uses)


def _load(run_dir: Path) -> tuple[Plan, RunOutcome | None]:
    plan_path = run_dir / "plan.json"
    if not plan_path.is_file():
        what = "is no run folder: plan.json is missing" if run_dir.exists() else "is not there"
        raise ConfigError(
            f"{run_dir} {what}",
            hint="name a folder that `hetrun launch` made, such as runs/<time>-<recipe>",
        )
    outcome_path = run_dir / "launch.json"
    outcome = load(RunOutcome, outcome_path) if outcome_path.is_file() else None
    return load(Plan, plan_path), outcome


def _no_steps(run_dir: Path, outcome: RunOutcome | None, failures: Sequence[Failure]) -> JobError:
    status = outcome.status if outcome else UNFINISHED
    message = f"{run_dir}: no rank finished a step, nothing to report (status: {status})"
    if failures:
        root = failures[0]
        rank = "" if root.rank is None else f"rank {root.rank}: "
        message = f"{message}; first failure on {root.host}: {rank}{root.what}"
    if outcome is None:
        hint = "launch left no launch.json: it is still running, or was killed; see the logs/ beside it"
    else:
        hint = f"read {run_dir / 'all.log'}, mend the cause and launch again"
    return JobError(message, hint=hint)


def _later(steps: Sequence[StepSums]) -> Sequence[StepSums]:
    return steps[1:] or steps


def _loss(steps: Sequence[StepSums]) -> LossCurve:
    values = tuple(step.loss for step in steps)
    return LossCurve(first=values[0], last=values[-1], values=values)


def _wall_s(gathered: Gathered) -> float:
    """Seconds from the first start to the last step, on the hosts' clocks; 0 where no rank said when it began."""
    starts = [sums.start.wall_s for sums in gathered.ranks.values() if sums.start]
    end_s = max(step.wall_s for step in gathered.steps)
    return max(0.0, end_s - min(starts)) if starts else 0.0


def _efficiency(plan: Plan, step_s: float, kind: Source) -> Efficiency:
    """Efficiency of the run; measured seconds against simulated baselines are no better than modelled."""
    rows = plan.recipe.train.global_batch_rows
    found = efficiency(step_s, rows, plan.baselines, kind=kind)
    return Efficiency(e1=_weaker(found.e1), e2=_weaker(found.e2), u=found.u)


def _weaker(share: Share) -> Share:
    if share.kind is not Source.MEASURED or share.value is None:
        return share
    return replace(share, kind=Source.MODELLED, why=share.why or _SIMULATED)


def _even_split(plan: Plan) -> EvenSplitReport | None:
    split = plan.even_split
    if split is None:
        return None
    return EvenSplitReport(
        efficiency=split.efficiency, cost=split.cost, shape=shape_of(split.replicas)
    )


def _stage_uses(
    plan: Plan, uses: Sequence[RankUse], sums_of: dict[int, RankSums]
) -> tuple[StageUse, ...]:
    busy_of = {use.rank: use.busy for use in uses}
    found = []
    for number, replica in enumerate(plan.split.replicas):
        for index, stage in enumerate(replica.stages):
            members = [plan.split.ranks[rank] for rank in stage.ranks]
            busy = [busy_of[rank] for rank in stage.ranks if rank in busy_of]
            peaks = [
                peak
                for rank in stage.ranks
                if rank in sums_of and (peak := sums_of[rank].peak_memory_bytes) is not None
            ]
            use = StageUse(
                replica=number,
                stage=index,
                vendor=members[0].vendor,
                models=tuple(sorted({member.model for member in members})),
                ranks=stage.ranks,
                first_layer=stage.first_layer,
                num_layers=stage.num_layers,
                has_embedding=stage.has_embedding,
                has_head=stage.has_head,
                rows=replica.num_rows,
                microbatch_rows=replica.microbatch_rows,
                window=stage.window,
                memory_bytes=stage.memory_bytes,
                memory_limit_bytes=stage.memory_limit_bytes,
                peak_memory_bytes=max(peaks, default=None),
                busy=statistics.fmean(busy) if busy else None,
            )
            found.append(use)
    return tuple(found)


def _timeline(sums_of: dict[int, RankSums]) -> tuple[RankTrace, ...]:
    """Traces of the last step that the most ranks traced."""
    ranks_with: dict[int, int] = {}
    for sums in sums_of.values():
        for trace in sums.traces:
            ranks_with[trace.step] = ranks_with.get(trace.step, 0) + 1
    if not ranks_with:
        return ()
    chosen = max(ranks_with, key=lambda step: (ranks_with[step], step))
    return tuple(
        RankTrace(rank=rank, step=chosen, spans=trace.spans)
        for rank, sums in sorted(sums_of.items())
        for trace in sums.traces[-1:] + sums.traces[:-1]
        if trace.step == chosen
    )


def _failures(outcome: RunOutcome | None, gathered: Gathered) -> tuple[Failure, ...]:
    """Launch's list, whose clock is one for all hosts; else what the ranks said themselves, earliest first."""
    if outcome is not None and outcome.failures:
        return outcome.failures
    errors = [sums.error for sums in gathered.ranks.values() if sums.error]
    return tuple(
        Failure(
            host=error.host,
            rank=error.rank,
            when_s=error.wall_s,
            what=f"raised {error.kind}: {error.message}",
            last_lines=tuple(error.traceback.splitlines()[-20:]),
        )
        for error in sorted(errors, key=lambda error: error.wall_s)
    )
