"""Messages over a cut: held only as long as needed, and refused when they are not what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetrun.model import Order, Plan
from hetrun.runtime import boundary, groups
from hetrun.runtime.boundary import Receiver, Route, Sender
from hetrun.runtime.trainer import per_valid_token
from tests.dist.plans import Pipeline, make_plan
from tests.dist.ranks import RankFailedError, run_ranks
from tests.dist.training import train_rank

pytestmark = pytest.mark.dist


class CountingSender(Sender):
    """Notes how many messages are in flight after each send."""

    most = 0

    def send(self, microbatch: int, tensor: torch.Tensor, *, when_s: float) -> None:
        super().send(microbatch, tensor, when_s=when_s)
        CountingSender.most = max(CountingSender.most, len(self._pending))


def _most_in_flight(rank: int, store_path: Path, plan: Plan) -> int:
    setattr(groups, "Sender", CountingSender)  # noqa: B010 - groups does not export it
    train_rank(rank, store_path, plan, False, per_valid_token)
    return CountingSender.most


def test_messages_in_flight_are_bounded_by_the_window_not_by_the_step(tmp_path: Path) -> None:
    plan = make_plan((Pipeline((3, 3, 2), 1, 40),), steps=1)
    windows = [stage.window for stage in plan.split.replicas[0].stages]
    most = run_ranks(_most_in_flight, 3, tmp_path, plan)
    assert most[0] <= windows[0]
    assert most[1] <= windows[0]  # gradients to the first stage, activations to the last
    assert most[2] <= windows[1]
    assert min(most) >= 1


def test_messages_in_flight_stay_bounded_with_lanes_and_zero_bubble(tmp_path: Path) -> None:
    pipeline = Pipeline((3, 2, 3), 1, 48, order=Order.ZERO_BUBBLE, lanes=(2, 1, 3), more_window=1)
    plan = make_plan((pipeline,), steps=1)
    windows = [stage.window for stage in plan.split.replicas[0].stages]
    most = run_ranks(_most_in_flight, 6, tmp_path, plan)  # of one route
    assert max(most[:2]) <= windows[0]
    assert most[2] <= max(windows[0], windows[1])
    assert max(most[3:]) <= windows[1]
    assert min(most) >= 1


def _exchange(rank: int, store_path: Path, shapes: list[tuple[int, ...]], ahead: int) -> Any:
    store = dist.FileStore(str(store_path), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    route = Route(group, 1 - rank, "activation", shapes[rank], torch.float32, torch.device("cpu"))
    count = 2 * ahead + 1
    if rank == 0:
        sender = Sender(route)
        for number in range(count):
            sender.send(number, torch.full(shapes[0], 1.0 * number), when_s=0.25 * number)
        sender.finish()
        return None
    receiver = Receiver(route)
    receiver.start_step(range(count))
    received = [receiver.receive(number) for number in range(count)]
    return [(tensor.flatten().tolist(), when_s) for tensor, when_s in received]


def test_tensor_and_time_arrive_in_order_however_many(tmp_path: Path) -> None:
    ahead = boundary.RECEIVE_AHEAD
    _, received = run_ranks(_exchange, 2, tmp_path, [(2, 3), (2, 3)], ahead)
    assert received == [([1.0 * n] * 6, 0.25 * n) for n in range(2 * ahead + 1)]


def test_message_of_another_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="message from rank 0 says"):
        run_ranks(_mismatch, 2, tmp_path)


def _mismatch(rank: int, store_path: Path) -> None:
    store = dist.FileStore(str(store_path), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    if rank == 0:  # as many bytes, other numbers
        route = Route(group, 1, "activation", (4,), torch.float32, torch.device("cpu"))
        sender = Sender(route)
        sender.send(0, torch.ones(4), when_s=0.0)
        sender.finish()
        return
    route = Route(group, 0, "activation", (2,), torch.float64, torch.device("cpu"))
    receiver = Receiver(route)
    receiver.start_step([0])
    receiver.receive(0)
