"""Best split of a problem: enumerate shapes, compose them, simulate the best. Says why where nothing fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations

from hetrun.errors import NoPlanError
from hetrun.model import GIB
from hetrun.planner.bound import lower_bound
from hetrun.planner.compose import combos
from hetrun.planner.drafts import (
    NEXT_TO_NOTHING,
    Candidate,
    Groups,
    best_of,
    groups_of,
    judge,
    narrowed,
    polish,
    repaired,
    widened,
    within,
)
from hetrun.planner.estimate import Combo, quickest
from hetrun.planner.orders import offers, refined
from hetrun.planner.problem import Problem
from hetrun.planner.scale import bound_of, many_shapes, scaled_combos
from hetrun.planner.shapes import ShapeMaker
from hetrun.planner.variety import FEW, enumerate_shapes
from hetrun.planner.words import plural

log = logging.getLogger(__name__)

_NUM_SIMULATED = 50  # combinations that the simulator ranks
_NUM_SIMULATED_QUICK = 8
_NUM_POLISHED = 3
_NUM_REFINED = 4  # outlines for which other orders and cuts are tried
_NUM_POLISHED_SMALL = 8  # with few devices, where a row or a layer is much
_SMALL = 8
_POLISH_BUDGET = 40  # simulations per polished combination
_NUM_SIMULATED_FEW = 150  # with few devices
_NUM_POLISHED_FEW = 32  # a little at first
_POLISH_BUDGET_FEW = (40, 200)  # at first, and for the best of these
_MOST_ORDERS = 24
_EVENTS_BUDGET = 2_000_000  # forwards and backwards in all simulations of one search
_LANES = (1, 2, 4)  # to advise
_LANES_SLOWER = 4  # an event of lanes takes so many times as long
_MANY = 8  # devices; with more of them shapes are handled as arrays
_NOT_SO_MANY = 24  # of these, up to here several outlines are refined
_MUCH_TRAFFIC = 0.05  # of a step, in sends that are waited for
_MOST_TWICE = 20_000  # devices; with more of them a second search takes too long
_NUM_SCALED = 8  # combinations of many devices that the simulator ranks
_RANKS_BUDGET = 500  # ranks laid out in one search of many devices, after the first combination
_NUM_POLISHED_MANY = 2
_MOST_TRIES_MANY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The best combination, the best that is built otherwise, and whether memory stood in the way."""

    best: Candidate
    runner_up: Candidate | None
    memory_bound: bool
    bound_s: float = 0.0  # computing that no split into the shapes that were looked at beats
    num_shapes: int = 0  # 0: the bound holds for any split
    plain: Candidate | None = (
        None  # the best in 1F1B over whole layers, where another order or cut is quicker
    )
    turnless: Candidate | None = None  # the best with one lane per stage, where more are quicker
    whole: Candidate | None = None  # the best without shared updates, where these are quicker


def is_large(problem: Problem) -> bool:
    """Whether there are so many devices that shapes are handled as arrays."""
    return problem.num_devices > _MANY


def search(problem: Problem, *, quick: bool = False, large: bool = False) -> Outcome:
    """Return the quickest split within the allowed shapes; `quick` ones may miss the last percent.

    `large` searches few devices as it does many: a part of a large problem. Where stages may have several lanes, what
    is best without them is looked for first, and stays unless they gain more than next to nothing.

    Raises:
        NoPlanError: nothing fits, or the batch cannot be made of whole microbatches.
    """
    if not problem.takes_turns:
        return _search(problem, quick=quick, large=large)
    try:
        plain = _search(problem.without_lanes(), quick=quick, large=large)
    except NoPlanError as error:
        log.debug("with one lane per stage: %s", error)
        return _search(problem, quick=quick, large=large)
    laned = _search(problem, quick=quick, large=large)
    if laned.best.step_s >= plain.best.step_s * (1 - NEXT_TO_NOTHING):
        return plain
    return replace(laned, turnless=plain.best)


def _search(problem: Problem, *, quick: bool, large: bool) -> Outcome:
    """Search among all kinds of stages at once."""
    _check_batch(problem)
    maker = ShapeMaker(problem)
    if large or is_large(problem):
        return _less_traffic(problem, _search_many(maker, quick=quick), quick=quick)
    shapes = enumerate_shapes(maker, quick=quick)
    if not shapes:
        raise shortage(maker)
    found = _allowed(problem, combos(problem, shapes, lower_bound(problem).compute_s))
    most = _NUM_SIMULATED_FEW if problem.num_devices <= FEW else _NUM_SIMULATED
    most = _NUM_SIMULATED_QUICK if quick else most
    judged = _simulate(maker, quickest(problem, found, most=most))
    if not judged:
        raise _no_microbatches(problem)
    polished = judged if quick else _polish_best(maker, judged)
    found_best = _first_two(problem, [*polished, *judged], most=1 if quick else _NUM_REFINED)
    log.debug("%d shapes, %d combinations simulated", len(shapes), len(judged))
    return replace(
        found_best,
        memory_bound=maker.dropped_for_memory > 0 or any(shape.memory_bound for shape in shapes),
    )


