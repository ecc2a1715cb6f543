"""Plans that keep what the user pinned, and what that costs. The free search is in `search.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby, pairwise, permutations

from hetrun.errors import NoPlanError
from hetrun.model import Pins, ReplicaPlan, Role
from hetrun.planner.bound import lower_bound
from hetrun.planner.compose import combos
from hetrun.planner.drafts import (
    Candidate,
    Group,
    Groups,
    best_of,
    groups_of,
    judge,
    narrow_windows,
    narrowed,
    polish,
    widened,
    within,
)
from hetrun.planner.estimate import Combo, quickest
from hetrun.planner.kinds import Kind
from hetrun.planner.layout import Layout
from hetrun.planner.orders import offers, refined
from hetrun.planner.problem import Problem
from hetrun.planner.scale import ManyShapes, many_shapes, scaled_combos
from hetrun.planner.search import Outcome, is_large, lanes_that_help, search
from hetrun.planner.shapes import Shape, ShapeMaker
from hetrun.planner.variety import enumerate_shapes
from hetrun.planner.zero import with_zero, zero_helps

_NUM_RANKED = 400  # combinations that are looked at; rows may rule most of them out
_NUM_SIMULATED = 50
_NUM_POLISHED = 3
_POLISH_BUDGET = 40
_MOST_KINDS_SEQUENCES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The plan to take, the free optimum beside it (the same where nothing is pinned), and what the pins cost."""

    outcome: Outcome
    free: Outcome
    notes: tuple[str, ...] = ()


def choose(problem: Problem, pins: Pins | None) -> Chosen:
    """Return the quickest split that keeps the pins.

    Raises:
        NoPlanError: nothing fits; names the pin that rules out the rest.
    """
    try:
        free = with_zero(problem, search)
    except NoPlanError as error:
        lanes = lanes_that_help(problem)
        helps = [f"allow plan.lanes: {list(lanes)}"] if lanes else []
        helps += ["allow plan.zero: [0, 1]"] if zero_helps(problem) else []
        if not helps:
            raise
        hint = ", or ".join([*helps, error.hint or ""])
        raise NoPlanError(error.message, hint=hint) from error
    if pins is None or pins == Pins():
        return Chosen(outcome=free, free=free)
    _check_names(problem, pins)
    outcome = free
    if not _kept(free.best.layout, pins):
        outcome = with_zero(problem, lambda assumed: _pinned(assumed, pins))
    if outcome.best.step_s < free.best.step_s:
        free = outcome  # pins only take away: what the search found with them is to be had without
    price = outcome.best.step_s / free.best.step_s - 1
    note = (
        f"The pins cost {price:.2%}: {outcome.best.step_s:.4g} s per step against"
        f" {free.best.step_s:.4g} s free (both modelled)"
    )
    return Chosen(outcome=outcome, free=free, notes=(note,))


def keeps(problem: Problem, pins: Pins, groups: Groups) -> bool:
    """Whether a combination keeps all pins (idle vendors, tp and lanes are seen to in the problem before)."""
    shapes = [group.shape for group in groups]
    if any(pins.layers and shape.layers != pins.layers for shape in shapes):
        return False
    lines = [_vendors(problem, shape.kinds) for shape in shapes]
    if any(not test(line) for line in lines for _, test in _line_tests(pins)):
        return False
    rows = sorted(count * group.shape.rows for group in groups for count in group.counts)
    return not pins.rows or rows == sorted(pins.rows)


def _kept(layout: Layout, pins: Pins) -> bool:
    """Whether a plan keeps all pins, though it was made without."""
    rows = sorted(replica.num_rows for replica in layout.replicas)
    if pins.rows and rows != sorted(pins.rows):
        return False
    return all(_kept_by(layout, replica, pins) for replica in layout.replicas)


