"""What must hold for every plan, proved from the files alone. The second evaluator is in `recost.py`.

A plan that fails here is our bug, so all of it raises ValueError.
"""

from __future__ import annotations

from hetrun.model import Facts, Order, Profile, RankPlan, Recipe, ReplicaPlan, Split
from hetrun.planner.recost import recost
from hetrun.planner.reweigh import Reweigh

TOLERANCE = 1e-9


def check_split(split: Split, facts: Facts, profile: Profile, recipe: Recipe) -> None:
    """Prove that a split is whole, fits, sits on devices that exist, and holds and costs what it says.

    Raises:
        ValueError: it does not; says which rank, stage or figure.
    """
    _check_ranks(split, facts)
    _check_rows(split, recipe)
    for number, replica in enumerate(split.replicas):
        _check_replica(number, replica, split.ranks, recipe)
    _check_memory(split, recipe)
    step_s = recost(split, profile, recipe)
    if abs(step_s - split.cost.step_s) > TOLERANCE * max(step_s, split.cost.step_s):
        raise ValueError(f"plan says {split.cost.step_s} s per step, evaluated anew {step_s} s")


def _check_ranks(split: Split, facts: Facts) -> None:
    """Every rank drives its own existing device and stands in exactly one stage; hosts are contiguous."""
    devices = {
        (host.spec.name, device.index): device
        for host in facts.hosts
        if host.error is None
        for device in host.devices
    }
    taken: set[tuple[str, int]] = set()
    done_hosts: set[str] = set()
    previous: RankPlan | None = None
    for index, rank in enumerate(split.ranks):
        seat = (rank.host, rank.device_index)
        _need(rank.rank == index, f"rank {rank.rank} at place {index}")
        _need(seat in devices, f"rank {index}: no device {rank.host}/{rank.device_index}")
        _need(devices[seat].vendor == rank.vendor, f"rank {index}: {seat} is not {rank.vendor}")
        _need(seat not in taken, f"rank {index}: {seat} is taken twice")
        taken.add(seat)
        if previous is not None and previous.host == rank.host:
            _need(rank.local_rank == previous.local_rank + 1, f"rank {index}: local rank gap")
        else:
            _need(rank.local_rank == 0, f"rank {index}: first of {rank.host}, local rank not 0")
            _need(rank.host not in done_hosts, f"rank {index}: {rank.host} is split up")
            done_hosts.add(rank.host)
        previous = rank
    held = [rank for replica in split.replicas for s in replica.stages for rank in s.ranks]
    _need(sorted(held) == list(range(len(split.ranks))), f"stages hold ranks {sorted(held)}")


def _check_rows(split: Split, recipe: Recipe) -> None:
    """Replicas take consecutive rows that add up to the batch, in allowed microbatches."""
    first_row = 0
    for number, replica in enumerate(split.replicas):
        _need(replica.first_row == first_row, f"replica {number}: first row {replica.first_row}")
        allowed = replica.microbatch_rows in recipe.train.microbatch_rows
        _need(allowed, f"replica {number}: microbatches of {replica.microbatch_rows} rows")
        first_row += replica.microbatch_rows * replica.num_microbatches
    _need(first_row == recipe.train.global_batch_rows, f"replicas take {first_row} rows")


def _check_replica(
    number: int, replica: ReplicaPlan, ranks: tuple[RankPlan, ...], recipe: Recipe
) -> None:
    """Each layer once and in order, embedding first, head last, memory kept, windows that cannot stall."""
    stages = replica.stages
    _check_layers(number, replica, recipe.model.num_layers)
    _check_bounds(number, replica)
    for index, stage in enumerate(stages):
        name = f"replica {number} stage {index}"
        _need(stage.has_embedding == (index == 0), f"{name}: embedding")
        _need(stage.has_head == (index == len(stages) - 1), f"{name}: head")
        limit = stage.memory_limit_bytes
        _need(limit is None or stage.memory_bytes <= limit, f"{name}: {stage.memory_bytes} bytes")
        for rank in stage.ranks:
            place = (ranks[rank].replica, ranks[rank].stage)
            _need(place == (number, index), f"{name}: rank {rank} says {place}")
        _need(stage.lanes in recipe.plan.lanes, f"{name}: {stage.lanes} lanes")
        _need(len({ranks[rank].vendor for rank in stage.ranks}) == 1, f"{name}: mixes vendors")
        tp = len(stage.ranks) // stage.lanes
        for lane in range(stage.lanes):
            hosts = {ranks[rank].host for rank in stage.ranks[lane * tp : (lane + 1) * tp]}
            _need(len(hosts) == 1, f"{name}: lane {lane} shares layers between {sorted(hosts)}")


def _check_memory(split: Split, recipe: Recipe) -> None:
    """Every stage says the bytes that a second count finds, and all replicas share out their updates alike."""
    zeros = {replica.zero for replica in split.replicas}
    _need(len(zeros) == 1 and zeros <= {0, *recipe.plan.zero}, f"zero {sorted(zeros)}")
    weights = Reweigh(split, recipe)
    for number, replica in enumerate(split.replicas):
        for index, stage in enumerate(replica.stages):
            found = weights.num_bytes(replica, stage)
            said = stage.memory_bytes
            _need(found == said, f"replica {number} stage {index}: {said} bytes, are {found}")


def _check_layers(number: int, replica: ReplicaPlan, num_layers: int) -> None:
    """Stages hold all layers in order; two neighbours share one where the cut between them is no whole number."""
    end = 0
    for index, stage in enumerate(replica.stages):
        shared = bool(index and replica.cuts and replica.cuts[index - 1] % 1)
        first = end - shared
        name = f"replica {number} stage {index}"
        _need(stage.first_layer == first, f"{name}: first layer {stage.first_layer}, need {first}")
        _need(stage.num_layers > 0 or not replica.cuts, f"{name}: cut to nothing")
        end = first + stage.num_layers
        if replica.cuts and index < len(replica.cuts):
            whole = replica.cuts[index] <= end < replica.cuts[index] + 1
            _need(whole, f"{name}: ends at layer {end}, its cut is {replica.cuts[index]}")
    _need(end == num_layers, f"replica {number}: holds {end} layers")


def _check_bounds(number: int, replica: ReplicaPlan) -> None:
    """Windows and the microbatches held until W are those that the order allows; no recomputed layer puts off its W."""
    strict = replica.order is Order.ONE_F_ONE_B and not replica.cuts
    strict = strict and all(stage.lanes == 1 for stage in replica.stages)
    before = replica.num_microbatches
    for index, stage in enumerate(replica.stages):
        name = f"replica {number} stage {index}"
        _need(
            not strict or stage.window <= before,
            f"{name}: window {stage.window}, wider than upstream",
        )
        before = stage.window
        splits = replica.order is Order.ZERO_BUBBLE
        held = stage.most_held
        _need(
            (held is not None) == splits,
            f"{name}: holds {held} until W, order {replica.order.value}",
        )
        _need(held is None or held >= stage.window, f"{name}: holds {held}, window {stage.window}")
        _need(not (splits and stage.recompute), f"{name}: recomputes and puts off W")


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"plan: {message}")
