"""Whether the holders of a parameter share out its update (ZeRO stage 1), by searches that assume how many hold it at least.

What moments take of a device depends on how many others hold the same, and that is known once all replicas are chosen.
So a search assumes a number, takes only plans that keep it, and is repeated with others; what a plan holds and takes in
the end is counted from its own replicas.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from hetrun.errors import NoPlanError
from hetrun.planner.drafts import NEXT_TO_NOTHING
from hetrun.planner.problem import Problem
from hetrun.planner.search import Outcome, search

log = logging.getLogger(__name__)

Find = Callable[[Problem], Outcome]
_FEW = 24  # devices; up to here every number of holders is tried, where memory is short
_NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # at 24 next to nothing of the moments is left
_MOST = 1000  # devices; with more of them only what the plan itself reaches is tried, where anything fits
_ROUNDS = 3  # in which a plan's own number is assumed


def with_zero(problem: Problem, find: Find) -> Outcome:
    """Return what `find` finds with the ZeRO stage, of those allowed, that makes the step shortest.

    0 stays unless 1 gains more than next to nothing.

    Raises:
        NoPlanError: nothing fits.
    """
    if problem.zero == (0,):
        return find(problem)
    whole: Outcome | None = None
    failure: NoPlanError | None = None
    if 0 in problem.zero:
        try:
            whole = find(replace(problem, shards=0))
        except NoPlanError as error:
            failure = error
    shared: Outcome | None = None
    for found in _shared(problem, find, whole):
        if isinstance(found, NoPlanError):
            failure = failure or found
        elif shared is None or found.best.step_s < shared.best.step_s:
            shared = found
    chosen = _shorter(whole, shared)
    if chosen is None:
        raise failure or NoPlanError("nothing fits")
    return replace(chosen, bound_s=0.0, num_shapes=0)  # that of the shapes was for one assumption


def zero_helps(problem: Problem) -> bool:
    """Whether some plan fits where updates are shared out, for problems that allow none and have none."""
    if problem.zero != (0,):
        return False
    quick = partial(search, quick=True)
    return any(isinstance(f, Outcome) for f in _shared(problem, quick, None))


def _shorter(whole: Outcome | None, shared: Outcome | None) -> Outcome | None:
    """Return the better of the best without and with sharing."""
    if whole is None or shared is None:
        return whole or shared
    if shared.best.step_s >= whole.best.step_s * (1 - NEXT_TO_NOTHING):
        return whole
    return replace(shared, whole=whole.best)


def _shared(problem: Problem, find: Find, whole: Outcome | None) -> Iterator[Outcome | NoPlanError]:
    """Yield what is found under each assumption that is worth it; `whole` was found without sharing.

    Where memory does not stand in the way, that is the number of the plan's own replicas.
    """
    outcomes = [] if whole is None else [whole]
    tried: set[int] = set()

    def attempt(shards: int) -> Outcome | NoPlanError:
        tried.add(shards)
        try:
            outcomes.append(find(replace(problem, shards=shards)))
        except NoPlanError as error:
            log.debug("updates shared by %d at least: %s", shards, error.message)
            return error
        return outcomes[-1]

    most = problem.num_devices
    for shards in range(1, most + 1) if most <= _FEW else _NUMBERS:
        enough = bool(outcomes) and not (outcomes[-1].memory_bound and most <= _MOST)
        if shards > most or enough:
            break
        yield attempt(shards)
    for _ in range(_ROUNDS):
        if outcomes:
            shards = holders(min(outcomes, key=lambda outcome: outcome.best.step_s))
            if shards not in tried:
                yield attempt(shards)


def holders(outcome: Outcome) -> int:
    """Return on how many lanes each parameter of a plan lives at least."""
    return sum(
        min(stage.lanes for stage in replica.stages) for replica in outcome.best.layout.replicas
    )
