"""What each vendor reaches alone, with its own best plan: the denominators of E1 and E2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from hetrun.errors import NoPlanError
from hetrun.model import Baseline
from hetrun.planner.bound import ideal_rows_per_s
from hetrun.planner.problem import Problem
from hetrun.planner.search import Outcome, search
from hetrun.planner.words import shape_words
from hetrun.planner.zero import with_zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What a vendor reaches, and the plan for the whole batch behind it, where there is one."""

    baseline: Baseline
    outcome: Outcome | None


def quickest_of(mixed: Outcome, alone: Sequence[Alone]) -> Outcome:
    """Return the quickest split of all devices, or that of a vendor whose own search found a quicker one."""
    found = [one.outcome for one in alone if one.outcome is not None]
    best = min(found, key=lambda outcome: outcome.best.step_s, default=mixed)
    if best.best.step_s >= mixed.best.step_s:
        return mixed
    return replace(
        best,
        runner_up=mixed.best,
        memory_bound=mixed.memory_bound,
        bound_s=mixed.bound_s,
        num_shapes=mixed.num_shapes,
    )


def baselines(problem: Problem, mixed: Outcome) -> tuple[Alone, ...]:
    """Plan every vendor alone, at the same global batch and at its share of it by ideal speed."""
    ideal = ideal_rows_per_s(problem)
    total = sum(ideal.values())
    return tuple(
        _alone(problem, vendor, ideal_rows_per_s=rate, share=rate / total, mixed=mixed)
        for vendor, rate in ideal.items()
    )


def _alone(
    problem: Problem, vendor: str, *, ideal_rows_per_s: float, share: float, mixed: Outcome
) -> Alone:
    """Plan one vendor alone; without other vendors that is the plan itself."""
    own = problem if len(problem.vendors) == 1 else problem.only(vendor)
    scaled_rows = _whole_rows(own, problem.batch_rows * share)
    why = shape = ""
    rows_per_s = scaled_rows_per_s = outcome = None
    try:
        find = partial(search, among=problem.num_devices)
        outcome = mixed if own is problem else with_zero(own, find)
        rows_per_s = own.batch_rows / outcome.best.step_s
        shape = shape_words(outcome.best.layout.replicas)
        if scaled_rows == own.batch_rows:
            scaled_rows_per_s = rows_per_s
        else:
            smaller = with_zero(own.with_batch(scaled_rows), find)
            scaled_rows_per_s = scaled_rows / smaller.best.step_s
    except NoPlanError as error:
        why = error.message.partition(" (")[0]
    baseline = Baseline(
        vendor=vendor,
        num_devices=own.num_devices,
        rows_per_s=rows_per_s,
        scaled_batch_rows=scaled_rows,
        scaled_rows_per_s=scaled_rows_per_s,
        ideal_rows_per_s=ideal_rows_per_s,
        shape=shape,
        why=why,
    )
    return Alone(baseline=baseline, outcome=outcome)


def _whole_rows(problem: Problem, wanted: float) -> int:
    """Return the batch nearest to `wanted` that whole microbatches make up, at least the smallest one."""
    reachable = {0}
    for total in range(1, problem.batch_rows + 1):
        if any(total - rows in reachable for rows in problem.row_choices):
            reachable.add(total)
    return min(reachable - {0}, key=lambda rows: (abs(rows - wanted), rows))
