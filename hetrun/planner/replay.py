"""Zero bubble, real cuts and lanes played once more for `recost.py`, from the rules alone: shares no code with `schedule/`.

The rules. A lane runs its microbatches (those whose number leaves the lane's when divided by the lanes) in order. Free,
it runs with zero bubble: B if its gradient is there; else F if its input is there, fewer than `window` wait for their B
and fewer than `most_held` for their W; else W. With 1F1B: F if its input is there and fewer than `window` wait for
their B; else B if its gradient is there. Microbatch i passes, of the real cut X, floor(X + frac(0.618 i)) layers before.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from hetrun.model import Order, ReplicaPlan, StagePlan

_TOGETHER = 1e-9  # of the mean forward or backward: times that differ by less are the same


class _Player:
    """One lane: seconds by action and microbatch, its microbatches, what it did and what has arrived."""

    def __init__(self, stage: StagePlan, mine: Sequence[int]) -> None:
        self.stage = stage
        self.todo = {"F": list(mine), "B": list(mine), "W": list(mine)}
        self.count = len(mine)
        self.arrived: dict[tuple[str, int], float] = {}
        self.free_s = 0.0

    def behind(self, later: str) -> int:
        """Return how many microbatches are past their forward and not past `later`."""
        return len(self.todo[later]) - len(self.todo["F"])

    def ready(self, kind: str, until_s: float) -> bool:
        """Whether the input of the next F or B is there."""
        left = self.todo[kind]
        return bool(left) and self.arrived.get((kind, left[0]), until_s + 1) <= until_s

    def choose(self, until_s: float, *, splits: bool) -> str | None:
        """Return what a free lane does."""
        stage = self.stage
        room = self.behind("B") < stage.window
        if splits:
            room = room and self.behind("W") < (stage.most_held or stage.window)
        forward, backward = room and self.ready("F", until_s), self.ready("B", until_s)
        if backward and (splits or not forward):
            return "B"
        if forward:
            return "F"
        return "W" if splits and len(self.todo["B"]) < len(self.todo["W"]) else None


def replay_lanes(
    replica: ReplicaPlan,
    figures: Sequence[Sequence[float]],
    send_s: Sequence[float],
    *,
    num_layers: int,
) -> list[list[float]]:
    """Return when each lane of each stage is done.

    `figures` has per stage the seconds of layer F and B, embedding F and B, head F and B, layer W and head W.

    Raises:
        ValueError: the pipeline stalls.
    """
    splits = replica.order is Order.ZERO_BUBBLE
    count = replica.num_microbatches
    work = [
        [_work(replica, index, i, figures[index], num_layers) for i in range(count)]
        for index in range(len(replica.stages))
    ]
    mean_s = sum(f + b + (0.0 if splits else w) for own in work for f, b, w in own)
    slack_s = _TOGETHER * mean_s / (2 * count * len(work))
    players = [
        [_Player(stage, range(lane, count, stage.lanes)) for lane in range(stage.lanes)]
        for stage in replica.stages
    ]
    queue: list[tuple[float, int, int]] = []  # lanes to look at: when, stage, lane

    def deliver(stage: int, kind: str, i: int, when_s: float) -> None:
        lane = i % replica.stages[stage].lanes
        players[stage][lane].arrived[kind, i] = when_s
        heappush(queue, (when_s, stage, lane))

    for i in range(count):
        deliver(0, "F", i, 0.0)
    while queue:
        now_s, stage, lane = heappop(queue)
        player = players[stage][lane]
        if player.free_s > now_s:
            continue
        kind = player.choose(now_s + slack_s, splits=splits)
        if kind is None:
            continue
        i = player.todo[kind].pop(0)
        f, b, w = work[stage][i]
        seconds = {"F": f, "B": b if splits else b + w, "W": w}[kind]
        end_s = max(now_s, player.arrived.get((kind, i), 0.0)) + seconds
        player.free_s = end_s
        if kind == "F" and stage + 1 < len(players):
            deliver(stage + 1, "F", i, end_s + send_s[stage])
        elif kind == "F":
            deliver(stage, "B", i, end_s)
        elif kind == "B" and stage:
            deliver(stage - 1, "B", i, end_s + send_s[stage - 1])
        heappush(queue, (end_s, stage, lane))
    last = "W" if splits else "B"
    if any(player.todo[last] for lanes in players for player in lanes):
        raise ValueError("pipeline stalls: some microbatches never get through")
    return [[player.free_s for player in lanes] for lanes in players]


def _work(
    replica: ReplicaPlan, index: int, i: int, figures: Sequence[float], num_layers: int
) -> tuple[float, float, float]:
    """Return seconds of F, of B without W, and of W of one microbatch on one stage."""
    stage = replica.stages[index]
    layers = stage.num_layers
    if replica.cuts:
        edges = [0, *(int(cut + 0.618 * i % 1.0) for cut in replica.cuts), num_layers]
        layers = edges[index + 1] - edges[index]
    lf, lb, ef, eb, hf, hb, lw, hw = figures
    w = layers * lw + stage.has_head * hw if replica.order is Order.ZERO_BUBBLE else 0.0
    forward = layers * lf + stage.has_embedding * ef + stage.has_head * hf
    backward = layers * lb + stage.has_embedding * eb + stage.has_head * hb
    return forward, backward - w, w
