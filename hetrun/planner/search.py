"""Best split of a problem: enumerate shapes, compose them, simulate the best. Says why where nothing fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from hetrun.errors import NoPlanError
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
from hetrun.planner.orders import leanest, offers, roomiest
from hetrun.planner.problem import Problem
from hetrun.planner.promise import promise_s
from hetrun.planner.refusals import check_batch, no_microbatches, shortage
from hetrun.planner.scale import bound_of, many_shapes, scaled_combos
from hetrun.planner.shapes import ShapeMaker
from hetrun.planner.variety import ANY_MIX, FEW, enumerate_shapes
from hetrun.schedule.step import waiting_s

log = logging.getLogger(__name__)

_NUM_SIMULATED = 150  # combinations of few devices that the simulator ranks
_NUM_SIMULATED_QUICK = 8
_NUM_POLISHED = 32  # of these, a little at first
_NUM_AGAIN = 8  # of these, more
_POLISH_BUDGET = (40, 200)  # simulations per combination, at first and again
# outlines of which those that promise most are refined, where there are many devices
_NUM_LIKELY = 12
_NUM_REFINED = 1
_NEARLY = 1.01  # of the best step: so much a leaner way may be quicker, at times
_REFINED_AT_LEAST = 4  # of few devices; more only while all together play so many events
_REFINED_EVENTS = 500_000
_EVENTS_BUDGET = 2_000_000  # forwards and backwards in all simulations of one search
_LANES = (1, 2, 4)  # to advise
_LANES_SLOWER = 4  # an event of lanes takes so many times as long
_FEW_WAYS = 2  # of a device to work, up to which every mix of replicas is looked at
_MANY = FEW  # devices; with more of them shapes are handled as arrays
_NOT_SO_MANY = 24  # devices; up to here all outlines are refined that promise enough, and less freedom is tried too
_MUCH_TRAFFIC = 0.05  # of a step, in sends that are waited for
_SOME = 64  # devices; up to here they are searched without tp only where sends take long
_MOST_TWICE = 20_000  # devices; with more of them a second search takes too long
_NUM_SCALED = 8  # combinations of many devices that the simulator ranks, and of not so many
_MOST_SCALED = 50
_RANKS_BUDGET = 500  # ranks laid out in one search of many devices, after the first combination
_TIMES_LAID_OUT = 1  # all ranks, where that is more
_MOST_LAID_OUT = 40_000  # ranks, then
_NUM_POLISHED_MANY = 2
_NUM_POLISHED_FEW = 6  # where any mix is looked at
_POLISHED_EVENTS = 60_000  # of these, together
_MOST_TRIES_MANY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The best combination, the best that is built otherwise, and whether memory stood in the way."""

    best: Candidate
    runner_up: Candidate | None
    memory_bound: bool
    bound_s: float = 0.0  # computing that no split into the shapes that were looked at beats
    num_shapes: int = 0  # 0: the bound holds for any split
    # the best in 1F1B over whole layers, where another order or cut is quicker
    plain: Candidate | None = None
    turnless: Candidate | None = None  # the best with one lane per stage, where more are quicker
    whole: Candidate | None = None  # the best without shared updates, where these are quicker


def is_large(problem: Problem) -> bool:
    """Whether there are so many devices that shapes are handled as arrays."""
    return problem.num_devices > _MANY


def search(problem: Problem, *, quick: bool = False, among: int = 0) -> Outcome:
    """Return the quickest split within the allowed shapes; `quick` ones may miss the last percent.

    `among` says how many devices the whole problem has that this is a part of: parts are searched as thoroughly as
    the whole. What is allowed is searched without it too, so that leave to do more makes no plan worse. What is best with
    one lane per stage stays unless more lanes gain more than next to nothing.

    Raises:
        NoPlanError: nothing fits, or the batch cannot be made of whole microbatches.
    """
    found: list[tuple[Problem, Outcome]] = []
    failure: NoPlanError | None = None
    among = max(among, problem.num_devices)
    waiting = _simplest_first(problem, quick=quick, among=among)
    while waiting:
        simpler = waiting.pop(0)
        try:
            found.append((simpler, _search(simpler, quick=quick, among=among)))
        except NoPlanError as error:
            failure = error  # that of the problem itself comes last
            continue
        if not quick and _NOT_SO_MANY < among <= _SOME and _waits_for_sends(*found[-1]):
            waiting.append(simpler.with_least_tp())
    turnless = _quickest([outcome for simpler, outcome in found if not simpler.takes_turns])
    best = _quickest([outcome for _, outcome in found])
    if best is None:
        raise failure or no_microbatches(problem)
    if turnless is not None and turnless.best.step_s <= best.best.step_s / (1 - NEXT_TO_NOTHING):
        best = turnless
    outcomes = [outcome for _, outcome in found]
    return replace(
        best,
        memory_bound=any(outcome.memory_bound for outcome in outcomes),
        bound_s=min(outcome.bound_s for outcome in outcomes),  # each holds for its own shapes
        num_shapes=max(outcome.num_shapes for outcome in outcomes),
        turnless=None if best is turnless or turnless is None else turnless.best,
    )


