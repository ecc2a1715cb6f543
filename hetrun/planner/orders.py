"""Zero bubble and real cuts for combinations that were found with 1F1B over whole layers, where they pay.

A replica's ways to work are ranked on its own by the simulator, over few microbatches; the best ones are laid out and
simulated as whole steps, so that the sync of a layer that lives twice is in their price. The simpler way stays unless
another one gains more than next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from hetrun.model import Order, ReplicaPlan
from hetrun.planner.cost import splits_backward, unit_seconds
from hetrun.planner.drafts import (
    NEXT_TO_NOTHING,
    PERIOD,
    Candidate,
    Group,
    Groups,
    first_replicas,
    judge,
    narrow_windows,
    rebalanced,
    seconds,
)
from hetrun.planner.layout import PLAIN, Style, held_pieces
from hetrun.planner.problem import Cuts, Problem
from hetrun.planner.shapes import Shape, stage_memory
from hetrun.schedule.step import known_ends

# microbatches that run ahead and that are held, beyond 1F1B's
_BOUNDS = ((0, 0), (1, 1), (2, 2))
_SPLIT_BOUNDS = ((0, 0), (1, 2), (2, 3), (2, 4), (3, 4))
_LEAST_LAYERS = 1.0  # a stage passes on average
_DIGITS = 4  # of a cut
_MOST_EVENTS = 400_000  # of a candidate, above which no other order is tried
_FEW_EVENTS = 60_000  # up to here ways are ranked
# up to here real cuts are tried, whose price is traffic: each is a layout of all ranks
_FEW_RANKS = 10_000
_FEW_PERIODS = 6  # of real cuts, up to which a replica is played to its end
_HALVINGS = 44


def offers(problem: Problem) -> bool:
    """Whether there is anything beyond 1F1B over whole layers to choose from."""
    return problem.fractional or Order.ZERO_BUBBLE in problem.orders


def refined(problem: Problem, candidate: Candidate, *, keep_counts: bool = False) -> Candidate:
    """Return the candidate with the orders and cuts that make its step shortest; itself where none gains.

    `keep_counts` leaves each replica its microbatches.
    """
    return leanest(problem, roomiest(problem, candidate, keep_counts=keep_counts))


def roomiest(problem: Problem, candidate: Candidate, *, keep_counts: bool = False) -> Candidate:
    """Return what `refined` does, with as much room in the windows as helps and fits."""
    events = _events(candidate)
    if events > _MOST_EVENTS:
        return candidate
    if events > _FEW_EVENTS or len(candidate.layout.ranks) > _FEW_RANKS:
        groups = tuple(_likely_way(problem, group) for group in candidate.groups)
        return _better(problem, candidate, groups, keep_counts=keep_counts)
    cut = candidate
    if problem.fractional:
        cut = _in_best_ways(problem, candidate, fractional=True, keep_counts=keep_counts)
        cut = cut if cut is candidate else _shifted(problem, cut)
    splits = Order.ZERO_BUBBLE in problem.orders
    if not splits or (cut is not candidate and _floor_s(problem, candidate) >= cut.step_s):
        return cut
    whole = _in_best_ways(problem, candidate, fractional=False, keep_counts=keep_counts)
    return whole if whole.step_s <= cut.step_s * (1 + NEXT_TO_NOTHING) else cut


def _floor_s(problem: Problem, candidate: Candidate) -> float:
    """Return what no order of a candidate's whole layers and microbatches takes less than."""
    return max(_busy_s(problem, replace(group, style=PLAIN)) for group in candidate.groups)


def _in_best_ways(
    problem: Problem, candidate: Candidate, *, fractional: bool, keep_counts: bool
) -> Candidate:
    """Return the candidate in the ways that are quickest for each replica alone, the candidate itself where none gains."""
    groups = tuple(
        _best_way(
            problem, planned, group, list(_ladders(problem, group, problem.orders, fractional))
        )
        for group, planned in zip(candidate.groups, first_replicas(candidate), strict=True)
    )
    return _better(problem, candidate, groups, keep_counts=keep_counts)


