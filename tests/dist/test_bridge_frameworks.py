"""What is written for torch.distributed runs on the bridge unchanged, with the numbers of one flat gloo group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.dist.bridges import join_bridge
from tests.dist.ranks import run_ranks

pytestmark = pytest.mark.dist

ISLANDS = "aabb"
WIDTH = 96
STEPS = 3


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def batch(rank: int, step: int, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, WIDTH, generator=generator)


def train(net: nn.Module, rank: int, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = net(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def ddp(rank: int, _folder: Path) -> list[float]:
    return train(DistributedDataParallel(model(), bucket_cap_mb=0.05), rank)


def ddp_hooks(rank: int, _folder: Path) -> list[float]:
    net = DistributedDataParallel(model(), bucket_cap_mb=0.05)
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    losses = train(net, rank)
    # Its callbacks wait for further operations; with several buckets nobody orders these among ranks.
    net = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return losses + train(net, rank)


def join_uneven(rank: int, _folder: Path) -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    losses = []
    with Join([net, optimizer]):
        for step in range(2 + rank):
            optimizer.zero_grad()
            loss = net(batch(rank, step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def fsdp(rank: int, folder: Path) -> list[float]:
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    for part in net.modules():
        if hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_force_sum_reduction_for_comms(True)
    losses = train(net, rank)
    state = net.state_dict()
    checkpoint.save(state, checkpoint_id=folder / "dcp")
    before = {name: value.full_tensor().clone() for name, value in state.items()}
    for value in state.values():
        value.to_local().zero_()
    checkpoint.load(state, checkpoint_id=folder / "dcp")
    assert all(torch.equal(value.full_tensor(), before[name]) for name, value in state.items())
    return losses


def hsdp(rank: int, _folder: Path) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))
    net = model()
    fully_shard(net, mesh=mesh)
    net.set_force_sum_reduction_for_comms(True)
    return train(net, rank)


def tensor_parallel(rank: int, _folder: Path) -> list[float]:
    mesh = init_device_mesh("cpu", (4,))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = train(net, 0)
    whole = torch.arange(64.0).view(8, 8)
    shard = distribute_tensor(whole, init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])
    assert torch.equal(shard.full_tensor(), whole)
    moved = shard.redistribute(placements=[Shard(1), Replicate()])
    assert isinstance(moved, DTensor)
    assert torch.equal(moved.full_tensor(), whole)
    return losses


def pipeline(rank: int, _folder: Path) -> list[float]:
    torch.manual_seed(rank)
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 4, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 8, loss_fn=lambda out, target: (out - target).square().mean())
    rows = batch(0, 0, rows=16)
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(rows)
    elif rank == 3:
        schedule.step(target=rows, losses=losses)
    else:
        schedule.step()
    gradient = next(stage.submod.parameters()).grad
    assert gradient is not None
    return [*(float(loss) for loss in losses), float(gradient.square().sum())]


def functionals(rank: int, _folder: Path) -> list[float]:
    tensor = batch(rank, 0)
    group = dist.group.WORLD
    got = [
        functional.all_reduce(tensor, "sum", group),
        functional.all_gather_tensor(tensor, 0, group),
        functional.reduce_scatter_tensor(tensor, "sum", 0, group),
        functional.all_to_all_single(tensor, None, None, group),
        functional.broadcast(tensor, 2, group),
        *functional.all_reduce_coalesced([tensor, tensor + 1], "sum", group),
        *functional.all_gather_into_tensor_coalesced([tensor, tensor + 1], group),
        *functional.reduce_scatter_tensor_coalesced([tensor, tensor + 1], "sum", [0, 0], group),
    ]
    return [float((one * torch.arange(one.numel()).view(one.shape)).sum()) for one in got]


JOBS: tuple[Callable[[int, Path], list[float]], ...] = (
    ddp,
    ddp_hooks,
    join_uneven,
    fsdp,
    hsdp,
    tensor_parallel,
    pipeline,
    functionals,
)


def everything(rank: int, store_path: Path, backend: str, folder: Path) -> dict[str, Any]:
    if backend == "het":
        join_bridge(rank, store_path, ISLANDS)
    else:
        torch.set_num_threads(1)
        store = dist.FileStore(str(store_path), len(ISLANDS))
        dist.init_process_group(backend, store=store, rank=rank, world_size=len(ISLANDS))
    (folder / backend).mkdir(exist_ok=True)
    answers = {job.__name__: job(rank, folder / backend) for job in JOBS}
    assert dist.get_backend() == backend
    dist.barrier()
    dist.destroy_process_group()
    return answers


def test_frameworks_give_the_numbers_of_a_flat_group(tmp_path: Path) -> None:
    bridged, flat = (
        run_ranks(everything, len(ISLANDS), tmp_path, backend, tmp_path)
        for backend in ("het", "gloo")
    )
    for one, other in zip(bridged, flat, strict=True):
        for name, numbers in one.items():
            assert numbers == pytest.approx(other[name], rel=1e-4), name
