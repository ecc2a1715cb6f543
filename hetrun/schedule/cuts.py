"""Real cuts between the stages of a pipeline. Which ones are worth their price is decided in the planner.

With a real boundary X between two stages, microbatch i cuts at floor(X + frac(0.618 i)), so that a stage's average
share of the layers matches its speed; the boundary layer lives on both neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import floor

GOLDEN = 0.618  # spreads the fractions of consecutive microbatches evenly


def cut_at(boundary: float, microbatch: int) -> int:
    """Return the first layer behind a real boundary, for one microbatch."""
    return floor(boundary + (GOLDEN * microbatch) % 1.0)


def cuts_at(boundary: float, num_microbatches: int) -> list[int]:
    """Return `cut_at` of microbatches 0 to the last."""
    return [floor(boundary + phase) for phase in _phases(num_microbatches)]


@lru_cache(maxsize=4)
def _phases(num_microbatches: int) -> tuple[float, ...]:
    return tuple((GOLDEN * microbatch) % 1.0 for microbatch in range(num_microbatches))


def layers_at(boundaries: Sequence[float], num_layers: int, microbatch: int) -> tuple[int, ...]:
    """Return layers per stage of one microbatch; `boundaries` are the real cuts between stages, ascending."""
    cuts = [0, *(min(cut_at(x, microbatch), num_layers) for x in boundaries), num_layers]
    return tuple(end - begin for begin, end in pairwise(cuts))


def held_layers(boundaries: Sequence[float], num_layers: int) -> tuple[tuple[int, int], ...]:
    """Return [first, end) of the layers that each stage has to hold: boundary layers live on both sides."""
    firsts = [0, *(floor(x) for x in boundaries)]
    ends = [*(floor(x) + (x != floor(x)) for x in boundaries), num_layers]
    return tuple(zip(firsts, ends, strict=True))


def even_boundaries(
    num_layers: int, speeds: Sequence[float], *, first_extra: float = 0.0, last_extra: float = 0.0
) -> tuple[float, ...]:
    """Return real cuts at which all stages take equally long; extras (embedding, head) in layers.

    Raises:
        ValueError: an end does more than its share already.
    """
    total = num_layers + first_extra + last_extra
    cuts: list[float] = []
    done = -first_extra
    for speed in speeds[:-1]:
        done += total * speed / sum(speeds)
        cuts.append(done)
    if any(
        end < begin for begin, end in zip([0.0, *cuts], [*cuts, float(num_layers)], strict=True)
    ):
        raise ValueError(f"cuts {cuts} of {num_layers} layers are not in order")
    return tuple(cuts)
