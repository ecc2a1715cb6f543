"""A second evaluator of a split, from profile and recipe alone. Shares no code with the first, so that both can be wrong but not alike."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise

from hetrun import arch
from hetrun.model import (
    Link,
    LinkKind,
    ModelSpec,
    Order,
    Profile,
    RankPlan,
    Recipe,
    ReplicaPlan,
    Split,
    StagePlan,
)
from hetrun.planner.recost_sync import owner_sets
from hetrun.planner.replay import replay_lanes
from hetrun.planner.reweigh import Reweigh

_WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "bf16-mixed": 2}  # bytes of an activation
_GRADIENT_WIDTHS = {**_WIDTHS, "bf16-mixed": 4}


def recost(split: Split, profile: Profile, recipe: Recipe) -> float:
    """Evaluate a split from profile and recipe alone; return seconds per step."""
    clocks = _pipelines(split, profile, recipe)
    width = _GRADIENT_WIDTHS[recipe.train.dtype.value]
    sets = owner_sets(split, recipe.model)
    shares = split.replicas[0].zero == 1  # gradients scattered before, weights gathered behind

    def all_sets_meet() -> None:
        for members, parameters, tp in sets:
            on = {rank: split.ranks[rank] for rank in members}
            num_bytes = parameters * width
            _meet(clocks, on, num_bytes, profile.links, times=tp, ways=2 - shares)

    all_sets_meet()
    _meet(clocks, dict(enumerate(split.ranks)), 24, profile.links, times=1)
    weights = Reweigh(split, recipe)
    for replica in split.replicas:
        for stage in replica.stages:
            for rank in stage.ranks:
                per_parameter_s = _figures(profile, split.ranks[rank], stage)[1]
                clocks[rank] += per_parameter_s * weights.parameters(stage)[1]
    if shares:
        all_sets_meet()
    return max(clocks)


def _pipelines(split: Split, profile: Profile, recipe: Recipe) -> list[float]:
    """Return when each rank is done with its microbatches."""
    clocks = [0.0] * len(split.ranks)
    played: dict[tuple[object, ...], list[list[float]]] = {}  # replicas that are alike end alike
    crowd = _crowd(split)
    for replica in split.replicas:
        send_s = _sends(replica, split.ranks, profile, recipe, crowd=crowd)
        alike = (*_likeness(replica, split.ranks), *send_s)
        if alike not in played:
            played[alike] = _replay(replica, split.ranks, profile, recipe, send_s=send_s)
        for stage, ends in zip(replica.stages, played[alike], strict=True):
            for place, rank in enumerate(stage.ranks):
                clocks[rank] = ends[place // _tp(stage)]
    return clocks


def _likeness(replica: ReplicaPlan, ranks: tuple[RankPlan, ...]) -> tuple[object, ...]:
    """Return all that decides when a replica's stages end: work, devices, and which neighbours share a host."""
    on = [ranks[stage.ranks[0]] for stage in replica.stages]
    stages = tuple(
        (
            *(r.vendor, r.model, s.first_layer, s.num_layers, s.window, s.most_held),
            *(s.lanes, len(s.ranks), s.recompute),
        )
        for r, s in zip(on, replica.stages, strict=True)
    )
    if any(stage.lanes > 1 for stage in replica.stages):
        return (id(replica),)  # the links between lanes are many
    together = tuple(a.host == b.host for a, b in pairwise(on))
    rows, count = replica.microbatch_rows, replica.num_microbatches
    return rows, count, stages, together, replica.order, replica.cuts


def _tp(stage: StagePlan) -> int:
    """Return how many ranks share each layer of a stage."""
    return len(stage.ranks) // stage.lanes


