"""What a stage costs and holds by kind and microbatch size, as arrays: for `scale.py`, which splits many shapes at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hetrun import arch
from hetrun.model import Link, LinkKind
from hetrun.planner.pace import likely_link, per_host
from hetrun.planner.shapes import ShapeMaker

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


class Tables:
    """What a stage costs and holds by kind and microbatch size, as arrays to index with."""

    def __init__(self, maker: ShapeMaker, depth: int) -> None:
        import numpy as np

        problem = maker.problem
        self.problem = problem
        units = np.asarray(
            [
                [maker.pace[kind, rows] for rows in problem.row_choices]
                for kind in range(len(problem.kinds))
            ]
        )
        self.layer_s, self.embedding_s, self.head_s = units[..., 0], units[..., 1], units[..., 2]
        caps = [
            [
                [
                    [maker.cap(kind, rows, window=window, first=bool(first)) for first in (0, 1)]
                    for window in range(1, depth + 1)
                ]
                for rows in problem.row_choices
            ]
            for kind in range(len(problem.kinds))
        ]
        zero = np.zeros((len(problem.kinds), len(problem.row_choices), 1, 2))
        self.caps = np.concatenate([zero, np.asarray(caps, dtype=float)], axis=2)
        self.num_bytes = np.asarray(
            [
                arch.boundary_bytes(problem.model, problem.dtype, rows, problem.seq_len)
                for rows in problem.row_choices
            ]
        )
        numbers = range(len(problem.kinds))
        self.together, self.apart = (
            [[likely_link(problem, a, b, together=together) for b in numbers] for a in numbers]
            for together in (True, False)
        )
        self.per_host = np.asarray([*(per_host(problem, kind) for kind in numbers), 1])
        self.update_s = np.asarray(
            [
                kind.optimizer_s_per_parameter
                * arch.mean_layer_parameters(problem.model)
                / (kind.tp * max(1, problem.shards))
                for kind in problem.kinds
            ]
        )

    def sends(self, kinds: Any, row_numbers: Any, need: Floats) -> Floats:
        """Return seconds that one microbatch spends on each link, one way; see `pace.py`. Blocks are of one kind each."""
        import numpy as np

        places = np.asarray([*self.problem.places, -1])[kinds]
        block, place = _blocks_of(places)
        capacity = np.asarray(self.problem.capacity, dtype=float)[:, None]
        with np.errstate(divide="ignore"):
            most = np.floor((np.where(need > 0, capacity / need, np.inf)).min(axis=0))
        held = self.per_host[kinds]
        times = np.maximum(1, held // np.maximum(1, block))
        at_once = np.minimum(np.maximum(times[:, :-1], times[:, 1:]), most[:, None])
        a, b = kinds[:, :-1], kinds[:, 1:]
        inside = places[:, :-1] == places[:, 1:]
        together = inside & ((place[:, :-1] + 1) % held[:, :-1] > 0)
        at_once = np.where(inside, 1.0, at_once)
        found: Floats = np.zeros(a.shape)
        for links, chosen in ((self.together, together), (self.apart, ~together)):
            latency, rate, shared = _link_tables(links)
            bytes_at_once = self.num_bytes[row_numbers][:, None] * np.where(
                shared[a, b], at_once, 1.0
            )
            found = np.where(chosen, latency[a, b] + bytes_at_once / rate[a, b], found)
        return np.where(b >= 0, found, 0.0)

    def optimizer(self, kinds: Any, layers: Any) -> Any:
        """Return about how long the slowest stage updates its parameters."""
        return (self.update_s[kinds] * layers).max(axis=1)


def _blocks_of(places: Any) -> tuple[Any, Any]:
    """Return for every stage how many stages its block has, and how many of these stand before it."""
    import numpy as np

    index = np.broadcast_to(np.arange(places.shape[1]), places.shape)
    new = np.ones(places.shape, dtype=bool)
    new[:, 1:] = places[:, 1:] != places[:, :-1]
    begin = np.maximum.accumulate(np.where(new, index, 0), axis=1)
    last = np.ones(places.shape, dtype=bool)
    last[:, :-1] = new[:, 1:]
    ends = np.where(last, index, places.shape[1])
    end = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
    return end - begin + 1, index - begin


def _link_tables(links: Sequence[Sequence[Link]]) -> tuple[Any, Any, Any]:
    """Return latencies, rates and whether the link leaves a host, by kinds at both ends."""
    import numpy as np

    latency = np.asarray([[link.latency_s for link in row] for row in links])
    rate = np.asarray([[link.bytes_per_s for link in row] for row in links])
    leaves = np.asarray([[link.kind is not LinkKind.INSIDE_HOST for link in row] for row in links])
    return latency, rate, leaves