def _quickest(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the first of the quickest outcomes."""
    return min(outcomes, key=lambda outcome: outcome.best.step_s, default=None)


def _simplest_first(problem: Problem, *, quick: bool, among: int) -> list[Problem]:
    """Return the problem, last, and before it those without some of what it allows beyond the least.

    Of 25 to 64 devices those without tp are only searched at first where tp parts devices that are alike.
    """
    steps: list[Callable[[Problem], Problem]] = [Problem.without_lanes]
    parted = len({(own.name, own.memory_bytes) for own in problem.groups}) < len(problem.groups)
    often = parted or among <= _NOT_SO_MANY or (among > _SOME and len(problem.groups) > 1)
    if not quick and often and among <= _MOST_TWICE:
        steps.append(Problem.with_least_tp)
    if not quick and among <= _NOT_SO_MANY:
        steps.append(Problem.without_recompute)
    found = [problem]
    for step in steps:
        simpler = [step(other) for other in found]
        pairs = zip(simpler, found, strict=True)
        found = [s for s, o in pairs if 0 < len(s.kinds) < len(o.kinds)] + found
    return found


def _waits_for_sends(problem: Problem, found: Outcome) -> bool:
    """Whether longer pipelines, of layers that fewer devices share, are worth a search of their own.

    Many shapes are ranked without the sharing of a host's interface, which weighs on short pipelines of shared layers.
    """
    if len(problem.with_least_tp().kinds) == len(problem.kinds):
        return False
    best, much_s = found.best, _MUCH_TRAFFIC * found.best.step_s
    if waiting_s(best.layout.replicas, problem.known_ends) <= much_s:
        return False  # saves playing the pipeline with free links
    return best.layout.cost.p2p_s > much_s


def _search(problem: Problem, *, quick: bool, among: int) -> Outcome:
    """Search among all kinds of stages at once."""
    check_batch(problem)
    maker = ShapeMaker(problem)
    if among > _MANY:
        return _search_many(maker, quick=quick, among=among)
    shapes = enumerate_shapes(maker, quick=quick)
    if not shapes:
        raise shortage(maker)
    found = _allowed(problem, combos(problem, shapes, lower_bound(problem).compute_s))
    most = _NUM_SIMULATED_QUICK if quick else _NUM_SIMULATED
    judged = _simulate(maker, quickest(problem, found, most=most))
    if not judged:
        raise no_microbatches(problem)
    polished = judged if quick else _polish_best(maker, judged)
    found_best = _first_two(problem, polished, judged, among=0 if quick else among)
    log.debug("%d shapes, %d combinations simulated", len(shapes), len(judged))
    return replace(
        found_best,
        memory_bound=maker.dropped_for_memory > 0 or any(shape.memory_bound for shape in shapes),
    )


def _search_many(maker: ShapeMaker, *, quick: bool, among: int) -> Outcome:
    """Search with all shapes as arrays and a linear programme over how many of each there are."""
    problem = maker.problem
    shapes = many_shapes(maker)
    if not len(shapes):
        raise shortage(maker)
    bound_s = 0.0 if quick or offers(problem) else bound_of(problem, shapes)
    found = scaled_combos(maker, shapes, exact=not quick)
    if not quick and _mixes_any(problem, problem.num_devices):
        listed = enumerate_shapes(maker)
        found = chain(
            found, _allowed(problem, combos(problem, listed, lower_bound(problem).compute_s))
        )
    most = min(_MOST_SCALED, max(_NUM_SCALED, _RANKS_BUDGET // among))
    most = 1 if quick else most
    judged = _simulate(maker, quickest(problem, found, most=most), most_ranks=_ranks_budget(among))
    if not judged:
        raise no_microbatches(problem)
    polished = judged if quick else _polish_best(maker, judged, many=among)
    found_best = _first_two(problem, polished, judged, among=0 if quick else among)
    log.debug("%d shapes, %d combinations simulated", len(shapes), len(judged))
    return replace(
        found_best,
        memory_bound=shapes.dropped_for_memory > 0 or maker.dropped_for_memory > 0,
        bound_s=bound_s,
        num_shapes=len(shapes),
    )


def _mixes_any(problem: Problem, among: int) -> bool:
    """Whether, of so many devices, every mix of replicas is looked at."""
    return among <= ANY_MIX and len(problem.kinds) <= _FEW_WAYS * len(problem.groups)


def _ranks_budget(num_devices: int) -> int:
    """Return how many ranks may be laid out to rank combinations, and again to polish the best."""
    return max(_RANKS_BUDGET, min(_TIMES_LAID_OUT * num_devices, _MOST_LAID_OUT))


def _allowed(problem: Problem, found: Iterable[Combo]) -> Iterator[Combo]:
    """Yield combinations of no more shapes than the recipe allows, with as many copies of a layer as assumed."""
    most, least = problem.max_shapes, problem.shards
    return (
        combo
        for combo in found
        if (most is None or len(combo) <= most)
        and (least <= 1 or least <= sum(count * min(shape.lanes) for shape, count in combo))
    )


def _first_two(
    problem: Problem, polished: Sequence[Candidate], judged: Sequence[Candidate], *, among: int
) -> Outcome:
    """Return the best candidate, with narrow windows where they cost nothing, and the best that is built otherwise.

    Other orders and cuts are tried of the best, and of the outlines that promise most: of few devices, which `among`
    says (0: quickly), until none promises to be quicker than the best so far.
    """
    unpolished = best_of(judged)  # has more room in memory, at times
    judged = [*polished, *judged]
    plain = narrowed(problem, best_of(judged))
    tried = [plain]
    if offers(problem):
        leaders = {_outline(plain): plain}
        for candidate in sorted(judged, key=lambda c: (c.step_s, len(c.layout.ranks))):
            leaders.setdefault(_outline(candidate), candidate)
        few = 0 < among <= _NOT_SO_MANY
        likely = list(leaders.values())[: None if few else _NUM_LIKELY]
        likely.sort(key=partial(promise_s, problem))
        most = None if few else _NUM_REFINED
        chosen = {c.groups: c for c in (judged[len(polished)], unpolished, plain, *likely[:most])}
        events = 0
        for candidate in sorted(chosen.values(), key=partial(promise_s, problem)):
            enough = events > _REFINED_EVENTS and len(tried) > _REFINED_AT_LEAST
            if enough or promise_s(problem, candidate) >= best_of(tried).step_s:
                break
            tried.append(roomiest(problem, candidate))
            events += _events(candidate.groups)
    near_s = best_of(tried).step_s * _NEARLY
    best = best_of([leanest(problem, c) if c.step_s <= near_s else c for c in tried])
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
    maker: ShapeMaker, judged: Sequence[Candidate], *, many: int = 0
) -> list[Candidate]:
    """Polish the best few that differ in their outline; more of them where simulations are short."""
    if many:
        chosen, most = _leaders(judged, _outline), _NUM_POLISHED_MANY
        most_tries = min(_MOST_TRIES_MANY, _ranks_budget(many) // many)
        if _mixes_any(maker.problem, many):
            most = _NUM_POLISHED_FEW
            events = max(_events(c.groups) for c in chosen[:most])
            likely = min(_POLISH_BUDGET[0], _POLISHED_EVENTS // (most * events))
            most_tries = max(most_tries, likely)
    else:
        first, most_tries = _POLISH_BUDGET
        chosen = _leaders(judged, _build)[:_NUM_POLISHED]
        chosen, most = (
            _leaders([polish(maker, c, budget=first) for c in chosen], _build),
            _NUM_AGAIN,
        )
    polished = []
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
