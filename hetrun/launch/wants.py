"""What each host of a plan must have for its part. Looking whether it has it is left to `hetrun/preflight/`."""

from __future__ import annotations

from hetrun.arch import embedding_parameters, head_parameters, layers_parameters
from hetrun.launch.files import ranks_by_host, read_by_ranks
from hetrun.model import Plan, RankPlan
from hetrun.preflight import SavedState, Wants
from hetrun.vendors import all_vendors

_SAVED_BYTES = 12  # of one parameter: fp32 value and two moments


def wants_of(plan: Plan) -> tuple[Wants, ...]:
    """Return what preflight has to look for, host by host in the order of the plan."""
    readable = read_by_ranks(plan.recipe)
    return tuple(_wants(plan, host, ranks, readable) for host, ranks in ranks_by_host(plan).items())


def _wants(plan: Plan, host: str, ranks: tuple[RankPlan, ...], readable: tuple[str, ...]) -> Wants:
    spec = next(spec for spec in plan.hosts if spec.name == host)
    devices = {rank.torch_device for rank in ranks if not rank.emulated} - {"cpu"}
    plugins = {rank.torch_plugin for rank in ranks if rank.torch_plugin is not None}
    vendors = [all_vendors().get(name) for name in sorted({rank.vendor for rank in ranks})]
    one_kind = devices.pop() if len(devices) == 1 else None
    return Wants(
        spec=spec,
        import_torch=one_kind is not None or bool(plugins),
        device=one_kind,
        num_devices=_num_devices(ranks),
        plugins=tuple(sorted(plugins)),
        nodes=tuple(node for vendor in vendors if vendor for node in vendor.device_nodes),
        readable=readable,
        num_ranks=len(ranks),
        saves=_saves(plan, ranks),
    )


def _num_devices(ranks: tuple[RankPlan, ...]) -> int:
    """How many devices torch has to see for the ranks' numbers to mean something.

    One where they are selected by other ids: of the slices of a device torch sees one at a time.
    """
    ids = [str(rank.device_index) if rank.visible_id is None else rank.visible_id for rank in ranks]
    is_numbered = len({rank.vendor for rank in ranks}) == 1 and all(map(str.isdecimal, ids))
    return 1 + max(map(int, ids)) if is_numbered else 1


def _saves(plan: Plan, ranks: tuple[RankPlan, ...]) -> SavedState | None:
    checkpoint = plan.recipe.checkpoint
    if checkpoint is None:
        return None
    model = plan.recipe.model
    pieces = {(rank.replica, rank.stage) for rank in ranks}
    total = 0
    for replica, index in pieces:
        stage = plan.split.replicas[replica].stages[index]
        total += layers_parameters(model, stage.first_layer, stage.first_layer + stage.num_layers)
        total += embedding_parameters(model) if stage.has_embedding else 0
        total += head_parameters(model) if stage.has_head else 0
    # the new one is whole before the oldest one goes
    return SavedState(
        dir=checkpoint.dir,
        num_bytes=total * _SAVED_BYTES * (checkpoint.keep + 1),
        shared=checkpoint.shared,
    )