def _better(
    problem: Problem, candidate: Candidate, groups: Groups, *, keep_counts: bool
) -> Candidate:
    """Return the candidate with other groups if that gains more than next to nothing, else the candidate."""
    if groups == candidate.groups:
        return candidate
    tried = _settled(problem, judge(problem, groups), keep_counts=keep_counts)
    gains = tried.step_s < candidate.step_s * (1 - NEXT_TO_NOTHING)
    return tried if gains else candidate


def _events(candidate: Candidate) -> int:
    """Return about how many events one simulation of a candidate plays; replicas that are alike are played once."""
    return sum(
        3 * group.shape.num_stages * count
        for group in candidate.groups
        for count in set(group.counts)
    )


def _likely_way(problem: Problem, group: Group) -> Group:
    """Return the roomiest way, where it would take long to rank them all; the group itself where there is none."""
    cut = problem.fractional and Order.ZERO_BUBBLE not in problem.orders
    ways = [way for ladder in _ladders(problem, group, problem.orders, cut) for way in ladder]
    return ways[-1] if ways else group


def _settled(problem: Problem, candidate: Candidate, *, keep_counts: bool) -> Candidate:
    """Hand the batch out again by the paces that the new orders give, if that helps."""
    groups = None if keep_counts or len(candidate.groups) < 2 else rebalanced(problem, candidate)
    if groups is None or groups == candidate.groups:
        return candidate
    other = judge(problem, groups)
    return other if other.step_s < candidate.step_s else candidate


def _best_way(
    problem: Problem, planned: ReplicaPlan, group: Group, ladders: Sequence[Sequence[Group]]
) -> Group:
    """Return the roomiest way of the quickest order for a replica on its own; of nearly equal orders the earlier."""
    best, best_s = group, _about_s(problem, planned, group)
    for *_, way in ladders:
        wanted_s = best_s * (1 - NEXT_TO_NOTHING)
        if _busy_s(problem, way) >= wanted_s:
            continue  # nothing to gain
        way_s = _about_s(problem, planned, way)
        if way_s < wanted_s:
            best, best_s = way, way_s
    return best


def leanest(problem: Problem, candidate: Candidate) -> Candidate:
    """Return the candidate with as little room in the windows of its orders as costs next to nothing."""
    if _events(candidate) > _FEW_EVENTS or len(candidate.layout.ranks) > _FEW_RANKS:
        return candidate
    groups = tuple(
        _leanest_way(problem, planned, group)
        for group, planned in zip(candidate.groups, first_replicas(candidate), strict=True)
    )
    if groups == candidate.groups:
        return candidate
    tried = judge(problem, groups)
    return tried if tried.step_s <= candidate.step_s * (1 + NEXT_TO_NOTHING) else candidate


def _leanest_way(problem: Problem, planned: ReplicaPlan, group: Group) -> Group:
    """Return the first way of a group's order that takes next to nothing longer than the roomiest.

    Room in the windows hardly ever makes a replica slower, so the place is found by halving.
    """
    ladder = _ladder(problem, group, group.style.order, group.style.cuts)
    if len(ladder) < 2 or ladder[-1] != group:
        return group  # such as plain 1F1B
    most_s = _about_s(problem, planned, group) * (1 + NEXT_TO_NOTHING)
    low, found = 0, len(ladder) - 1
    middle = 0  # the leanest way, mostly
    while low < found:
        if _about_s(problem, planned, ladder[middle]) <= most_s:
            found = middle
        else:
            low = middle + 1
        middle = (low + found) // 2
    return ladder[found]


def _busy_s(problem: Problem, group: Group) -> float:
    """Return how long the busiest lane of the largest replica computes at least; with real cuts on average."""
    return (group.counts[0] - 1) * max(passed_s(problem, group.shape, group.style.cuts))


def passed_s(problem: Problem, shape: Shape, cuts: Sequence[float]) -> list[float]:
    """Return the seconds of a microbatch on each stage, shared by its lanes; with real cuts on average."""
    layer_s, start_s = _stage_seconds(problem, shape)
    edges = (0.0, *cuts, float(problem.model.num_layers))
    shares = [end - begin for begin, end in pairwise(edges)] if cuts else shape.layers
    stages = zip(start_s, shares, layer_s, strict=True)
    return [start + share * unit for start, share, unit in stages]