def _kept_by(layout: Layout, replica: ReplicaPlan, pins: Pins) -> bool:
    line = [layout.ranks[stage.ranks[0]].vendor for stage in replica.stages]
    idle = {vendor for vendor, role in pins.roles.items() if role is Role.IDLE}
    layers = tuple(stage.num_layers for stage in replica.stages)
    if pins.layers and (replica.cuts or layers != pins.layers):
        return False
    if idle & set(line) or not all(test(line) for _, test in _line_tests(pins)):
        return False
    sizes = [len(stage.ranks) // stage.lanes for stage in replica.stages]
    return all(
        pins.lanes.get(vendor, stage.lanes) == stage.lanes and pins.tp.get(vendor, tp) == tp
        for vendor, stage, tp in zip(line, replica.stages, sizes, strict=True)
    )


def _check_names(problem: Problem, pins: Pins) -> None:
    for what, names in (
        ("order", pins.order),
        ("roles", tuple(pins.roles)),
        ("tp", tuple(pins.tp)),
        ("lanes", tuple(pins.lanes)),
    ):
        for name in names:
            if name not in problem.vendors:
                raise NoPlanError(
                    f"pins: {what} names {name}, and there are no devices of it",
                    hint=f"vendors here are {', '.join(problem.vendors)}",
                )
    if pins.layers and sum(pins.layers) != problem.model.num_layers:
        raise NoPlanError(
            f"pins: layers {list(pins.layers)} are {sum(pins.layers)},"
            f" the model has {problem.model.num_layers}",
            hint="pin as many layers as the model has",
        )
    if len(pins.rows) > problem.num_devices:
        raise NoPlanError(
            f"pins: rows of {len(pins.rows)} replicas, and there are {problem.num_devices} devices",
            hint="pin rows of fewer replicas",
        )
    if pins.rows and sum(pins.rows) != problem.batch_rows:
        raise NoPlanError(
            f"pins: rows {list(pins.rows)} are {sum(pins.rows)}, the batch has {problem.batch_rows}",
            hint="pin as many rows as train.global_batch_rows",
        )


def _pinned(problem: Problem, pins: Pins) -> Outcome:
    idle = {vendor for vendor, role in pins.roles.items() if role is Role.IDLE}
    kinds = tuple(kind for kind in problem.kinds if kind.vendor not in idle)
    if not kinds:
        raise NoPlanError("pins: roles leave every vendor idle", hint="let one of them work")
    own = replace(problem, kinds=_with_lanes(_with_tp(kinds, pins.tp), pins.lanes))
    own = replace(own, fractional=own.fractional and not pins.layers)
    if pins == Pins(roles=dict.fromkeys(idle, Role.IDLE), tp=pins.tp, lanes=pins.lanes):
        return search(own)
    maker = ShapeMaker(own)
    number, found = _combos(maker, pins)
    judged = [judge(own, groups) for groups in _groups(maker, found, pins)]
    if not judged:
        raise NoPlanError(
            _rows_words(pins) + f" with {number} shapes that keep the other pins",
            hint="unpin rows, or pin rows that are multiples of train.microbatch_rows",
        )
    polished = [_polished(maker, candidate, pins) for candidate in _first(judged)]
    plain = narrowed(own, best_of([*polished, *judged]))
    best = refined(own, plain, keep_counts=bool(pins.rows)) if offers(own) else plain
    others = [c for c in judged if c.layout.replicas != best.layout.replicas]
    return Outcome(
        best=best,
        runner_up=best_of(others) if others else None,
        memory_bound=maker.dropped_for_memory > 0,
        plain=plain if best.groups != plain.groups else None,
    )


def _with_tp(kinds: Sequence[Kind], tp: Mapping[str, int]) -> tuple[Kind, ...]:
    """Return the kinds whose vendor's layers are shared as pinned."""
    found: list[Kind] = []
    for kind in kinds:
        wanted = tp.get(kind.vendor, kind.tp)
        offered = sorted({other.tp for other in kinds if other.name == kind.name})
        if wanted not in offered:
            raise NoPlanError(
                f"pins: tp {wanted} of {kind.vendor}, and {kind.name} is planned with"
                f" {', '.join(map(str, offered))}",
                hint=f"add {wanted} to plan.tp if a host has so many devices and run"
                " `hetrun profile` again, or pin another tp",
            )
        found += [kind] if kind.tp == wanted else []
    return tuple(found)


def _with_lanes(kinds: Sequence[Kind], lanes: Mapping[str, int]) -> tuple[Kind, ...]:
    """Return the kinds whose vendor's stages have as many copies as pinned."""
    found: list[Kind] = []
    for kind in kinds:
        wanted = lanes.get(kind.vendor, kind.lanes)
        offered = sorted({other.lanes for other in kinds if other.name == kind.name})
        if wanted not in offered:
            raise NoPlanError(
                f"pins: lanes {wanted} of {kind.vendor}, and {kind.name} is planned with"
                f" {', '.join(map(str, offered))}",
                hint=f"add {wanted} to plan.lanes if there are so many devices of it, tp for each lane,"
                " or pin other lanes",
            )
        found += [kind] if kind.lanes == wanted else []
    return tuple(found)


def _rows_words(pins: Pins) -> str:
    if pins.rows:
        return f"pins: no replicas take rows {list(pins.rows)}"
    return "pins: no whole microbatches share the batch out"


def _first(judged: Sequence[Candidate]) -> list[Candidate]:
    return sorted(judged, key=lambda c: (c.step_s, len(c.layout.ranks)))[:_NUM_POLISHED]


def _polished(maker: ShapeMaker, candidate: Candidate, pins: Pins) -> Candidate:
    """Polish a candidate; what polishing makes of it counts only where it keeps the pins."""
    better = polish(maker, candidate, budget=_POLISH_BUDGET)
    return better if keeps(maker.problem, pins, better.groups) else candidate


def _combos(maker: ShapeMaker, pins: Pins) -> tuple[int, Iterable[Combo]]:
    """Return how many shapes keep the pins, and combinations of them; searched as without pins."""
    problem = maker.problem
    if is_large(problem) and not pins.layers and not pins.rows:
        many = _many_shapes(maker, pins)
        return len(many), scaled_combos(maker, many)
    shapes = _shapes(maker, pins)
    return len(shapes), combos(problem, shapes, lower_bound(problem).compute_s)


def _many_shapes(maker: ShapeMaker, pins: Pins) -> ManyShapes:
    """Return the shapes of many devices that keep the pins; the first pin that rules out all is named."""
    import numpy as np

    many = many_shapes(maker)
    _need_some(len(many))
    for name, test in _line_tests(pins):
        lines = [_vendors(maker.problem, [kind for kind, _ in blocks]) for blocks in many.blocks]
        kept = np.flatnonzero([test(line) for line in lines])
        _need_some(len(kept), of=len(many), pin=name)
        many = replace(
            many,
            blocks=tuple(many.blocks[number] for number in kept),
            rows=tuple(many.rows[number] for number in kept),
            columns=many.columns.some(kept),
            least=many.least.some(kept),
            across_s=many.across_s[kept],
            sync_s={number: seconds[kept] for number, seconds in many.sync_s.items()},
            num_groups=many.num_groups[kept],
        )
    return many


def _need_some(number: int, *, of: int = 0, pin: str = "") -> None:
    if not number and not pin:
        raise NoPlanError(
            "no split fits, pinned or not", hint="plan without pins to see what lacks"
        )
    if not number:
        raise NoPlanError(
            f"pins: {pin} leaves none of {of} shapes",
            hint="take one pin away, or let another vendor work too",
        )


def _shapes(maker: ShapeMaker, pins: Pins) -> list[Shape]:
    """Return the shapes that keep the pins; the first pin that rules out all is named."""
    shapes = _with_layers(maker, pins.layers) if pins.layers else enumerate_shapes(maker)
    if not shapes and pins.layers:
        raise NoPlanError(
            f"pins: layers {list(pins.layers)} fit no {len(pins.layers)} devices in a row",
            hint="pin fewer layers where memory is short, fewer stages than devices, or lower train.microbatch_rows",
        )
    _need_some(len(shapes))
    for name, test in _line_tests(pins):
        kept = [shape for shape in shapes if test(_vendors(maker.problem, shape.kinds))]
        _need_some(len(kept), of=len(shapes), pin=name)
        shapes = kept
    return shapes


def _with_layers(maker: ShapeMaker, layers: Sequence[int]) -> list[Shape]:
    """Return all pipelines of these layers that fit, one block per kind."""
    problem = maker.problem
    found = []
    for kinds in _sequences(problem, len(layers)):
        for rows in problem.row_choices:
            shape = maker.finish(kinds, layers, rows, memory_bound=False)
            enough = all(n <= most for n, most in zip(shape.use, problem.capacity, strict=True))
            if enough and maker.fits(shape, narrow_windows(shape)):
                found.append(shape)
    return found


def _sequences(problem: Problem, size: int) -> Iterator[tuple[int, ...]]:
    """Yield kinds of `size` stages: ordered blocks of different kinds, none larger than there are devices."""
    counts = [len(kind.seats) for kind in problem.kinds]
    made = 0
    for number in range(1, min(size, len(counts)) + 1):
        for kinds in permutations(range(len(counts)), number):
            if not _whole_blocks(problem, kinds):
                continue
            for cuts in combinations(range(1, size), number - 1):
                edges = (0, *cuts, size)
                sizes = [end - begin for begin, end in pairwise(edges)]
                if all(n <= counts[kind] for kind, n in zip(kinds, sizes, strict=True)):
                    made += 1
                    if made > _MOST_KINDS_SEQUENCES:
                        return
                    yield tuple(k for k, n in zip(kinds, sizes, strict=True) for _ in range(n))


def _whole_blocks(problem: Problem, kinds: Sequence[int]) -> bool:
    """Whether the devices of a group stand together, share layers and take turns alike; recomputation may differ."""
    blocks = [
        (place, {(problem.kinds[kind].tp, problem.kinds[kind].lanes) for kind in same})
        for place, same in groupby(kinds, key=lambda kind: problem.places[kind])
    ]
    places = [place for place, _ in blocks]
    return len(set(places)) == len(places) and all(len(sizes) == 1 for _, sizes in blocks)


def _vendors(problem: Problem, kinds: Sequence[int]) -> list[str]:
    return [problem.kinds[kind].vendor for kind in kinds]


Test = Callable[[Sequence[str]], bool]  # of the vendors along a pipeline


def _line_tests(pins: Pins) -> list[tuple[str, Test]]:
    """Return name and test of each pin that the vendors along a pipeline keep or not."""
    tests: list[tuple[str, Test]] = []
    if pins.order:
        tests.append((f"order {', '.join(pins.order)}", lambda line: _in_order(line, pins.order)))
    for vendor, role in pins.roles.items():
        if role is not Role.IDLE:
            place = 0 if role is Role.FIRST else -1
            tests.append((f"{vendor} {role.value}", _at(vendor, place)))
    return tests


def _at(vendor: str, place: int) -> Test:
    return lambda line: line[place] == vendor


def _in_order(line: Sequence[str], order: Sequence[str]) -> bool:
    """Whether vendors that the order names stand in it; others may stand anywhere."""
    places = [order.index(vendor) for vendor in line if vendor in order]
    return places == sorted(places)


def _groups(maker: ShapeMaker, found: Iterable[Combo], pins: Pins) -> Iterator[Groups]:
    """Yield the likeliest combinations that keep the pins, with wide windows where they fit."""
    problem = maker.problem
    if pins.rows:
        found = (c for c in found if sum(count for _, count in c) == len(pins.rows))
    made = 0
    for combo in quickest(problem, found, most=_NUM_RANKED):
        groups = _with_rows(combo, pins.rows) if pins.rows else groups_of(problem, combo)
        if groups is None or not within(problem, groups) or not keeps(problem, pins, groups):
            continue
        yield widened(maker, groups)
        made += 1
        if made >= _NUM_SIMULATED:
            return


def _with_rows(combo: Combo, rows: Sequence[int]) -> Groups | None:
    """Hand pinned rows out, the most to the quickest replicas; None where microbatches do not divide them."""
    order = sorted(combo, key=lambda item: (item[0].cycle_s / item[0].rows, item[0].kinds))
    left = sorted(rows, reverse=True)
    groups = []
    for shape, count in order:
        own, left = left[:count], left[count:]
        if any(number % shape.rows for number in own):
            return None
        groups.append(
            Group(
                shape=shape,
                windows=narrow_windows(shape),
                counts=tuple(number // shape.rows for number in own),
            )
        )
    return tuple(groups)
