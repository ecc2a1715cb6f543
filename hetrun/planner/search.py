"""Best split of a problem: enumerate shapes, compose them, simulate the best. Says why where nothing fits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, permutations

from hetrun.errors import NoPlanError
from hetrun.model import GIB
from hetrun.planner.bound import lower_bound
from hetrun.planner.compose import combos
from hetrun.planner.drafts import (
    Candidate,
    Groups,
    best_of,
    groups_of,
    judge,
    narrowed,
    polish,
    repaired,
    widened,
)
from hetrun.planner.estimate import Combo, quickest
from hetrun.planner.problem import Problem
from hetrun.planner.shapes import ShapeMaker, enumerate_shapes
from hetrun.planner.words import plural

log = logging.getLogger(__name__)

_NUM_SIMULATED = 50  # combinations that the simulator ranks
_NUM_SIMULATED_QUICK = 8
_NUM_POLISHED = 3
_NUM_POLISHED_SMALL = 8  # with few devices, where a row or a layer is much
_SMALL = 8
_POLISH_BUDGET = 40  # simulations per polished combination
_MOST_ORDERS = 24
_EVENTS_BUDGET = 2_000_000  # forwards and backwards in all simulations of one search


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The best combination, the best that is built otherwise, and whether memory stood in the way."""

    best: Candidate
    runner_up: Candidate | None
    memory_bound: bool


def search(problem: Problem, *, quick: bool = False) -> Outcome:
    """Return the quickest split within the allowed shapes; `quick` ones may miss the last percent.

    Raises:
        NoPlanError: nothing fits, or the batch cannot be made of whole microbatches.
    """
    _check_batch(problem)
    maker = ShapeMaker(problem)
    shapes = enumerate_shapes(maker, quick=quick)
    if not shapes:
        raise shortage(maker)
    found = combos(problem, shapes, lower_bound(problem).compute_s)
    most = _NUM_SIMULATED_QUICK if quick else _NUM_SIMULATED
    judged = _simulate(maker, quickest(problem, found, most=most))
    if not judged:
        raise NoPlanError(
            f"no whole microbatches of {list(problem.row_choices)} rows share out"
            f" {problem.batch_rows} rows",
            hint="add 1 to train.microbatch_rows, or change train.global_batch_rows",
        )
    polished = judged if quick else _polish_best(maker, judged)
    best = narrowed(problem, best_of(polished))
    others = [c for c in [*polished, *judged] if _outline(c) != _outline(best)]
    log.debug("%d shapes, %d combinations simulated", len(shapes), len(judged))
    return Outcome(
        best=best,
        runner_up=best_of(others) if others else None,
        memory_bound=maker.dropped_for_memory > 0 or any(shape.memory_bound for shape in shapes),
    )


def _simulate(maker: ShapeMaker, ranked: Sequence[Combo]) -> list[Candidate]:
    """Judge combinations in order, with wide windows where they fit, until the budget of events is spent."""
    problem = maker.problem
    judged: list[Candidate] = []
    events = 0
    for combo in ranked:
        groups = groups_of(problem, combo) or repaired(maker, combo)
        if groups is None:
            continue
        judged.append(judge(problem, widened(maker, groups)))
        events += _events(groups)
        if events > _EVENTS_BUDGET:
            break
    return judged


def _polish_best(maker: ShapeMaker, judged: Sequence[Candidate]) -> list[Candidate]:
    """Polish the best few that differ in their outline; more of them where simulations are short."""
    chosen: dict[tuple[object, ...], Candidate] = {}
    for candidate in sorted(judged, key=lambda c: (c.step_s, len(c.layout.ranks))):
        chosen.setdefault(_outline(candidate), candidate)
    polished = []
    small = maker.problem.num_devices <= _SMALL
    most = _NUM_POLISHED_SMALL if small else _NUM_POLISHED
    for candidate in list(chosen.values())[:most]:
        budget = min(_POLISH_BUDGET, _EVENTS_BUDGET // (most * _events(candidate.groups)))
        polished.append(polish(maker, candidate, budget=budget))
    return polished


def _events(groups: Groups) -> int:
    """Return about how many events a simulation plays; rounds that only repeat are skipped."""
    stages = [(g.shape.num_stages, g.counts[0]) for g in groups]
    return sum(2 * size * min(count, 6 * size) for size, count in stages)


def _outline(candidate: Candidate) -> tuple[object, ...]:
    """Return what makes two candidates the same in the eyes of a reader: replicas and their blocks."""
    return tuple(sorted((g.shape.kinds, len(g.counts)) for g in candidate.groups))


def _check_batch(problem: Problem) -> None:
    """Refuse a batch that no number of whole microbatches makes up."""
    reachable = {0}
    for rows in problem.row_choices:
        for total in range(rows, problem.batch_rows + 1):
            if total - rows in reachable:
                reachable.add(total)
    if problem.batch_rows not in reachable:
        raise NoPlanError(
            f"{problem.batch_rows} rows per step cannot be made of microbatches of"
            f" {list(problem.row_choices)} rows",
            hint="add a divisor of train.global_batch_rows to train.microbatch_rows",
        )


def shortage(maker: ShapeMaker) -> NoPlanError:
    """Return the error that names the group which lacks memory, how much, and what would help."""
    problem = maker.problem
    orders = islice(permutations(range(len(problem.kinds))), _MOST_ORDERS)
    lacking, kind_number, held = min(_lacking(maker, order) for order in orders)
    kind = problem.kinds[kind_number]
    have = "; ".join(
        f"{len(k.seats)} x {k.name} with {(k.limit_bytes or 0) / GIB:.3g} GiB to use"
        for k in problem.kinds
    )
    rows = problem.row_choices[0]
    knobs = ["add devices", "lower data.seq_len", "train in a smaller dtype"]
    if rows > 1:
        knobs.insert(0, "allow smaller train.microbatch_rows")
    if problem.max_stages < min(problem.num_devices, problem.model.num_layers):
        knobs.insert(0, f"raise plan.max_stages (now {problem.max_stages})")
    return NoPlanError(
        f"no split fits: {kind.name} lacks {max(lacking, 1) / GIB:.3g} GiB ({have}; together they"
        f" hold {held} of {problem.model.num_layers} layers with {plural(rows, 'row')} per microbatch)",
        hint=", or ".join(knobs),
    )


def _lacking(maker: ShapeMaker, order: Sequence[int]) -> tuple[int, int, int]:
    """Return bytes that the deepest pipeline in this order lacks, the tightest kind, and layers held."""
    problem = maker.problem
    stages = [kind for kind in order for _ in problem.kinds[kind].seats][: problem.max_stages]
    rows = problem.row_choices[0]
    lacking = held = 0
    room: dict[int, int] = {}
    for index, kind in enumerate(stages):
        spare = maker.spare_bytes(kind, rows, size=len(stages), index=index) or 0
        lacking += max(0, -spare)
        held += max(0, maker.cap(kind, rows, size=len(stages), index=index))
        room[kind] = min(room.get(kind, spare), spare)
    missing = max(0, problem.model.num_layers - held)
    lacking += missing * maker.layer_bytes(rows, window=1)
    tightest = min(room, key=lambda kind: (room[kind], kind))
    return lacking, tightest, min(held, problem.model.num_layers)