def _less_traffic(problem: Problem, found: Outcome, *, quick: bool) -> Outcome:
    """Return the better of what was found and what is best on longer pipelines, where sends take much of a step.

    Many shapes are ranked without the sharing of a host's interface, which weighs on short pipelines of shared layers.
    """
    longer = problem.without_tp()
    if quick or len(longer.kinds) == len(problem.kinds) or problem.num_devices > _MOST_TWICE:
        return found
    if found.best.layout.cost.p2p_s <= _MUCH_TRAFFIC * found.best.step_s:
        return found
    try:
        other = _search_many(ShapeMaker(longer), quick=quick)
    except NoPlanError as error:
        log.debug("on longer pipelines: %s", error)
        return found
    if other.best.step_s >= found.best.step_s:
        return found
    return replace(other, bound_s=found.bound_s, num_shapes=found.num_shapes)


def _search_many(maker: ShapeMaker, *, quick: bool) -> Outcome:
    """Search with all shapes as arrays and a linear programme over how many of each there are."""
    problem = maker.problem
    shapes = many_shapes(maker)
    if not len(shapes):
        raise shortage(maker)
    bound_s = 0.0 if quick or offers(problem) else bound_of(problem, shapes)
    found = scaled_combos(maker, shapes, exact=not quick)
    most = min(_NUM_SIMULATED, max(_NUM_SCALED, _RANKS_BUDGET // problem.num_devices))
    most = 1 if quick else most
    judged = _simulate(maker, quickest(problem, found, most=most), most_ranks=_RANKS_BUDGET)
    if not judged:
        raise _no_microbatches(problem)
    polished = judged if quick else _polish_best(maker, judged, many=True)
    few = problem.num_devices <= _NOT_SO_MANY and not quick
    found_best = _first_two(problem, [*polished, *judged], most=_NUM_REFINED if few else 1)
    log.debug("%d shapes, %d combinations simulated", len(shapes), len(judged))
    return replace(
        found_best,
        memory_bound=shapes.dropped_for_memory > 0 or maker.dropped_for_memory > 0,
        bound_s=bound_s,
        num_shapes=len(shapes),
    )


def _allowed(problem: Problem, found: Iterable[Combo]) -> Iterator[Combo]:
    """Yield combinations of no more shapes than the recipe allows, with as many copies of a layer as assumed."""
    most, least = problem.max_shapes, problem.shards
    return (
        combo
        for combo in found
        if (most is None or len(combo) <= most)
        and (least <= 1 or least <= sum(count * min(shape.lanes) for shape, count in combo))
    )


def _no_microbatches(problem: Problem) -> NoPlanError:
    hint = "add 1 to train.microbatch_rows, or change train.global_batch_rows"
    if problem.max_shapes is not None:
        hint += ", or raise plan.max_shapes"
    return NoPlanError(
        f"no whole microbatches of {list(problem.row_choices)} rows share out"
        f" {problem.batch_rows} rows",
        hint=hint,
    )


def _first_two(problem: Problem, judged: Sequence[Candidate], *, most: int) -> Outcome:
    """Return the best candidate, with narrow windows where they cost nothing, and the best that is built otherwise.

    Of the best `most` that are built differently, other orders and cuts are tried too.
    """
    plain = narrowed(problem, best_of(judged))
    tried = [plain]
    if offers(problem):
        leaders = {_outline(plain): plain}
        for candidate in sorted(judged, key=lambda c: (c.step_s, len(c.layout.ranks))):
            leaders.setdefault(_outline(candidate), candidate)
        tried = [refined(problem, candidate) for candidate in list(leaders.values())[:most]]
    best = best_of(tried)
    others = [c for c in (*tried, *judged) if _outline(c) != _outline(best)]
    return Outcome(
        best=best,
        runner_up=best_of(others) if others else None,
        memory_bound=False,
        plain=plain if best.groups != plain.groups else None,
    )


def _simulate(
    maker: ShapeMaker, ranked: Sequence[Combo], *, most_ranks: int | None = None
) -> list[Candidate]:
    """Judge combinations in order, with wide windows where they fit, until a budget is spent."""
    problem = maker.problem
    judged: list[Candidate] = []
    events = ranks = 0
    for combo in ranked:
        groups = groups_of(problem, combo) or repaired(maker, combo)
        if groups is None or not within(problem, groups):
            continue
        judged.append(judge(problem, widened(maker, groups)))
        events += _events(groups)
        ranks += len(judged[-1].layout.ranks)
        if events > _EVENTS_BUDGET or (most_ranks is not None and ranks > most_ranks):
            break
    return judged


def _polish_best(
    maker: ShapeMaker, judged: Sequence[Candidate], *, many: bool = False
) -> list[Candidate]:
    """Polish the best few that differ in their outline; more of them where simulations are short."""
    chosen = _leaders(judged, _outline)
    polished = []
    num_devices = maker.problem.num_devices
    most = _NUM_POLISHED_SMALL if num_devices <= _SMALL else _NUM_POLISHED
    most_tries = _POLISH_BUDGET
    if many:
        most, most_tries = _NUM_POLISHED_MANY, min(_MOST_TRIES_MANY, _RANKS_BUDGET // num_devices)
    if num_devices <= FEW:
        first, most_tries = _POLISH_BUDGET_FEW
        chosen = _leaders(judged, _build)[:_NUM_POLISHED_FEW]
        chosen = _leaders([polish(maker, c, budget=first) for c in chosen], _build)
    for candidate in chosen[:most]:
        budget = min(most_tries, _EVENTS_BUDGET // (most * _events(candidate.groups)))
        polished.append(polish(maker, candidate, budget=budget))
    return polished


def _leaders(
    judged: Sequence[Candidate], key: Callable[[Candidate], tuple[object, ...]]
) -> list[Candidate]:
    """Return the best candidate of every key, the best first."""
    chosen: dict[tuple[object, ...], Candidate] = {}
    for candidate in sorted(judged, key=lambda c: (c.step_s, len(c.layout.ranks))):
        chosen.setdefault(key(candidate), candidate)
    return list(chosen.values())


def _events(groups: Groups) -> int:
    """Return about how many events a simulation plays; rounds that only repeat are skipped where no lanes take turns."""
    events = 0
    for group in groups:
        size, count = group.shape.num_stages, group.counts[0]
        plain = max(group.shape.lanes) == 1
        events += 2 * size * (min(count, 6 * size) if plain else _LANES_SLOWER * count)
    return events


def _outline(candidate: Candidate) -> tuple[object, ...]:
    """Return what makes two candidates the same in the eyes of a reader: replicas and their blocks."""
    replicas: dict[tuple[int, ...], int] = {}
    for group in candidate.groups:
        kinds = group.shape.kinds
        replicas[kinds] = replicas.get(kinds, 0) + len(group.counts)
    return tuple(sorted(replicas.items()))


def _build(candidate: Candidate) -> tuple[object, ...]:
    """Return the outline of a candidate with its microbatch sizes."""
    return tuple(sorted((g.shape.kinds, g.shape.rows, len(g.counts)) for g in candidate.groups))


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


def lanes_that_help(problem: Problem) -> tuple[int, ...]:
    """Return lanes with which some pipeline fits where none does without: first stages then hold fewer microbatches."""
    if problem.takes_turns or _any_fits(problem):
        return ()
    return _LANES if _any_fits(problem.with_lanes(_LANES)) else ()


def _any_fits(problem: Problem) -> bool:
    maker = ShapeMaker(problem)
    if is_large(problem):
        return len(many_shapes(maker)) > 0
    return bool(enumerate_shapes(maker, quick=True))


def shortage(maker: ShapeMaker) -> NoPlanError:
    """Return the error that names the group which lacks memory, how much, and what would help."""
    problem = maker.problem
    deep = [number for number, kind in enumerate(problem.kinds) if kind.lanes == 1]
    lean = {problem.places[number]: number for number in deep}  # the last of each group
    orders = islice(permutations(lean.values()), _MOST_ORDERS)
    lacking, kind_number, held = min(_lacking(maker, order) for order in orders)
    kind = problem.kinds[kind_number]
    have = "; ".join(
        f"{len(k.seats)} x {k.name} with {(k.limit_bytes or 0) / GIB:.3g} GiB to use"
        for k in problem.groups
    )
    rows = problem.row_choices[0]
    knobs = ["add devices", "lower data.seq_len", "train in a smaller dtype"]
    if not any(kind.recompute for kind in problem.kinds):
        knobs.insert(0, "allow plan.recompute")
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
    stages = [
        kind
        for kind in order
        for _ in range(len(problem.kinds[kind].seats) // problem.kinds[kind].width)
    ][: problem.max_stages]
    rows = problem.row_choices[0]
    lacking = held = 0
    room: dict[int, int] = {}
    for index, kind in enumerate(stages):
        window = len(stages) - index
        spare = maker.spare_bytes(kind, rows, window=window, first=index == 0) or 0
        lacking += max(0, -spare)
        held += max(0, maker.cap(kind, rows, window=window, first=index == 0))
        room[kind] = min(room.get(kind, spare), spare)
    missing = max(0, problem.model.num_layers - held)
    lacking += missing * maker.layer_bytes(stages[-1], rows, window=1)
    tightest = min(room, key=lambda kind: (room[kind], kind))
    return lacking, tightest, min(held, problem.model.num_layers)
