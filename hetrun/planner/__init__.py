"""Chooses who does what: `plan(...)` is the way in, the exact splits are in `split.py`. Pure: no clock, no randomness."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from hetrun.efficiency import efficiency
from hetrun.model import Baseline, Facts, HostSpec, Pins, Plan, Profile, Recipe, Source, Split
from hetrun.planner.baselines import baselines, quickest_of
from hetrun.planner.bound import gap_reason, lower_bound
from hetrun.planner.check import check_split
from hetrun.planner.even import even_split
from hetrun.planner.layout import Layout
from hetrun.planner.pins import choose
from hetrun.planner.problem import Problem, read_problem
from hetrun.planner.search import Outcome, search
from hetrun.planner.targets import TorchTarget, torch_targets
from hetrun.planner.words import (
    lane_notes,
    order_notes,
    plural,
    runner_up_words,
    verdict_words,
    zero_notes,
)
from hetrun.planner.zero import with_zero

__all__ = ["TorchTarget", "limited", "plan", "torch_targets"]


@contextmanager
def _without_collector() -> Iterator[None]:
    """Leave cyclic garbage alone: looking for it among 100,000 ranks takes half of the time, and there is hardly any."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collector()
def plan(
    facts: Facts,
    profile: Profile,
    recipe: Recipe,
    *,
    targets: Mapping[str, TorchTarget],
    created: str = "",
) -> Plan:
    """Return the quickest split that fits, with its bound, its baselines and the naive split beside it.

    Raises:
        NoPlanError: nothing fits, or the files do not belong together.
        ConfigError: a link that the plan would need has no figures.
    """
    problem = read_problem(facts, profile, recipe, targets=targets)
    chosen = choose(problem, recipe.plan.pins)
    found = baselines(problem, chosen.free)
    alone = tuple(one.baseline for one in found)
    free = quickest_of(chosen.free, found)
    outcome = free if recipe.plan.pins in (None, Pins()) else chosen.outcome
    split = _split(problem, outcome.best.layout, alone)
    check_split(split, facts, profile, recipe)
    naive, why = even_split(problem)
    even = None if naive is None else _split(problem, naive, alone)
    if even is not None:
        check_split(even, facts, profile, recipe)
    bound = lower_bound(problem, shapes_s=outcome.bound_s)
    notes = (
        *chosen.notes,
        *order_notes(outcome.best, outcome.plain),
        *lane_notes(outcome.best, outcome.turnless),
        *zero_notes(outcome.best, outcome.whole, choices=problem.zero),
        *_price_of_few_shapes(problem, free),
        *problem.notes,
    )
    return Plan(
        created=created,
        recipe=recipe,
        hosts=_hosts(facts, split),
        links=profile.links,
        emulated=any(rank.emulated for rank in split.ranks),
        split=split,
        even_split=even,
        even_split_why=why,
        bound_s=bound.step_s,
        bound_covers=_covered(problem, outcome),
        gap=split.cost.step_s / bound.step_s - 1,
        gap_reason=gap_reason(split.cost, bound, unlimited_s=_unlimited_s(problem, outcome)),
        idle_devices=_idle(problem, split),
        runner_up=runner_up_words(outcome.best, outcome.runner_up),
        baselines=alone,
        verdict=verdict_words(outcome.best, problem.batch_rows, alone, free=free.best, notes=notes),
    )


def _split(problem: Problem, layout: Layout, alone: tuple[Baseline, ...]) -> Split:
    """Put a layout beside the baselines."""
    return Split(
        ranks=layout.ranks,
        replicas=layout.replicas,
        cost=layout.cost,
        efficiency=efficiency(layout.cost.step_s, problem.batch_rows, alone, kind=Source.MODELLED),
    )


def _hosts(facts: Facts, split: Split) -> tuple[HostSpec, ...]:
    """Return the hosts that run ranks, in order of their ranks."""
    specs = {host.spec.name: host.spec for host in facts.hosts}
    return tuple(specs[name] for name in dict.fromkeys(rank.host for rank in split.ranks))


def _idle(problem: Problem, split: Split) -> tuple[str, ...]:
    """Return devices that the split leaves out."""
    used = {(rank.host, rank.device_index) for rank in split.ranks}
    seats = [seat for kind in problem.groups for seat in kind.seats]
    return tuple(
        seat.name
        for seat in (*seats, *problem.left_over)
        if (seat.host, seat.device.index) not in used
    )


def limited(recipe: Recipe, max_shapes: int | None) -> Recipe:
    """Return the recipe with at most so many different replicas; None changes nothing."""
    if max_shapes is None:
        return recipe
    return replace(recipe, plan=replace(recipe.plan, max_shapes=max_shapes))


def _covered(problem: Problem, outcome: Outcome) -> str:
    """Say what the bound holds for."""
    if outcome.bound_s <= lower_bound(problem).compute_s:
        return "any split"
    return f"any split into the {outcome.num_shapes} replica shapes that were looked at"


def _price_of_few_shapes(problem: Problem, outcome: Outcome) -> tuple[str, ...]:
    """Say what the limit on different replicas costs, where there is one."""
    if problem.max_shapes is None:
        return ()
    free_s = with_zero(replace(problem, max_shapes=None), search).best.step_s
    more = max(0.0, outcome.best.step_s / free_s - 1)
    shapes = plural(problem.max_shapes, "replica shape")
    return (f"At most {shapes}: {more:.2%} slower than with any number of them",)


def _unlimited_s(problem: Problem, outcome: Outcome) -> float | None:
    """Return the best step on devices with endless memory, where memory stood in the way at all."""
    if not outcome.memory_bound:
        return None
    alike = replace(problem, shards=outcome.best.layout.replicas[0].zero)
    return search(alike.without_memory_limits(), quick=True).best.step_s
