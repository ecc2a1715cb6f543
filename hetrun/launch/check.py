"""What must hold in a plan before anything is started: plan.json is text that a person may have edited.

That it is fast is the planner's claim; that its parts fit together is checked here, without facts or profile.
"""

from __future__ import annotations

import re

from hetrun.errors import ConfigError
from hetrun.launch.files import ranks_by_host
from hetrun.model import Plan, RankPlan, ReplicaPlan, StagePlan
from hetrun.model.base import ENV_NAME
from hetrun.schedule import lane_ranks
from hetrun.schedule.shares import SHARED_FAMILIES, check_tp

_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_DEVICE = re.compile(r"[a-z][a-z0-9_]*")
# torchrun gives each rank its own; one value for all would make two ranks believe that they are the same.
_OF_TORCHRUN = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def check_plan(plan: Plan) -> None:
    """Refuse a plan whose parts contradict each other, before it hangs or trains something else.

    Raises:
        ConfigError: names the rank, replica or host, what it says and what it must say.
    """
    ranks_by_host(plan)
    held = [rank for replica in plan.split.replicas for s in replica.stages for rank in s.ranks]
    _need(
        sorted(held) == list(range(len(plan.split.ranks))),
        f"stages hold ranks {_short(sorted(held))}, need each of 0 to {len(plan.split.ranks) - 1} once",
    )
    first_row = 0
    for number, replica in enumerate(plan.split.replicas):
        _need(
            replica.first_row == first_row,
            f"replica {number}: first_row {replica.first_row}, need {first_row}",
        )
        first_row += replica.num_rows
        _check_replica(number, replica, plan)
    for spec in plan.hosts:
        _check_env(f"host {spec.name}: env", spec.env)
    _check_env(
        "recipe: launch.env", dict.fromkeys((*plan.recipe.launch.env, *plan.recipe.launch.secrets))
    )
    _check_ranks(plan)


def _check_replica(number: int, replica: ReplicaPlan, plan: Plan) -> None:
    last = len(replica.stages) - 1
    for index, stage in enumerate(replica.stages):
        where = f"replica {number}, stage {index}"
        for what, found, need in (
            ("has_embedding", stage.has_embedding, index == 0),
            ("has_head", stage.has_head, index == last),
        ):
            _need(found is need, f"{where}: {what} {found}, need {need}")
        _check_sharing(where, stage, plan)
        for rank in stage.ranks:
            said = plan.split.ranks[rank]
            _need(
                (said.replica, said.stage) == (number, index),
                f"rank {rank}: says replica {said.replica}, stage {said.stage}, is held by {where}",
            )


def _check_sharing(where: str, stage: StagePlan, plan: Plan) -> None:
    """Ranks that share layers must be on one host and divide the layers evenly."""
    model = plan.recipe.model
    for lane in lane_ranks(stage):
        hosts = sorted({plan.split.ranks[rank].host for rank in lane})
        _need(len(hosts) == 1, f"{where}: ranks {_short(list(lane))} share layers, on {hosts}")
        _need(
            list(lane) == sorted(set(lane)), f"{where}: ranks {_short(list(lane))} are not in order"
        )
        if len(lane) > 1 and model.config is not None and model.family not in SHARED_FAMILIES:
            raise ConfigError(
                f"{where}: {len(lane)} ranks share layers of transformers' {model.family}, need one each",
                hint="set plan.tp to [1] in the recipe, and plan again",
            )
        if len(lane) > 1:
            check_tp(model, len(lane))


def _check_ranks(plan: Plan) -> None:
    seats: dict[tuple[str, int], int] = {}
    places: dict[str, int] = {}
    for rank in plan.split.ranks:
        who = f"rank {rank.rank}"
        other = seats.setdefault((rank.host, rank.device_index), rank.rank)
        _need(
            other == rank.rank,
            f"{who}: device {rank.host}/{rank.device_index} is that of rank {other} already",
        )
        place = places.setdefault(rank.host, 0)
        _need(rank.local_rank == place, f"{who}: local_rank {rank.local_rank}, need {place}")
        places[rank.host] += 1
        _need(rank.num_threads >= 1, f"{who}: num_threads {rank.num_threads}, need at least 1")
        _check_names(who, rank)


def _check_names(who: str, rank: RankPlan) -> None:
    """Words that a rank imports or sets must be plain names."""
    for what, value, pattern in (
        ("torch_device", rank.torch_device, _DEVICE),
        ("torch_plugin", rank.torch_plugin, _MODULE),
        ("visible_env", rank.visible_env, ENV_NAME),
        *(("env", name, ENV_NAME) for name in rank.env),
    ):
        _need(
            value is None or bool(pattern.fullmatch(value)), f"{who}: {what} {value!r} is no name"
        )
    _check_env(f"{who}: env", rank.env)


def _check_env(where: str, names: dict[str, str] | dict[str, None]) -> None:
    taken = sorted(_OF_TORCHRUN & set(names))
    if taken:
        raise ConfigError(
            f"{where}: {taken[0]} is set by torchrun, rank by rank",
            hint=f"take {taken[0]} out; `data_addr` of the first host is where ranks meet",
        )


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"plan: {message}", hint="write it again: hetrun plan")


def _short(numbers: list[int]) -> str:
    """At most ten of the numbers."""
    return f"{numbers[:10]}".replace("]", ", ...]" if numbers[10:] else "]")
