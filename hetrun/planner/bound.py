"""What no split can beat within the cost model, the ideal of each vendor, and what a gap consists of."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun import arch
from hetrun.model import Cost, Order, RowTiming
from hetrun.planner.cost import best_part_seconds_per_row, part_seconds, splits_backward
from hetrun.planner.problem import Problem

_WORTH_NAMING = 5e-4  # of the bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Lower bound on a step: computing, then updating parameters, which follows the sync and overlaps nothing."""

    compute_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        """Seconds that no split can beat."""
        return self.compute_s + self.optimizer_s


def lower_bound(problem: Problem, *, shapes_s: float = 0.0) -> Bound:
    """Return the larger of two bounds on computing (all devices busy; one microbatch alone), plus the optimizer's.

    `shapes_s` is a bound on computing that holds for the replica shapes that were looked at; the larger one counts.
    """
    updates_per_s = sum(
        len(kind.seats) / kind.optimizer_s_per_parameter
        for kind in problem.groups
        if kind.optimizer_s_per_parameter > 0
    )
    free = any(kind.optimizer_s_per_parameter <= 0 for kind in problem.groups)
    parameters = arch.total_parameters(problem.model)
    return Bound(
        compute_s=max(_busy_s(problem), _alone_s(problem), shapes_s),
        optimizer_s=0.0 if free else parameters / updates_per_s,
    )


def _busy_s(problem: Problem) -> float:
    """Return the seconds of the batch if all devices worked all the time.

    Fractions of layers, embedding and head go to kinds of devices: a linear programme whose dual says that for any
    prices y of a device-second with sum(y * devices) = 1, sum over units of count * min over kinds (seconds * y) is
    a lower bound. Prices that make one unit equally dear everywhere are tried; the bound is exact where kinds differ by
    one factor only.
    """
    counts = _counts(problem)
    seconds = [_device_seconds(problem, place) for place in range(len(problem.groups))]
    whole = [sum(n * s for n, s in zip(counts, unit, strict=True)) for unit in seconds]
    best = 0.0
    for column in [whole, *([unit[i] for unit in seconds] for i in range(len(counts)))]:
        if min(column) <= 0:
            continue
        scale = sum(len(kind.seats) / s for kind, s in zip(problem.groups, column, strict=True))
        prices = [1 / (s * scale) for s in column]
        cost = sum(
            count * min(unit[i] * price for unit, price in zip(seconds, prices, strict=True))
            for i, count in enumerate(counts)
        )
        best = max(best, cost)
    return best * problem.batch_rows


def _counts(problem: Problem) -> tuple[int, ...]:
    """Return how many of each part the model has: layers of each run of equal ones, embedding, head."""
    return (*(run.num_layers for run in arch.layer_runs(problem.model)), 1, 1)


def _device_seconds(problem: Problem, place: int) -> tuple[float, ...]:
    """Return device-seconds per row of each part in a group, each in the best of its ways."""
    ways = [
        [kind.tp * seconds for seconds in best_part_seconds_per_row(kind.timings.values())]
        for kind, at in zip(problem.kinds, problem.places, strict=True)
        if at == place
    ]
    return tuple(min(column) for column in zip(*ways, strict=True))


def _alone_s(problem: Problem) -> float:
    """Return the least seconds of a single microbatch through the whole model: nothing splits it.

    With zero bubble the gradients of weights may be left to others' waiting time; the rest is still passed in turn.
    """
    counts = _counts(problem)
    splits = Order.ZERO_BUBBLE in problem.orders
    return min(
        sum(
            count * min(_passing_s(kind.timings[rows], splits=splits)[i] for kind in problem.kinds)
            for i, count in enumerate(counts)
        )
        for rows in problem.row_choices
    )


def _passing_s(timing: RowTiming, *, splits: bool) -> tuple[float, ...]:
    """Return the seconds of each part that the next stage or the one before has to wait for."""
    seconds = part_seconds(timing)
    if not (splits and splits_backward(timing)):
        return seconds
    layer_s, embedding_s, head_s = seconds  # no runs where the backward splits
    weights_s = timing.layer_weights_s or 0.0, timing.head_weights_s or 0.0
    return layer_s - weights_s[0], embedding_s, head_s - weights_s[1]


def ideal_rows_per_s(problem: Problem) -> dict[str, float]:
    """Return rows per second of each vendor's devices at full speed, without bubble or traffic.

    Where kinds are good at different things (one at layers, one at the head), together they can do more than the
    sum of each alone; then all are scaled up so that the sum is what the bound allows, and U stays below 100 %.
    """
    alone: dict[str, float] = {}
    for kind, speed in zip(problem.groups, problem.group_speeds, strict=True):
        rate = len(kind.seats) * speed
        alone[kind.vendor] = alone.get(kind.vendor, 0.0) + rate
    together = problem.batch_rows / _busy_s(problem)
    scale = max(1.0, together / sum(alone.values()))
    return {vendor: rate * scale for vendor, rate in sorted(alone.items())}


def gap_reason(cost: Cost, bound: Bound, *, unlimited_s: float | None) -> str:
    """Say in words what lies between a step and the bound, largest part first, in percent of the bound.

    `unlimited_s` is the best step on devices with endless memory, where that was looked for.
    """
    parts = {
        "integrality (whole layers and rows)": cost.compute_s - bound.compute_s,
        "bubble": cost.bubble_s,
        "traffic": cost.p2p_s + cost.sync_s,
        "optimizer": cost.optimizer_s - bound.optimizer_s,
    }
    if unlimited_s is not None and unlimited_s < cost.step_s:
        # the bound may know of the memory too: no part is more than the gap
        parts["memory"] = memory_s = cost.step_s - max(unlimited_s, bound.step_s)
        for name in ("integrality (whole layers and rows)", "bubble", "traffic"):
            taken = min(memory_s, max(0.0, parts[name]))  # what memory forces shows up there
            parts[name] -= taken
            memory_s -= taken
    if (
        parts["integrality (whole layers and rows)"] < 0
    ):  # the slowest replica computes less, waits more
        parts["bubble"] += parts.pop("integrality (whole layers and rows)")
    named = sorted(parts.items(), key=lambda item: -item[1])
    words = [
        f"{name} {seconds / bound.step_s:.1%}"
        for name, seconds in named
        if seconds > _WORTH_NAMING * bound.step_s
    ]
    return ", ".join(words) or "none: the bound is reached"