def _about_s(problem: Problem, planned: ReplicaPlan, group: Group) -> float:
    """Return about when the largest replica of a group is done: exact, or the pace of one period carried on.

    The pace is off by up to 1/1000, which is more than what room in the windows gains last: so it is kept for the many.
    """
    count = group.counts[0]
    if count <= _FEW_PERIODS * PERIOD or not group.style.cuts:
        return seconds(problem, planned, group, count)
    one_s, two_s = (seconds(problem, planned, group, n * PERIOD) for n in (1, 2))
    return two_s + (count - 2 * PERIOD) * (two_s - one_s) / PERIOD


def _ladders(
    problem: Problem, group: Group, orders: Sequence[Order], fractional: bool
) -> Iterator[list[Group]]:
    """Yield for each order the ways for a group to work that fit its devices' memory, those that hold least first."""
    shape = group.shape
    plain = narrow_windows(shape)
    cuts = even_cuts(problem, shape, plain) if fractional else ()
    if cuts is None or (fractional and not cuts):
        return
    for order in orders:
        splits = order is Order.ZERO_BUBBLE
        if (splits and not can_split(problem, shape)) or not (splits or cuts):
            continue
        ladder = _ladder(problem, group, order, cuts)
        if ladder:
            yield ladder


def _ladder(problem: Problem, group: Group, order: Order, cuts: Cuts) -> list[Group]:
    """Return the ways for a group to work in an order that fit its devices' memory, those that hold least first."""
    shape = group.shape
    plain = narrow_windows(shape)
    splits = order is Order.ZERO_BUBBLE
    ladder: dict[Group, None] = {}
    for ahead, more in _SPLIT_BOUNDS if splits else _BOUNDS:
        held = _clipped(problem, shape, cuts, [window + more for window in plain])
        if held is not None:
            windows = tuple(min(w + ahead, most) for w, most in zip(plain, held, strict=True))
            style = Style(order=order, most_held=held if splits else (), cuts=cuts)
            ladder.setdefault(replace(group, windows=windows, style=style))
    return list(ladder)


def _clipped(
    problem: Problem, shape: Shape, cuts: Sequence[float], held: Sequence[int]
) -> tuple[int, ...] | None:
    """Return how many microbatches each stage may hold: as wanted, or as many as fit; None where not even one does."""
    clipped = list(held)
    while full := _too_full(problem, shape, cuts, clipped):
        for stage in full:
            clipped[stage] -= 1
        if min(clipped) < 1:
            return None
    return tuple(clipped)


def can_split(problem: Problem, shape: Shape) -> bool:
    """Whether W has figures on all stages; recomputed layers hold more for it than the memory model counts."""
    kinds = [problem.kinds[kind] for kind in shape.kinds]
    return all(splits_backward(k.timings[shape.rows]) and not k.recompute for k in kinds)


def even_cuts(problem: Problem, shape: Shape, held: Sequence[int]) -> Cuts | None:
    """Return real cuts at which all stages take equally long, as far as memory lets them.

    None where layers differ, a stage would pass less than a layer, or nothing fits; empty where whole layers do.
    Remembered.
    """
    key = (shape.kinds, shape.rows, tuple(held))
    if key not in problem.cuts_cache:
        problem.cuts_cache[key] = _even_cuts(problem, shape, held)
    return problem.cuts_cache[key]


def _even_cuts(problem: Problem, shape: Shape, held: Sequence[int]) -> Cuts | None:
    if problem.layers_differ or shape.num_stages < 2:
        return None
    layer_s, start_s = _stage_seconds(problem, shape)
    most = [float(problem.model.num_layers)] * shape.num_stages
    for _ in range(shape.num_stages + 1):
        shares = _shares(problem.model.num_layers, layer_s, start_s, most)
        if shares is None:
            return None
        cuts = _rounded(shares)
        full = _too_full(problem, shape, cuts, held)
        if not full:
            return () if all(cut == int(cut) for cut in cuts) else cuts
        for stage, count in full.items():
            most[stage] = min(most[stage] - 1, float(count - 1))  # a share may touch one more
    return None