def _figures(
    profile: Profile, rank: RankPlan, stage: StagePlan
) -> tuple[list[tuple[int, list[float]]], float]:
    """Return measured points of a rank's device, used as its stage does, and its seconds per parameter."""
    for device in profile.devices:
        if (device.vendor, device.model) == (rank.vendor, rank.model):
            points = [
                (
                    t.rows,
                    [
                        t.layer_forward_s,
                        t.layer_backward_s,
                        t.embedding_forward_s,
                        t.embedding_backward_s,
                        t.head_forward_s,
                        t.head_backward_s,
                        t.layer_weights_s or 0.0,
                        t.head_weights_s or 0.0,
                        *(seconds for run in t.runs for seconds in (run.forward_s, run.backward_s)),
                    ],
                )
                for t in device.timings
                if t.tp == _tp(stage) and t.recompute == stage.recompute
            ]
            if points:
                return points, device.optimizer_s_per_parameter
    raise ValueError(f"rank {rank.rank}: no figures for {rank.vendor} {rank.model}")


def _interpolate(points: list[tuple[int, list[float]]], rows: int) -> list[float]:
    """Straight lines between points; constant below; the last slope (or proportion) above."""
    if rows <= points[0][0]:
        return points[0][1]
    for number in range(1, len(points)):
        if rows <= points[number][0]:
            (x0, low), (x1, high) = points[number - 1], points[number]
            return [a + (b - a) * (rows - x0) / (x1 - x0) for a, b in zip(low, high, strict=True)]
    x1, high = points[-1]
    slopes = [value / x1 for value in high]
    if len(points) > 1:
        x0, low = points[-2]
        measured = [(b - a) / (x1 - x0) for a, b in zip(low, high, strict=True)]
        slopes = [m if m > 0 else s for m, s in zip(measured, slopes, strict=True)]
    return [value + slope * (rows - x1) for value, slope in zip(high, slopes, strict=True)]


def _at(
    stage: StagePlan, profile: Profile, rank: RankPlan, replica: ReplicaPlan, width: int
) -> list[float]:
    """Return the seconds of a stage's parts for its microbatches, with what the ranks of a layer tell each other."""
    seconds = list(_interpolate(_figures(profile, rank, stage)[0], replica.microbatch_rows))
    tp = _tp(stage)
    if tp == 1:
        return seconds
    link = _find(profile.links, LinkKind.INSIDE_HOST, rank.vendor, rank.vendor)
    output = replica.microbatch_rows * profile.seq_len * profile.model.hidden_size * width
    once_s = (2 * tp - 2) * (link.latency_s + output / (tp * link.bytes_per_s))  # one all-reduce
    forward, backward = 2 * once_s, (4 if stage.recompute else 2) * once_s
    layers = [0, *range(8, len(seconds), 2)]  # the layer, and the layer of each run
    for place in layers:
        seconds[place] += forward
        seconds[place + 1] += backward
    return seconds


def _stage_work(stage: StagePlan, profile: Profile, seconds: list[float]) -> tuple[float, float]:
    """Return seconds of forward and backward of one microbatch."""
    lf, lb, ef, eb, hf, hb, _, _, *of_runs = seconds
    holds = [stage.num_layers, int(stage.has_embedding), int(stage.has_head)]
    if of_runs:
        holds[0] = 0  # the mean over all layers is not theirs
        holds += _layers_per_run(stage, profile.model)
    forward_s = sum(n * s for n, s in zip(holds, (lf, ef, hf, *of_runs[::2]), strict=True))
    backward_s = sum(n * s for n, s in zip(holds, (lb, eb, hb, *of_runs[1::2]), strict=True))
    return forward_s, backward_s


def _of_own_layers(figures: list[float], stage: StagePlan, model: ModelSpec) -> list[float]:
    """Return figures with the mean of the stage's own layers, where these differ, instead of that of all."""
    if len(figures) > 8 and stage.num_layers:
        own = _layers_per_run(stage, model)
        for place, of_runs in enumerate((figures[8::2], figures[9::2])):
            total_s = sum(n * s for n, s in zip(own, of_runs, strict=True))
            figures = [*figures[:place], total_s / stage.num_layers, *figures[place + 1 :]]
    return figures[:8]


