"""What crosses a cut: activations one way, gradients the other, each message with the sender's time.

Messages go over gloo as bytes in host memory, so that any two devices understand each other. The order of
computing is left to `engine.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hetrun.errors import JobError

HEADER_BYTES = 64  # eight fp64; keeps the payload aligned for vector instructions
RECEIVE_AHEAD = 5  # receives posted before their messages are needed
_DTYPE_CODE = {torch.float64: 64.0, torch.float32: 32.0, torch.bfloat16: 16.0}


class PeerLostError(JobError):
    """Another rank did not send, take or add what the plan says; mostly since it ended first."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One direction of one cut: the group it uses, who is at the other end, and the shape of every message."""

    group: dist.ProcessGroup
    peer: int
    what: str  # "activation" or "gradient"
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty_message(self) -> Tensor:
        """Room for a header and one payload, in host memory."""
        size = HEADER_BYTES + torch.Size(self.shape).numel() * self.dtype.itemsize
        return torch.empty(size, dtype=torch.uint8)

    def payload(self, message: Tensor) -> Tensor:
        """The tensor inside a message, still in host memory."""
        return message[HEADER_BYTES:].view(self.dtype).view(self.shape)

    def header(self, message: Tensor) -> Tensor:
        """The eight numbers in front of it: time, microbatch, elements, dtype."""
        return message[:HEADER_BYTES].view(torch.float64)


class Sender:
    """Sends without waiting; messages stay alive until they are known to have arrived.

    One message goes to the ends of all routes, which differ in their peers alone; without routes nothing is sent.
    """

    def __init__(self, *routes: Route) -> None:
        self._routes = routes
        self._pending: deque[tuple[int, list[dist.Work], Tensor]] = deque()

    def send(self, microbatch: int, tensor: Tensor, *, when_s: float) -> None:
        """Start sending one tensor that is at the other end at `when_s` of modelled time."""
        if not self._routes:
            return
        route = self._routes[0]
        message = route.empty_message()
        route.payload(message).copy_(tensor.detach())
        header = route.header(message)
        header.zero_()
        header[:4] = torch.tensor(
            [when_s, microbatch, tensor.numel(), _DTYPE_CODE[tensor.dtype]], dtype=torch.float64
        )
        works: list[dist.Work] = []
        for to in self._routes:
            try:
                works.append(dist.isend(message, to.peer, group=to.group, tag=microbatch))
            except RuntimeError as error:
                raise _lost(to, microbatch, "take") from error
        self._pending.append((microbatch, works, message))

    def release(self, up_to: int) -> None:
        """Forget messages up to this microbatch, which the other end is known to have: no waiting in fact."""
        while self._pending and self._pending[0][0] <= up_to:
            self._finish_one()

    def keep(self, count: int) -> None:
        """Wait until at most `count` messages are under way."""
        while len(self._pending) > count:
            self._finish_one()

    def finish(self) -> None:
        """Wait for all messages; at the end of a step only."""
        self.keep(0)

    def _finish_one(self) -> None:
        microbatch, works, _message = self._pending.popleft()
        for route, work in zip(self._routes, works, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise _lost(route, microbatch, "take") from error


class Receiver:
    """Posts receives a few messages ahead, in the order in which the step needs them."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._order: deque[int] = deque()
        self._posted: deque[tuple[int, dist.Work, Tensor]] = deque()

    def start_step(self, order: Iterable[int]) -> None:
        """Post the first receives of a step."""
        self._order = deque(order)
        for _ in range(RECEIVE_AHEAD):
            self._post_next()

    def receive(self, microbatch: int) -> tuple[Tensor, float]:
        """Wait for one message: its tensor on the device, and when it was there in modelled time."""
        route = self._route
        posted, work, message = self._posted.popleft()
        try:
            work.wait()
        except RuntimeError as error:
            raise _lost(route, microbatch, "send") from error
        self._post_next()
        tensor = route.payload(message)
        when_s, *said = route.header(message)[:4].tolist()
        needed = [microbatch, tensor.numel(), _DTYPE_CODE[route.dtype]]
        if posted != microbatch or said != needed:
            raise RuntimeError(f"message from rank {route.peer} says {said}, need {needed}")
        return tensor.to(route.device), when_s

    def _post_next(self) -> None:
        if not self._order:
            return
        route = self._route
        microbatch = self._order.popleft()
        message = route.empty_message()
        try:
            work = dist.irecv(message, route.peer, group=route.group, tag=microbatch)
        except RuntimeError as error:
            raise _lost(route, microbatch, "send") from error
        self._posted.append((microbatch, work, message))


def _lost(route: Route, microbatch: int, verb: str) -> PeerLostError:
    return PeerLostError(
        f"rank {route.peer} did not {verb} the {route.what} of microbatch {microbatch}",
        hint="look at that rank's log first",
    )
