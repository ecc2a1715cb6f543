"""Combinations of shapes with windows and microbatch counts, and the small moves that improve them under the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from hetrun.model import StagePlan
from hetrun.planner.apportion import Part, apportion
from hetrun.planner.cost import layers_seconds
from hetrun.planner.estimate import Combo, parts_of
from hetrun.planner.layout import Draft, Layout, lay_out
from hetrun.planner.problem import Problem
from hetrun.planner.shapes import Shape, ShapeMaker, pieces
from hetrun.schedule import pipeline_ends, plain_window, stage_times

_BETTER = 1 - 1e-9
_NEXT_TO_NOTHING = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Replicas of one shape; they may differ in their number of microbatches."""

    shape: Shape
    windows: tuple[int, ...]
    counts: tuple[int, ...]


Groups = tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A combination that was laid out and simulated."""

    groups: Groups
    layout: Layout

    @property
    def step_s(self) -> float:
        """Simulated seconds of a step."""
        return self.layout.cost.step_s


def plain_windows(num_stages: int) -> tuple[int, ...]:
    """Return the windows of plain 1F1B."""
    return tuple(plain_window(num_stages, stage) for stage in range(num_stages))


def wide_windows(num_stages: int) -> tuple[int, ...]:
    """Return windows with room for one more microbatch on every link downstream: its latency is hidden."""
    return tuple(2 * plain_window(num_stages, stage) - 1 for stage in range(num_stages))


def groups_of(problem: Problem, combo: Combo) -> Groups | None:
    """Hand out the batch over the replicas; None where no whole microbatches add up to it."""
    order = sorted(combo, key=lambda item: (item[0].cycle_s / item[0].rows, item[0].kinds))
    counts = apportion(problem.batch_rows, parts_of(tuple(order)))
    if counts is None:
        return None
    return tuple(
        Group(shape=shape, windows=plain_windows(shape.num_stages), counts=share)
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
    """Whether a combination has no more different replicas than the recipe allows."""
    return problem.max_shapes is None or len({g.shape for g in groups}) <= problem.max_shapes


def judge(problem: Problem, groups: Groups) -> Candidate:
    """Lay out and simulate a combination."""
    drafts = [
        Draft(
            shape=group.shape,
            windows=tuple(min(window, count) for window in group.windows),
            num_microbatches=count,
        )
        for group in groups
        for count in group.counts
    ]
    return Candidate(groups=groups, layout=lay_out(problem, drafts))


def polish(maker: ShapeMaker, candidate: Candidate, *, budget: int) -> Candidate:
    """Take small moves for as long as the simulated step gets shorter; `budget` is how many may be simulated."""
    best = candidate
    improved = True
    while improved and budget > 0:
        improved = False
        seen = {best.groups}
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
        for wide in [wide_windows(group.shape.num_stages)]
    )


def narrowed(problem: Problem, candidate: Candidate) -> Candidate:
    """Return the candidate with the windows of plain 1F1B if that costs next to nothing: it holds fewer activations."""
    plain = tuple(
        replace(group, windows=plain_windows(group.shape.num_stages)) for group in candidate.groups
    )
    if all(
        window <= narrow
        for group in candidate.groups
        for window, narrow in zip(group.windows, plain_windows(group.shape.num_stages), strict=True)
    ):
        return candidate
    tried = judge(problem, plain)
    return tried if tried.step_s <= candidate.step_s * (1 + _NEXT_TO_NOTHING) else candidate


def _moves(maker: ShapeMaker, candidate: Candidate) -> Iterator[Groups]:
    """Yield neighbours of a combination, the likely ones first."""
    groups = candidate.groups
    yield widened(maker, groups)
    balanced = _rebalanced(maker.problem, candidate)
    if balanced is not None:
        yield balanced
    yield from _other_counts(groups)
    for number, group in enumerate(groups):
        for other in _other_layers(maker, group):
            yield _with_group(groups, number, other)
        for shape in _other_shapes(maker, group.shape):
            combo = tuple(
                (shape if i == number else g.shape, len(g.counts)) for i, g in enumerate(groups)
            )
            changed = groups_of(maker.problem, combo)
            if changed is not None:
                yield changed
                yield widened(maker, changed)


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
            near = abs(giver - taker) == 1 or giver == slowest
            if giver == taker or not near or shape.layers[giver] < 2:
                continue
            layers = list(shape.layers)
            layers[giver] -= 1
            layers[taker] += 1
            other = maker.finish(shape.kinds, layers, shape.rows, memory_bound=shape.memory_bound)
            wide = wide_windows(shape.num_stages)
            for windows in dict.fromkeys((group.windows, plain_windows(shape.num_stages), wide)):
                if maker.fits(other, windows):
                    yield replace(group, shape=other, windows=windows)


def _loads(problem: Problem, shape: Shape) -> list[float]:
    """Return about how long each stage computes per microbatch."""
    return [
        layers_seconds(
            problem.kinds[kind].timings[shape.rows], piece.first_layer, piece.num_layers
        )[0]
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


def _first_stages(candidate: Candidate) -> Iterator[tuple[StagePlan, ...]]:
    """Yield the stages of the first replica of every group."""
    number = 0
    for group in candidate.groups:
        yield candidate.layout.replicas[number].stages
        number += len(group.counts)


def _rebalanced(problem: Problem, candidate: Candidate) -> Groups | None:
    """Hand out the batch again by what the simulator says of each replica's pace."""
    groups = candidate.groups
    parts: list[Part] = []
    for group, planned in zip(groups, _first_stages(candidate), strict=True):
        stages = [
            replace(stage_times(stage), window=window)
            for stage, window in zip(planned, group.windows, strict=True)
        ]
        count = group.counts[0]
        span = min(count, 2 * group.shape.num_stages)
        end_s = max(pipeline_ends(stages, count))
        cycle_s = (max(pipeline_ends(stages, count + span)) - end_s) / span
        parts.append(
            Part(
                rows=group.shape.rows,
                count=len(group.counts),
                fill_s=end_s - count * cycle_s,
                cycle_s=cycle_s,
            )
        )
    counts = apportion(problem.batch_rows, parts)
    if counts is None:
        return None
    return tuple(replace(group, counts=share) for group, share in zip(groups, counts, strict=True))


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """Return the quickest; of equally quick ones that with fewer ranks, fewer and larger microbatches, the earlier."""
    quickest = min(candidate.step_s for candidate in candidates)
    near = [c for c in candidates if c.step_s <= quickest * (1 + 1e-9)]
    return min(near, key=lambda candidate: (len(candidate.layout.ranks), _launches(candidate)))


def _launches(candidate: Candidate) -> int:
    """Return how many microbatches all stages run: what a device pays to start work is in no figure."""
    return sum(group.shape.num_stages * sum(group.counts) for group in candidate.groups)