def _layers_per_run(stage: StagePlan, model: ModelSpec) -> list[int]:
    """Return how many layers of each run of equal ones a stage has."""
    run_of = [n for n, run in enumerate(arch.layer_runs(model)) for _ in range(run.num_layers)]
    own = run_of[stage.first_layer : stage.first_layer + stage.num_layers]
    return [own.count(number) for number in range(run_of[-1] + 1)]


def _replay(
    replica: ReplicaPlan,
    ranks: tuple[RankPlan, ...],
    profile: Profile,
    recipe: Recipe,
    *,
    send_s: list[float],
) -> list[list[float]]:
    """Return when each lane of each stage is done with its microbatches."""
    on = [ranks[stage.ranks[0]] for stage in replica.stages]
    width = _WIDTHS[recipe.train.dtype.value]
    figures = [_at(s, profile, r, replica, width) for r, s in zip(on, replica.stages, strict=True)]
    special = replica.order is Order.ZERO_BUBBLE or replica.cuts
    if special or any(stage.lanes > 1 for stage in replica.stages):
        shown = [
            _of_own_layers(seconds, stage, profile.model)
            for seconds, stage in zip(figures, replica.stages, strict=True)
        ]
        return replay_lanes(replica, shown, send_s, num_layers=recipe.model.num_layers)
    work = [_stage_work(s, profile, f) for s, f in zip(replica.stages, figures, strict=True)]
    return [[end_s] for end_s in _replay_strict(replica, work, send_s)]


_Crowd = dict[tuple[str, str], int]


def _crowd(split: Split) -> _Crowd:
    """Return of each host how many lanes push activations "out" to other hosts, and pull some "in"."""
    crowd: _Crowd = {}
    for replica in split.replicas:
        for before, after in pairwise(replica.stages):
            left, right = (
                [split.ranks[rank].host for rank in s.ranks[:: _tp(s)]] for s in (before, after)
            )
            for way, own, other in (("out", left, right), ("in", right, left)):
                for host in own:
                    crowd[host, way] = crowd.get((host, way), 0) + any(o != host for o in other)
    return crowd


def _sends(
    replica: ReplicaPlan,
    ranks: tuple[RankPlan, ...],
    profile: Profile,
    recipe: Recipe,
    *,
    crowd: _Crowd,
) -> list[float]:
    """Return the seconds of one activation over the slowest link between the lanes of neighbours.

    Between hosts it shares the interface with all that leave the one host or reach the other.
    """
    width = _WIDTHS[recipe.train.dtype.value]
    sent = replica.microbatch_rows * recipe.data.seq_len * recipe.model.hidden_size * width
    return [
        max(
            hop.latency_s + sent * many / hop.bytes_per_s
            for a in before.ranks[:: _tp(before)]
            for b in after.ranks[:: _tp(after)]
            for hop in [_hop(profile.links, ranks[a], ranks[b])]
            for hosts in [(ranks[a].host, ranks[b].host)]
            for many in [
                1 if len({*hosts}) == 1 else max(crowd[hosts[0], "out"], crowd[hosts[1], "in"])
            ]
        )
        for before, after in pairwise(replica.stages)
    ]


def _replay_strict(
    replica: ReplicaPlan, work: list[tuple[float, float]], send_s: list[float]
) -> list[float]:
    """Play 1F1B with a queue of events: an action is released once the two it waits for have ended."""
    stages, count = replica.stages, replica.num_microbatches
    orders = [_order(min(stage.window, count), count) for stage in stages]
    place = [0] * len(stages)
    arrived: dict[tuple[int, str, int], float] = {(0, "F", i): 0.0 for i in range(count)}
    free_s = [0.0] * len(stages)
    queue: list[tuple[float, int]] = []

    def release(index: int) -> None:
        """Queue the next action of a stage if its input is known to arrive."""
        if place[index] < len(orders[index]):
            key = (index, *orders[index][place[index]])
            if key in arrived:
                heappush(queue, (max(free_s[index], arrived[key]), index))

    release(0)
    while queue:
        start_s, index = heappop(queue)
        kind, i = orders[index][place[index]]
        place[index] += 1
        free_s[index] = end_s = start_s + work[index][kind == "B"]
        target = index + 1 if kind == "F" else index - 1
        if kind == "F" and target == len(stages):
            arrived[index, "B", i] = end_s
        elif target >= 0:
            hop_s = send_s[min(index, target)]
            arrived[target, kind, i] = end_s + hop_s
            if place[target] < 2 * count and orders[target][place[target]] == (kind, i):
                release(target)
        release(index)
    if any(done < 2 * count for done in place):
        raise ValueError(f"pipeline stalls: stages did {place} of {2 * count} actions")
    return free_s


