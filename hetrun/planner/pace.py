"""About how long links hold up the microbatches of a pipeline, before it has seats. The simulator knows it exactly.

Devices of a host share its interface. A block that a host holds several times sends so many microbatches out at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from hetrun import arch
from hetrun.model import Link, LinkKind, Order
from hetrun.planner.cost import send_seconds
from hetrun.planner.problem import Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MOST_LINKED = (
    64  # devices; with more of them few combinations are laid out, and the best hide their sends
)
_PASSED = 2 / 3  # of forward and backward that a neighbour waits for where W may wait


def likely_link(problem: Problem, a: int, b: int, *, together: bool) -> Link:
    """Return the link between two kinds, inside a host if the block sits together in one."""
    first, second = problem.kinds[a], problem.kinds[b]
    if first.vendor != second.vendor:
        kind = LinkKind.ACROSS
    elif (problem.places[a] == problem.places[b] and together) or _same_single_host(problem, a, b):
        kind = LinkKind.INSIDE_HOST
    else:
        kind = LinkKind.INSIDE_ISLAND
    return problem.link(kind, first.vendor, second.vendor)


def _same_single_host(problem: Problem, a: int, b: int) -> bool:
    hosts = {seat.host_number for kind in (a, b) for seat in problem.kinds[kind].seats}
    return len(hosts) == 1


def per_host(problem: Problem, kind: int) -> int:
    """Return how many stages of a kind a full host of it holds."""
    way = problem.kinds[kind]
    return max(1, way.most_on_one_host // way.width)


def passed_share(problem: Problem) -> float:
    """Return which part of a stage's work the next one or the one before waits for."""
    return _PASSED if Order.ZERO_BUBBLE in problem.orders else 1.0


class Sends:
    """Seconds of one microbatch on the links of a pipeline, one way; remembered by ends."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[tuple[int, int, int, bool, int], float] = {}

    def of(self, kinds: Sequence[int], rows: int, *, most_replicas: int) -> list[float]:
        """Return them in order, for pipelines of which there are at most so many."""
        places = self._problem.places
        blocks = [list(block) for _, block in groupby(kinds, key=lambda kind: places[kind])]
        sends: list[float] = []
        for number, block in enumerate(blocks):
            held = per_host(self._problem, block[0])
            for place, (a, b) in enumerate(pairwise(block)):
                sends.append(self._hop_s(a, b, 1, (place + 1) % held > 0, rows))
            if number + 1 < len(blocks):
                ends = block, blocks[number + 1]
                most = max(per_host(self._problem, end[0]) // len(end) for end in ends)
                at_once = min(max(1, most), most_replicas)
                sends.append(self._hop_s(block[-1], ends[1][0], at_once, False, rows))
        return sends

    def _hop_s(self, a: int, b: int, at_once: int, together: bool, rows: int) -> float:
        key = (a, b, at_once, together, rows)
        if key not in self._known:
            problem = self._problem
            num_bytes = arch.boundary_bytes(problem.model, problem.dtype, rows, problem.seq_len)
            link = likely_link(problem, a, b, together=together)
            shared = 1 if link.kind is LinkKind.INSIDE_HOST else at_once
            self._known[key] = send_seconds(link, num_bytes, at_once=shared)
        return self._known[key]


def linked_cycle_s(
    work_s: Sequence[float], sends: Sequence[float], *, share: float, wide: bool
) -> float:
    """Return about the seconds of one more microbatch: those of the slowest stage, or of a loop over links.

    Loops of two neighbours and of all stages are looked at; `schedule/bounds.py` has the formula and all loops. `share`
    of the work is waited for; `wide` says whether one more microbatch may be on every link.
    """
    step = 1 + wide
    cycle_s = max(work_s)
    for (a, b), send_s in zip(pairwise(work_s), sends, strict=True):
        cycle_s = max(cycle_s, (share * (a + b) + 2 * send_s) / (1 + step))
    whole_s = share * sum(work_s) + 2 * sum(sends)
    return max(cycle_s, whole_s / (1 + step * (len(work_s) - 1)))


def linked_cycles(work_s: Floats, sends: Floats, sizes: Any, *, share: float, wide: Any) -> Floats:
    """Return what `linked_cycle_s` does, for a pipeline per row; places without a stage hold zeros."""
    import numpy as np

    step = 1.0 + wide
    pairs = np.where(sends > 0, share * (work_s[:, :-1] + work_s[:, 1:]) + 2 * sends, 0.0)
    near = pairs.max(axis=1, initial=0.0) / (1 + step)
    whole = (share * work_s.sum(axis=1) + 2 * sends.sum(axis=1)) / (1 + step * (sizes - 1))
    found: Floats = np.maximum(work_s.max(axis=1), np.maximum(near, whole))
    return found
