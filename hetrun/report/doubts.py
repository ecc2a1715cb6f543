"""What a reader of the report has to know before trusting it, as warnings; loudest first."""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.model import Plan, RunOutcome, RunReport, StagePlan, plan_sha
from hetrun.report.gather import Gathered, RankSums, StepSums
from hetrun.report.words import count, format_change, format_percent, format_seconds, some

LOSS_TOLERANCE = 1e-5  # relative; ranks share one reduced number, a few last bits may differ
_MODELLED_TOLERANCE = 1e-3  # the run's clock and the plan come from the same formulas
_MEASURED_TOLERANCE = 0.10
_SLOW_STEP = 1.5  # times the median
_UNACCOUNTED = 0.02  # of a step


def doubts(
    report: RunReport, plan: Plan, outcome: RunOutcome | None, *, gathered: Gathered
) -> tuple[str, ...]:
    """Return every warning about the run, what launch warned of included."""
    launched = (*outcome.warnings, *_not_clean(outcome)) if outcome else ()
    return (
        *_about_the_end(report, plan, outcome, gathered),
        *_about_loss(gathered.steps),
        *_about_parameters(plan, gathered),
        *_about_time(report, gathered),
        *launched,
        *gathered.warnings,
    )


def _not_clean(outcome: RunOutcome) -> tuple[str, ...]:
    if not outcome.not_clean:
        return ()
    return (f"could not confirm that nothing is left running on {some(outcome.not_clean)}",)


def _about_the_end(
    report: RunReport, plan: Plan, outcome: RunOutcome | None, gathered: Gathered
) -> list[str]:
    found = []
    last = gathered.steps[-1].step
    if outcome is None:
        found.append(
            "launch.json is missing: launch was killed or is still running; this is what the ranks wrote so far"
        )
    elif outcome.plan_sha and outcome.plan_sha != plan_sha(plan):
        found.append(
            "plan.json was changed after the run: predictions are not those that it ran with"
        )
    if last + 1 < report.planned_steps:
        done = count(len(gathered.steps), "step")
        found.append(f"the run ended early: {done} of {report.planned_steps} finished")
    silent = [rank for rank in plan.split.ranks if rank.rank not in gathered.ranks]
    if silent:
        hosts = sorted({rank.host for rank in silent})
        numbers = [rank.rank for rank in silent]
        found.append(f"no events from rank {some(numbers)} ({some(hosts)}): left out of all means")
    stepless = [rank for rank, sums in gathered.ranks.items() if sums.first is None]
    if stepless:
        found.append(f"rank {some(stepless)} started but finished no step: left out of all means")
    behind = [
        rank
        for rank, sums in gathered.ranks.items()
        if sums.last is not None and sums.last.step < last
    ]
    if behind:
        found.append(
            f"rank {some(behind)} reported fewer steps than others, which reached step {last}"
        )
    gaps = [
        b.step
        for a, b in zip(gathered.steps, gathered.steps[1:], strict=False)
        if b.step > a.step + 1
    ]
    if gaps:
        found.append(f"steps are missing before step {some(gaps)}: their events were lost")
    return found


def _about_loss(steps: Sequence[StepSums]) -> list[str]:
    found = []
    drifted = [step for step in steps if _drift(step) > LOSS_TOLERANCE]
    if drifted:
        worst = max(drifted, key=_drift)
        found.append(
            f"ranks disagree on the loss at {count(len(drifted), 'step')}, most at step {worst.step}: "
            f"{worst.lowest_loss:.8g} to {worst.highest_loss:.8g}; they should share one number"
        )
    unequal = [step.step for step in steps if not step.same_tokens]
    if unequal:
        found.append(f"ranks disagree on the number of tokens at step {some(unequal, most=3)}")
    return found


def _drift(step: StepSums) -> float:
    """Relative spread of the loss between ranks."""
    return (step.highest_loss - step.lowest_loss) / max(abs(step.loss), 1e-12)


def _about_parameters(plan: Plan, gathered: Gathered) -> list[str]:
    """Ranks that hold the same of the same layers in different replicas must end with the same parameters."""
    hashes: dict[tuple[int, ...], dict[str, int]] = {}
    for rank in plan.split.ranks:
        sums = gathered.ranks.get(rank.rank)
        if sums is not None and sums.end is not None and sums.end.parameters_sha:
            key = _held(plan.split.replicas[rank.replica].stages[rank.stage], rank.rank)
            hashes.setdefault(key, {}).setdefault(sums.end.parameters_sha, rank.rank)
    return [
        f"ranks {some(sorted(by_hash.values()))} hold the same layers but ended with different parameters"
        for by_hash in hashes.values()
        if len(by_hash) > 1
    ]


def _held(stage: StagePlan, rank: int) -> tuple[int, ...]:
    """Layers, embedding, head, and which share of the layers."""
    tp = len(stage.ranks) // stage.lanes
    units = (stage.first_layer, stage.num_layers, stage.has_embedding, stage.has_head)
    return (*units, tp, stage.ranks.index(rank) % tp)


def _about_time(report: RunReport, gathered: Gathered) -> list[str]:
    found = []
    modelled = report.kind == "modelled"
    limit = _MODELLED_TOLERANCE if modelled else _MEASURED_TOLERANCE
    if len(gathered.steps) == 1:
        found.append("only one step was finished: its time includes set-up")
    elif abs(report.prediction_error) > limit:
        change = format_change(report.prediction_error)
        why = (
            "on modelled time they should be equal"
            if modelled
            else "profile again to mend the plan"
        )
        found.append(f"a step took {change} against the prediction; {why}")
    slow = [step for step in gathered.steps[1:] if step.step_s > _SLOW_STEP * report.step_s]
    if slow:
        worst = max(slow, key=lambda step: step.step_s)
        found.append(
            f"{count(len(slow), 'step')} took over {_SLOW_STEP} times the median; "
            f"the slowest, step {worst.step}, took {format_seconds(worst.step_s)}"
        )
    loose = {rank: _unaccounted(sums) for rank, sums in gathered.ranks.items() if sums.first}
    worst_rank = max(loose, key=lambda rank: loose[rank])
    if loose[worst_rank] > _UNACCOUNTED:
        found.append(
            f"up to {format_percent(loose[worst_rank])} of a step (rank {worst_rank}) is in none of "
            "busy, communication and idle; it is counted as idle"
        )
    return found


def _unaccounted(sums: RankSums) -> float:
    said_s = sums.busy_s + sums.communication_s + sums.idle_s
    return max(0.0, 1 - said_s / sums.step_s)
