"""The naive split beside the plan: what a framework for equal devices would do with all of these. Never chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations

from hetrun.planner.cost import unit_seconds
from hetrun.planner.drafts import narrow_windows
from hetrun.planner.kinds import Seat
from hetrun.planner.layout import Draft, Layout, lay_out
from hetrun.planner.problem import Problem
from hetrun.planner.search import is_large
from hetrun.planner.shapes import Shape, ShapeMaker
from hetrun.planner.words import plural

_MOST_ORDERS = 24  # of vendors


def even_split(problem: Problem) -> tuple[Layout | None, str]:
    """Return the best split with all devices, equal depth, equal rows and layers as equal as they divide.

    With many devices the depth that promises most is taken, and two orders of the vendors. Both ways in which frameworks number ranks are tried (a replica, or a stage, takes consecutive devices), and all
    orders of the vendors: the naive user is lucky. None, with the reason, where nothing fits.
    """
    if any(kind.tp > 1 for kind in problem.groups):
        return (
            None,
            "plan.tp leaves out 1, and equal splits are looked for without tensor parallelism",
        )
    maker = ShapeMaker(problem)
    best: Layout | None = None
    short = 0
    shapes = list(_shapes(problem))
    if is_large(problem):
        shapes = sorted(shapes, key=lambda shape: _rough_s(problem, *shape))
    for depth, rows in shapes:
        if best is not None and is_large(problem):
            break
        for seats in _seatings(problem, depth):
            drafts = _drafts(maker, seats, rows)
            if drafts is None:
                short += 1
                continue
            layout = lay_out(problem, drafts, [[(seat,) for seat in stages] for stages in seats])
            if best is None or layout.step_s < best.step_s * (1 - 1e-9):
                best = layout
    if best is not None:
        return best, ""
    devices = plural(problem.num_devices, "device")
    if not shapes:
        return None, (
            f"{devices} do not share {problem.batch_rows} rows equally in pipelines of at most"
            f" {plural(problem.max_stages, 'stage')}"
        )
    return None, f"no equal split over {devices} fits their memory"


def _shapes(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield stages per replica and rows per microbatch that use all devices and share the batch equally."""
    for depth in range(1, min(problem.num_devices, problem.max_stages) + 1):
        num_replicas, left = divmod(problem.num_devices, depth)
        for rows in problem.row_choices:
            if left == 0 and problem.batch_rows % (num_replicas * rows) == 0:
                yield depth, rows


def _rough_s(problem: Problem, depth: int, rows: int) -> float:
    """Return about how long equal pipelines of this depth take: at the pace of the slowest device in its longest stage."""
    layers = -(-problem.model.num_layers // depth)
    turns = problem.batch_rows // (rows * (problem.num_devices // depth)) + depth - 1
    return turns * layers * max(unit_seconds(kind.timings[rows])[0] for kind in problem.groups)


def _seatings(problem: Problem, depth: int) -> Iterator[list[list[Seat]]]:
    """Yield devices per replica and stage; equal ones once."""
    seen = set()
    orders = list(islice(permutations(problem.vendors), _MOST_ORDERS))
    if is_large(problem):
        orders = [problem.vendors, problem.vendors[::-1]]
    for order in orders:
        seats = [
            seat
            for vendor in order
            for kind in problem.groups
            if kind.vendor == vendor
            for seat in kind.seats
        ]
        num_replicas = len(seats) // depth
        by_replica = [seats[i * depth : (i + 1) * depth] for i in range(num_replicas)]
        by_stage = [seats[i::num_replicas] for i in range(num_replicas)]
        for places in (by_replica, by_stage):
            key = tuple(tuple(seat.name for seat in stages) for stages in places)
            if key not in seen:
                seen.add(key)
                yield places


def _drafts(maker: ShapeMaker, places: Sequence[Sequence[Seat]], rows: int) -> list[Draft] | None:
    """Return equal replicas on these devices, None where one does not fit."""
    problem = maker.problem
    kind_of = {seat: problem.kinds.index(kind) for kind in problem.groups for seat in kind.seats}
    depth = len(places[0])
    share, more = divmod(problem.model.num_layers, depth)
    layers = [share + (stage < more) for stage in range(depth)]
    count = problem.batch_rows // (rows * len(places))
    drafts = []
    known: dict[tuple[int, ...], Shape] = {}
    for stages in places:
        kinds = tuple(kind_of[seat] for seat in stages)
        if kinds not in known:
            known[kinds] = maker.finish(kinds, layers, rows, memory_bound=False)
        windows = tuple(min(window, count) for window in narrow_windows(known[kinds]))
        if not maker.fits(known[kinds], windows):
            return None
        drafts.append(Draft(shape=known[kinds], windows=windows, num_microbatches=count))
    return drafts