def _stage_seconds(problem: Problem, shape: Shape) -> tuple[list[float], list[float]]:
    """Return per stage the seconds of a layer and of what else it does, shared by its lanes."""
    layer_s, start_s = [], []
    last = shape.num_stages - 1
    for index, kind in enumerate(shape.kinds):
        unit_s, embedding_s, head_s = unit_seconds(problem.kinds[kind].timings[shape.rows])
        lanes = problem.kinds[kind].lanes
        layer_s.append(unit_s / lanes)
        start_s.append((embedding_s * (index == 0) + head_s * (index == last)) / lanes)
    return layer_s, start_s


def _shares(
    num_layers: int, layer_s: Sequence[float], start_s: Sequence[float], most: Sequence[float]
) -> list[float] | None:
    """Return real shares of the layers, each at least one layer and at most `most`, that level start + share * layer."""
    if min(most) < _LEAST_LAYERS or sum(most) < num_layers or len(most) > num_layers:
        return None

    def at(level_s: float) -> list[float]:
        return [
            min(cap, max(_LEAST_LAYERS, (level_s - start) / unit))
            for unit, start, cap in zip(layer_s, start_s, most, strict=True)
        ]

    low, high = 0.0, max(start_s) + num_layers * max(layer_s)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) < num_layers else (low, middle)
    return at(high)


def _rounded(shares: Sequence[float]) -> tuple[float, ...]:
    """Return the cuts between shares."""
    cuts, end = [], 0.0
    for share in shares[:-1]:
        end += share
        cuts.append(round(end, _DIGITS))
    return tuple(cuts)


def _too_full(
    problem: Problem, shape: Shape, cuts: Sequence[float], held: Sequence[int]
) -> dict[int, int]:
    """Return the stages that do not fit at these cuts, with the layers that they have there."""
    full = {}
    most = max(1, problem.batch_rows // shape.rows)
    for index, piece in enumerate(held_pieces(shape, cuts)):
        kind = shape.kinds[index]
        limit = problem.kinds[kind].limit_bytes
        if limit is None:
            continue
        window = min(held[index], most)
        if limit < stage_memory(problem, kind, piece, rows=shape.rows, window=window):
            full[index] = piece.num_layers
    return full


def _shifted(problem: Problem, candidate: Candidate) -> Candidate:
    """Give stages that wait less a little less, by one pass over what they wait for; kept if the step gets shorter."""
    groups: list[Group] = []
    for group, planned in zip(candidate.groups, first_replicas(candidate), strict=True):
        groups.append(_shifted_group(problem, group, planned) if group.style.cuts else group)
    changed: Groups = tuple(groups)
    if changed == candidate.groups:
        return candidate
    tried = judge(problem, changed)
    return tried if tried.step_s < candidate.step_s else candidate


def _shifted_group(problem: Problem, group: Group, planned: ReplicaPlan) -> Group:
    """Return a group with the cuts at which all stages would end together if each waited as long as it does now."""
    shape, count = group.shape, planned.num_microbatches
    layer_s, start_s = _stage_seconds(problem, shape)
    ends = [max(lanes) for lanes in known_ends(planned, problem.known_ends)]
    edges = (0.0, *group.style.cuts, float(problem.model.num_layers))
    waits = [
        (max(ends) - count * (start + (edges[i + 1] - edges[i]) * unit)) / count
        for i, (unit, start) in enumerate(zip(layer_s, start_s, strict=True))
    ]
    least = min(waits)
    most = [float(problem.model.num_layers)] * shape.num_stages
    starts = [start + wait - least for start, wait in zip(start_s, waits, strict=True)]
    shares = _shares(problem.model.num_layers, layer_s, starts, most)
    if shares is None:
        return group
    cuts = _rounded(shares)
    held = group.style.most_held or group.windows
    if _too_full(problem, shape, cuts, held) or all(cut == int(cut) for cut in cuts):
        return group
    return replace(group, style=replace(group.style, cuts=cuts))
