"""Events per CPU second of the simulators. Run by `make bench`; results in docs/benchmarks.md."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from hetrun.model import Order, ReplicaPlan, StagePlan
from hetrun.schedule import even_boundaries, held_layers, replica_ends, simulate_replica

pytestmark = [pytest.mark.bench, pytest.mark.timeout(120)]

NUM_LAYERS = 40
SPEEDS = (2.0, 2.0, 1.3, 1.3, 1.0, 1.0, 0.7, 0.7)  # of eight stages
COUNT = 512
REPEATS = 5
LEAST_PER_S = 1e5  # on a busy machine; docs/benchmarks.md has what an idle one does


def replica(order: Order, *, cuts: bool) -> ReplicaPlan:
    """Eight stages of four speeds, cut evenly, over links of a tenth of a layer."""
    bounds = even_boundaries(NUM_LAYERS, SPEEDS)
    whole = tuple(float(round(bound)) for bound in bounds)
    split = order is Order.ZERO_BUBBLE
    stages = []
    size = len(SPEEDS)
    for index, (first, end) in enumerate(held_layers(bounds if cuts else whole, NUM_LAYERS)):
        layer_s = 1 / SPEEDS[index]
        window = size - index + (2 if split or cuts else 0)
        stages.append(
            StagePlan(
                ranks=(index,),
                first_layer=first,
                num_layers=end - first,
                has_embedding=index == 0,
                has_head=index == size - 1,
                window=window,
                most_held=window + 1 if split else None,
                forward_s=(end - first) * layer_s,
                backward_s=2 * (end - first) * layer_s,
                weights_s=(end - first) * layer_s * split,
                layer_forward_s=layer_s,
                layer_backward_s=2 * layer_s,
                layer_weights_s=layer_s * split,
                send_s=0.1,
                optimizer_s=0.0,
                memory_bytes=0,
                memory_limit_bytes=None,
            )
        )
    return ReplicaPlan(
        first_row=0,
        microbatch_rows=1,
        num_microbatches=COUNT,
        stages=tuple(stages),
        order=order,
        cuts=bounds if cuts else (),
    )


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("play", [replica_ends, simulate_replica])
def test_events_per_second(order: Order, cuts: bool, play: Callable[[ReplicaPlan], object]) -> None:
    own = replica(order, cuts=cuts)
    events = (3 if order is Order.ZERO_BUBBLE else 2) * COUNT * len(SPEEDS)
    seconds = []
    for number in range(REPEATS):
        fresh = replace(own, first_row=number)
        start_s = time.process_time()
        play(fresh)
        seconds.append(time.process_time() - start_s)
    rate = events / min(seconds)
    sys.stdout.write(f"{own.way}, {play.__name__}: {rate / 1e6:.2f} million events/s\n")
    assert rate > LEAST_PER_S