def _order(window: int, count: int) -> list[tuple[str, int]]:
    """Return forwards and backwards of a stage: `window` forwards, then in turn, then what is left."""
    order: list[tuple[str, int]] = []
    forwards = backwards = 0
    while backwards < count:
        if forwards < count and forwards - backwards < window:
            order.append(("F", forwards))
            forwards += 1
        else:
            order.append(("B", backwards))
            backwards += 1
    return order


def _meet(
    clocks: list[float],
    members: dict[int, RankPlan],
    num_bytes: float,
    links: tuple[Link, ...],
    *,
    times: int,
    ways: int = 2,
) -> None:
    """Let ranks all-reduce together: start when the last is there, rings inside vendors, then a ring of vendors.

    What goes between hosts goes `times` times: so many do the same beside. A ring goes round once to scatter and once
    to gather: `ways`.
    """
    far_bytes = num_bytes * (times if len({rank.host for rank in members.values()}) > 1 else 1)
    islands: dict[str, set[tuple[str, int]]] = {}
    for number, rank in members.items():
        islands.setdefault(rank.vendor, set()).add((rank.host, number))
    inside_s = [0.0]
    for vendor, seats in islands.items():
        size = len(seats)
        if size > 1:
            one_host = len({host for host, _ in seats}) == 1
            kind = LinkKind.INSIDE_HOST if one_host else LinkKind.INSIDE_ISLAND
            link = _find(links, kind, vendor, vendor)
            moved = num_bytes if one_host else far_bytes
            hop_s = link.latency_s + moved / (size * link.bytes_per_s)
            inside_s.append(ways * (size - 1) * hop_s)
    names = sorted(islands)
    across_s = 0.0
    if len(names) > 1:
        pairs = [(names[i], names[(i + 1) % len(names)]) for i in range(len(names))]
        ring = [_find(links, LinkKind.ACROSS, a, b) for a, b in pairs]
        hop_s = max(hop.latency_s + far_bytes / (len(names) * hop.bytes_per_s) for hop in ring)
        across_s = ways * (len(names) - 1) * hop_s
    end_s = max(clocks[number] for number in members) + max(inside_s) + across_s
    for number in members:
        clocks[number] = end_s


def _hop(links: tuple[Link, ...], a: RankPlan, b: RankPlan) -> Link:
    """Return the link between neighbours of a pipeline."""
    if a.vendor != b.vendor:
        return _find(links, LinkKind.ACROSS, a.vendor, b.vendor)
    kind = LinkKind.INSIDE_HOST if a.host == b.host else LinkKind.INSIDE_ISLAND
    return _find(links, kind, a.vendor, a.vendor)


def _find(links: tuple[Link, ...], kind: LinkKind, a: str, b: str) -> Link:
    """Return the first link of the most specific sort: both vendors named, then one, then none."""
    for num_named in (2, 1, 0):
        for link in links:
            named = [vendor for vendor in (link.a, link.b) if vendor is not None]
            if link.kind is not kind or len(named) != num_named:
                continue
            if num_named == 2 and sorted(named) != sorted((a, b)):
                continue
            if set(named) <= {a, b}:
                return link
    raise ValueError(f"no link {kind.value} between {a} and {b}")
