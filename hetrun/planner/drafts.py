"""Combinations of shapes with windows and microbatch counts, and the small moves that improve them under the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import lcm

from hetrun.model import ReplicaPlan
from hetrun.planner.apportion import Part, apportion
from hetrun.planner.cost import layers_seconds
from hetrun.planner.estimate import Combo, parts_of
from hetrun.planner.layout import PLAIN, Draft, Layout, Style, lay_out, restyled
from hetrun.planner.problem import Problem
from hetrun.planner.shapes import Shape, ShapeMaker, pieces
from hetrun.planner.variety import FEW
from hetrun.schedule import lane_windows
from hetrun.schedule.step import end_s

_BETTER = 1 - 1e-9
NEXT_TO_NOTHING = 1e-4
_SHORT = 4  # stages; up to here a layer moves between any two
PERIOD = 89  # microbatches after which real cuts nearly repeat: 0.618 x 89 = 55.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Replicas of one shape that work alike; they may differ in their number of microbatches."""

    shape: Shape
    windows: tuple[int, ...]
    counts: tuple[int, ...]
    style: Style = PLAIN

    def draft(self, count: int) -> Draft:
        """Return a replica of so many microbatches, none of which can be held more than once."""
        style = self.style
        most = [-(-count // lanes) for lanes in self.shape.lanes]  # of a lane
        return Draft(
            shape=self.shape,
            windows=tuple(map(min, self.windows, most)),
            num_microbatches=count,
            style=replace(style, most_held=tuple(map(min, style.most_held, most))),
        )


Groups = tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A combination that was laid out and simulated."""

    groups: Groups
    layout: Layout

    @property
    def step_s(self) -> float:
        """Simulated seconds of a step."""
        return self.layout.step_s


def narrow_windows(shape: Shape) -> tuple[int, ...]:
    """Return the windows of plain 1F1B, and of lanes that make up its pace."""
    return lane_windows(shape.lanes)


def wide_windows(shape: Shape) -> tuple[int, ...]:
    """Return windows with room for one more microbatch on every link downstream: its latency is hidden."""
    return tuple(2 * window - 1 for window in narrow_windows(shape))


def groups_of(problem: Problem, combo: Combo) -> Groups | None:
    """Hand out the batch over the replicas; None where no whole microbatches add up to it."""
    order = sorted(combo, key=lambda item: (item[0].cycle_s / item[0].rows, item[0].kinds))
    counts = apportion(problem.batch_rows, parts_of(tuple(order)))
    if counts is None:
        return None
    return tuple(
        Group(shape=shape, windows=narrow_windows(shape), counts=share)
        for (shape, _), share in zip(order, counts, strict=True)
    )


def repaired(maker: ShapeMaker, combo: Combo) -> Groups | None:
    """Give one replica another microbatch size, so that rows add up to the batch; None where none helps."""
    for number, (shape, count) in enumerate(combo):
        for rows in reversed(maker.problem.row_choices):
            other = None if rows == shape.rows else maker.make(shape.kinds, rows)
            if other is None:
                continue
            rest = ((shape, count - 1),) if count > 1 else ()
            changed = groups_of(
                maker.problem, (*combo[:number], *rest, (other, 1), *combo[number + 1 :])
            )
            if changed is not None:
                return changed
    return None


def within(problem: Problem, groups: Groups) -> bool:
    """Whether a combination has no more different replicas than allowed, and as many copies of a layer as assumed."""
    if problem.shards > sum(len(group.counts) * min(group.shape.lanes) for group in groups):
        return False
    return problem.max_shapes is None or len({g.shape for g in groups}) <= problem.max_shapes


def judge(problem: Problem, groups: Groups) -> Candidate:
    """Lay out and simulate a combination."""
    drafts = [group.draft(count) for group in groups for count in group.counts]
    return Candidate(groups=groups, layout=lay_out(problem, drafts))


def polish(maker: ShapeMaker, candidate: Candidate, *, budget: int) -> Candidate:
    """Take small moves for as long as the simulated step gets shorter; `budget` is how many may be simulated."""
    best = candidate
    seen = {best.groups}  # what was no better than an earlier best is no better than this one
    improved = True
    while improved and budget > 0:
        improved = False
        for groups in _moves(maker, best):
            if groups in seen or not within(maker.problem, groups):
                continue
            seen.add(groups)
            tried = judge(maker.problem, groups)
            budget -= 1
            if tried.step_s < best.step_s * _BETTER:
                best = tried
                improved = True
                break
            if budget <= 0:
                break
    return best


def widened(maker: ShapeMaker, groups: Groups) -> Groups:
    """Return the combination with one more forward in flight upstream of every link, where that fits."""
    return tuple(
        replace(group, windows=wide) if maker.fits(group.shape, wide) else group
        for group in groups
        for wide in [wide_windows(group.shape)]
    )


def narrowed(problem: Problem, candidate: Candidate) -> Candidate:
    """Return the candidate with the windows of plain 1F1B if that costs next to nothing: it holds fewer activations."""
    plain = tuple(replace(group, windows=narrow_windows(group.shape)) for group in candidate.groups)
    if all(
        window <= narrow
        for group in candidate.groups
        for window, narrow in zip(group.windows, narrow_windows(group.shape), strict=True)
    ):
        return candidate
    tried = judge(problem, plain)
    return tried if tried.step_s <= candidate.step_s * (1 + NEXT_TO_NOTHING) else candidate


def _moves(maker: ShapeMaker, candidate: Candidate) -> Iterator[Groups]:
    """Yield neighbours of a combination, the likely ones first."""
    groups = candidate.groups
    yield widened(maker, groups)
    balanced = rebalanced(maker.problem, candidate)
    if balanced is not None:
        yield balanced
    yield from _other_counts(groups)
    yield from _together(maker, groups)
    for number, group in enumerate(groups):
        for other in _other_layers(maker, group):
            yield _with_group(groups, number, other)
            yield from _shared_anew(maker, _with_group(groups, number, other))
        for shape in _other_shapes(maker, group.shape):
            combo = tuple(
                (shape if i == number else g.shape, len(g.counts)) for i, g in enumerate(groups)
            )
            changed = groups_of(maker.problem, combo)
            if changed is not None:
                yield changed
                yield widened(maker, changed)
        yield from _one_otherwise(maker, groups, number)


def _together(maker: ShapeMaker, groups: Groups) -> Iterator[Groups]:
    """Yield the combination with narrow windows, and with the same layer moved in all pipelines of equal depth.

    Where only some are cut otherwise, more devices share the gradients of a layer.
    """
    for number, group in enumerate(groups):
        narrow = narrow_windows(group.shape)
        if group.windows != narrow:
            yield _with_group(groups, number, replace(group, windows=narrow))
    sizes = {group.shape.num_stages for group in groups}
    if len(groups) < 2 or len(sizes) > 1 or min(sizes) > _SHORT:
        return
    for giver, taker in permutations(range(min(sizes)), 2):
        moved = [_with_layer_moved(maker, group, giver, taker) for group in groups]
        if all(moved):
            together = tuple(group for group in moved if group)
            yield together
            yield from _shared_anew(maker, together)


def _shared_anew(maker: ShapeMaker, groups: Groups) -> Iterator[Groups]:
    """Yield the same replicas with a microbatch moved, and with the batch handed out again; of few devices only."""
    if len(groups) < 2 or maker.problem.num_devices > FEW:
        return
    yield from _other_counts(groups)
    changed = groups_of(maker.problem, tuple((g.shape, len(g.counts)) for g in groups))
    if changed is not None:
        yield changed
        yield widened(maker, changed)


def _with_layer_moved(maker: ShapeMaker, group: Group, giver: int, taker: int) -> Group | None:
    """Return the group with one layer moved between two stages, in its own windows or narrow ones; None where neither fits."""
    shape = group.shape
    if shape.layers[giver] < 2:
        return None
    layers = list(shape.layers)
    layers[giver] -= 1
    layers[taker] += 1
    other = maker.finish(shape.kinds, layers, shape.rows, memory_bound=shape.memory_bound)
    for windows in (group.windows, narrow_windows(shape)):
        if maker.fits(other, windows):
            return replace(group, shape=other, windows=windows)
    return None


def _one_otherwise(maker: ShapeMaker, groups: Groups, number: int) -> Iterator[Groups]:
    """Yield the combination with one replica of a group built in another order, or cut otherwise."""
    group = groups[number]
    if len(group.counts) < 2 or group.shape.num_stages > _SHORT or group.style != PLAIN:
        return
    rest = replace(group, counts=group.counts[:-1])
    alone = replace(group, counts=group.counts[-1:])
    for other in _other_layers(maker, alone):
        yield (*groups[:number], rest, other, *groups[number + 1 :])
    for shape in _other_shapes(maker, group.shape):
        if shape.rows == group.shape.rows:
            changed = replace(alone, shape=shape, windows=narrow_windows(shape))
            yield (*groups[:number], rest, *widened(maker, (changed,)), *groups[number + 1 :])


def _other_counts(groups: Groups) -> Iterator[Groups]:
    """Yield the combination with one microbatch moved from a replica of one group to one of another."""
    for giver, taker in permutations(range(len(groups)), 2):
        most, least = max(groups[giver].counts), min(groups[taker].counts)
        if most < 2 or groups[giver].shape.rows != groups[taker].shape.rows:
            continue
        less = _replaced(groups[giver], most, most - 1)
        yield _with_group(
            _with_group(groups, giver, less), taker, _replaced(groups[taker], least, least + 1)
        )


def _replaced(group: Group, old: int, new: int) -> Group:
    """Return the group with one replica's count changed."""
    counts = list(group.counts)
    counts[counts.index(old)] = new
    return replace(group, counts=tuple(sorted(counts, reverse=True)))


def _with_group(groups: Groups, number: int, group: Group) -> Groups:
    return (*groups[:number], group, *groups[number + 1 :])


def _other_layers(maker: ShapeMaker, group: Group) -> Iterator[Group]:
    """Yield the group with one layer moved between neighbours, or away from the slowest stage."""
    shape = group.shape
    loads = _loads(maker.problem, shape)
    slowest = loads.index(max(loads))
    for giver in range(shape.num_stages):
        for taker in range(shape.num_stages):
            near = abs(giver - taker) == 1 or giver == slowest or shape.num_stages <= _SHORT
            if giver == taker or not near or shape.layers[giver] < 2:
                continue
            layers = list(shape.layers)
            layers[giver] -= 1
            layers[taker] += 1
            other = maker.finish(shape.kinds, layers, shape.rows, memory_bound=shape.memory_bound)
            wide = wide_windows(shape)
            for windows in dict.fromkeys((group.windows, narrow_windows(shape), wide)):
                if maker.fits(other, windows):
                    yield replace(group, shape=other, windows=windows)


def _loads(problem: Problem, shape: Shape) -> list[float]:
    """Return about how long each stage computes per microbatch."""
    return [
        layers_seconds(
            problem.kinds[kind].timings[shape.rows], piece.first_layer, piece.num_layers
        )[0]
        / problem.kinds[kind].lanes
        for kind, piece in zip(shape.kinds, pieces(shape.layers), strict=True)
    ]


def _other_shapes(maker: ShapeMaker, shape: Shape) -> Iterator[Shape]:
    """Yield the shape with its blocks in reverse, and with other microbatch sizes."""
    tries = [(shape.kinds[::-1], shape.rows)]
    tries += [(shape.kinds, rows) for rows in maker.problem.row_choices if rows != shape.rows]
    for kinds, rows in tries:
        other = maker.make(kinds, rows)
        if other is not None and other != shape:
            yield other


def first_replicas(candidate: Candidate) -> Iterator[ReplicaPlan]:
    """Yield the first replica of every group."""
    number = 0
    for group in candidate.groups:
        yield candidate.layout.replicas[number]
        number += len(group.counts)


def rebalanced(problem: Problem, candidate: Candidate) -> Groups | None:
    """Hand out the batch again by what the simulator says of each replica's pace."""
    groups = candidate.groups
    parts: list[Part] = []
    for group, planned in zip(groups, first_replicas(candidate), strict=True):
        count = group.counts[0]
        span = min(count, PERIOD if group.style.cuts else 2 * group.shape.num_stages)
        turn = lcm(*group.shape.lanes)
        span = turn * -(-span // turn)  # as many more for each lane
        played = 2 * span if group.style.cuts and count > 3 * span else count + span
        end_s = seconds(problem, planned, group, played)
        cycle_s = (end_s - seconds(problem, planned, group, played - span)) / span
        parts.append(
            Part(
                rows=group.shape.rows,
                count=len(group.counts),
                fill_s=end_s - played * cycle_s,
                cycle_s=cycle_s,
            )
        )
    counts = apportion(problem.batch_rows, parts)
    if counts is None:
        return None
    return tuple(replace(group, counts=share) for group, share in zip(groups, counts, strict=True))


def seconds(problem: Problem, planned: ReplicaPlan, group: Group, count: int) -> float:
    """Return when a replica of a group, on the devices of `planned`, has done so many microbatches."""
    replica = restyled(problem, planned, group.draft(count))
    return end_s(replica, problem.known_ends)


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """Return the quickest; of equally quick ones that with fewer ranks, fewer and larger microbatches, fewer lanes, the earlier."""
    quickest = min(candidate.step_s for candidate in candidates)
    near = [c for c in candidates if c.step_s <= quickest * (1 + 1e-9)]
    return min(near, key=lambda candidate: (len(candidate.layout.ranks), *_effort(candidate)))


def _effort(candidate: Candidate) -> tuple[int, int]:
    """Return how many microbatches all stages run (what a device pays to start work is in no figure), and the most lanes."""
    groups = candidate.groups
    launches = sum(group.shape.num_stages * sum(group.counts) for group in groups)
    return launches, max(max(group.shape.lanes) for group in groups)
