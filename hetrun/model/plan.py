"""Who does what: plan.json. Choosing it is left to `planner/`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import ceil, floor, isfinite

from hetrun.model.base import SCHEMA_VERSION, Noun, Source, need
from hetrun.model.inventory import HostSpec, Link
from hetrun.model.limits import Order
from hetrun.model.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan(Noun):
    """One process: where it runs and which device it drives. Rank = index in `Plan.ranks`."""

    rank: int
    host: str
    local_rank: int
    device_index: int  # in the host's facts
    vendor: str
    model: str
    replica: int
    stage: int
    torch_device: str  # "cpu", "cuda", "npu", ...
    torch_plugin: str | None = None  # module to import before the device exists
    visible_env: str | None = None  # variable that selects the device
    visible_id: str | None = None  # its value for this rank
    emulated: bool = False
    memory_bytes: int | None = None
    num_threads: int = 1
    env: dict[str, str] = field(default_factory=dict)  # what the vendor's numbering relies on


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan(Noun):
    """A run of layers on the devices of one vendor, with what the cost model expects per microbatch.

    `ranks` are `lanes` x tp: microbatch i runs on lane i % lanes, whose tp ranks share each layer. Seconds are those
    of a microbatch that passes all `num_layers`; one that is cut elsewhere (`ReplicaPlan.cuts`) takes
    `layer_forward_s` and so on less for each layer that it does not pass here.
    """

    ranks: tuple[int, ...]
    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool
    window: int  # forwards that may run ahead of their backwards
    forward_s: float
    backward_s: float
    send_s: float  # activation of one microbatch to the next stage, one way; 0 on the last
    optimizer_s: float
    memory_bytes: int  # of each of the ranks
    memory_limit_bytes: int | None
    recompute: bool = False  # the backward runs the forward again
    lanes: int = 1  # copies of the stage that take microbatches in turn
    weights_s: float = 0.0  # the part of backward_s that only the weights' gradients need
    most_held: int | None = None  # zero bubble: microbatches between forward and weights' backward
    layer_forward_s: float = 0.0  # of one layer
    layer_backward_s: float = 0.0
    layer_weights_s: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks and self.lanes == 1 and self.num_layers >= 0 and self.window >= 1:
            return  # texts of errors are slow to build, and there are 100,000 stages
        need(bool(self.ranks), "stage without ranks")
        need(
            self.lanes >= 1 and len(self.ranks) % self.lanes == 0,
            f"stage on ranks {list(self.ranks)}: {self.lanes} lanes, need a divisor of the ranks",
        )
        need(
            self.num_layers >= 0,
            f"stage on ranks {list(self.ranks)}: {self.num_layers} layers, need 0 or more",
        )
        need(
            self.window >= 1,
            f"stage on ranks {list(self.ranks)}: window {self.window}, need at least 1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan(Noun):
    """One pipeline copy of the model; takes rows [first_row, first_row + rows) of every global batch."""

    first_row: int
    microbatch_rows: int
    num_microbatches: int
    stages: tuple[StagePlan, ...]
    order: Order = Order.ONE_F_ONE_B
    cuts: tuple[float, ...] = ()  # real cuts between the stages; none: at each stage's first layer
    zero: int = 0  # ZeRO stage, the same in all replicas; 1: who holds a parameter updates a part

    def __post_init__(self) -> None:
        need(
            self.microbatch_rows >= 1,
            f"replica: microbatch_rows {self.microbatch_rows}, need at least 1",
        )
        need(
            self.num_microbatches >= 1,
            f"replica: num_microbatches {self.num_microbatches}, need at least 1",
        )
        _check_order(self)

    @property
    def num_rows(self) -> int:
        """Rows of one global batch that this replica computes."""
        return self.microbatch_rows * self.num_microbatches

    @property
    def layer_shares(self) -> tuple[float, ...]:
        """Layers that a microbatch passes on each stage on average: whole numbers unless cuts are real."""
        if not self.cuts:
            return tuple(float(stage.num_layers) for stage in self.stages)
        last = self.stages[-1]
        edges = (0.0, *self.cuts, float(last.first_layer + last.num_layers))
        return tuple(end - begin for begin, end in pairwise(edges))

    @property
    def way(self) -> str:
        """How it works through its microbatches, in words."""
        name = "zero bubble" if self.order is Order.ZERO_BUBBLE else "1F1B"
        return f"{name} with real cuts" if self.cuts else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost(Noun):
    """Seconds of one optimizer step, simulated; parts are those of the slowest replica and add up to step_s."""

    step_s: float
    compute_s: float
    bubble_s: float
    p2p_s: float
    sync_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Share(Noun):
    """Part of the summed compute that was used, 1.0 = all of it; `kind` is the weakest source of what went into it."""

    value: float | None
    kind: Source
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency(Noun):
    """Three answers to "how much of the summed compute was used"; 1.0 = all of it, never clamped.

    e1 = mixed throughput / sum of what each vendor reaches alone with its own best plan at the same global batch.
    e2 = the same with each baseline's batch scaled to its share of the compute.
    u = ideal time at summed speeds / achieved time.
    """

    e1: Share
    e2: Share
    u: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline(Noun):
    """One vendor alone, with its own best plan; rows_per_s is None where it cannot hold the model."""

    vendor: str
    num_devices: int
    rows_per_s: float | None  # at the same global batch
    scaled_batch_rows: int
    scaled_rows_per_s: float | None
    ideal_rows_per_s: float  # summed speeds, no bubble, no traffic
    shape: str  # such as "2 replicas x 2 stages"
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(Noun):
    """Ranks and replicas with their predicted cost: the chosen split, or the naive one beside it."""

    ranks: tuple[RankPlan, ...]
    replicas: tuple[ReplicaPlan, ...]
    cost: Cost
    efficiency: Efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Noun):
    """plan.json: all that launch and report need, so that later steps read no earlier file."""

    schema_version: int = SCHEMA_VERSION
    created: str  # ISO 8601, UTC
    recipe: Recipe
    hosts: tuple[HostSpec, ...]  # only those that run ranks, in order of their node rank
    links: tuple[Link, ...]
    emulated: bool  # some rank drives an emulated device: the run's clock is modelled time
    split: Split
    even_split: Split | None  # the best split with equal layers and equal rows
    even_split_why: str = ""  # why there is none
    bound_s: float  # no split can be faster within the cost model
    bound_covers: str = "any split"  # what bound_s holds for
    gap: float  # step_s / bound_s - 1
    gap_reason: str  # what the gap is made of, such as "integer layers"
    idle_devices: tuple[str, ...] = ()  # "host/index", left out since they would not help
    runner_up: str = ""
    baselines: tuple[Baseline, ...] = ()
    verdict: str = ""  # whether mixing pays against the best single vendor

    def __post_init__(self) -> None:
        rows = sum(replica.num_rows for replica in self.split.replicas)
        batch = self.recipe.train.global_batch_rows
        zeros = {replica.zero for replica in self.split.replicas}
        need(len(zeros) == 1 and zeros <= {0, 1}, f"plan: zero {sorted(zeros)}, need one of 0, 1")
        need(rows == batch, f"plan: replicas take {rows} rows, need global_batch_rows {batch}")
        for index, rank in enumerate(self.split.ranks):
            need(rank.rank == index, f"plan: rank {rank.rank} at place {index}")
        for number, replica in enumerate(self.split.replicas):
            layers = [(stage.first_layer, stage.num_layers) for stage in replica.stages]
            need(
                layers == _held(replica, self.recipe.model.num_layers),
                f"plan: replica {number} has layers {layers}, need each placed once and in order"
                f" (the layer of a real cut on both sides; cuts {list(replica.cuts)}),"
                f" {self.recipe.model.num_layers} in all",
            )


def _check_order(replica: ReplicaPlan) -> None:
    """Refuse cuts and bounds that no order can run."""
    stages, cuts = replica.stages, replica.cuts
    need(
        not cuts or len(cuts) == len(stages) - 1,
        f"replica: {len(cuts)} cuts between {len(stages)} stages, need none or one between two each",
    )
    need(
        all(isfinite(cut) and cut >= 0 for cut in cuts) and list(cuts) == sorted(cuts),
        f"replica: cuts {list(cuts)}, need 0 or more, ascending",
    )
    splits = replica.order is Order.ZERO_BUBBLE
    for stage in stages:
        most_held = stage.window if stage.most_held is None else stage.most_held
        need(
            splits or stage.weights_s == stage.layer_weights_s == 0,
            f"replica: order {replica.order.value} with weights_s, which only zero bubble has",
        )
        need(
            0 <= stage.weights_s <= stage.backward_s,
            f"replica: weights_s {stage.weights_s} of backward_s {stage.backward_s}",
        )
        need(
            most_held >= stage.window,
            f"replica: most_held {most_held}, need at least the window {stage.window}",
        )


def _held(replica: ReplicaPlan, num_layers: int) -> list[tuple[int, int]]:
    """Return first layer and number of layers that each stage has to hold."""
    if replica.cuts:
        firsts = [0, *map(floor, replica.cuts)]
        ends = [*map(ceil, replica.cuts), num_layers]
        return [(first, end - first) for first, end in zip(firsts, ends, strict=True)]
    held = []
    first = 0
    for stage in replica.stages[:-1]:
        held.append((first, stage.num_layers))
        first += stage.num_layers
    return [*held, (first, num_layers - first)]


def plan_sha(plan: Plan) -> str:
    """Hash of what every rank must agree on: ranks, replicas, recipe (time of creation left out). 64 hex digits."""
    fixed = asdict(replace(plan, created="", even_split=None, verdict="", runner_up=""))
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
