"""Measures one real device with the very modules that train on it. Which devices, and the answer's file, are left to `bench.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hetrun.errors import JobError
from hetrun.model import ModelSpec, Quantity, RowTiming, Source, StagePlan
from hetrun.runtime.bench import BenchDevice, BenchRequest, BenchResult
from hetrun.runtime.device import TORCH_DTYPE, open_device, synchronize
from hetrun.runtime.network import Stage, summed_loss

WARM_UP = 3
MIN_REPEATS = 5
MAX_REPEATS = 30
BUDGET_S = 1.5  # of repeats for one figure, once there are MIN_REPEATS
_MATMUL_SIZE = {"cpu": 1024}
_MATMUL_SIZE_OF_ACCELERATORS = 8192
_COPY_BYTES = {"cpu": 64 << 20}
_COPY_BYTES_OF_ACCELERATORS = 1 << 30

Timed = Callable[[], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Repeats:
    """Medians of the parts of a repeated action, and (slowest - fastest) / median of their sum."""

    medians_s: tuple[float, ...]
    spread: float


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A device and what to measure on it."""

    request: BenchRequest
    device: torch.device

    def timing(self, rows: int) -> RowTiming:
        """One layer, the embedding, and the head with its loss, each forward and backward."""
        model = self.request.model
        tokens_BT = torch.randint(model.vocab_size, (rows, self.request.seq_len))
        tokens_BT = tokens_BT.to(self.device)
        hidden_BTH = torch.randn(rows, self.request.seq_len, model.hidden_size)
        hidden_BTH = hidden_BTH.to(self.device, TORCH_DTYPE[self.request.dtype])
        layer = self._forward_backward(self.stage(num_layers=1), hidden_BTH, None)
        embedding = self._forward_backward(self.stage(has_embedding=True), tokens_BT, None)
        head = self._forward_backward(self.stage(has_head=True), hidden_BTH, tokens_BT)
        return RowTiming(
            rows=rows,
            layer_forward_s=layer.medians_s[0],
            layer_backward_s=layer.medians_s[1],
            embedding_forward_s=embedding.medians_s[0],
            embedding_backward_s=embedding.medians_s[1],
            head_forward_s=head.medians_s[0],
            head_backward_s=head.medians_s[1],
            spread=layer.spread,
        )

    def optimizer_s_per_parameter(self) -> float:
        """AdamW on one layer."""
        stage = self.stage(num_layers=1)
        for parameter in stage.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-6)
        num_parameters = sum(parameter.numel() for parameter in stage.parameters())
        return self._seconds(optimizer.step) / num_parameters

    def matmul_flops_per_s(self) -> float:
        """Best this device does on a large square product."""
        size = _MATMUL_SIZE.get(self.device.type, _MATMUL_SIZE_OF_ACCELERATORS)
        dtype = TORCH_DTYPE[self.request.dtype]
        matrix = torch.randn(size, size).to(self.device, dtype)
        out = torch.empty_like(matrix)
        return 2.0 * size**3 / self._seconds(lambda: torch.matmul(matrix, matrix, out=out))

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written per second by a copy inside the device's memory."""
        size = _COPY_BYTES.get(self.device.type, _COPY_BYTES_OF_ACCELERATORS)
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2.0 * size / self._seconds(lambda: target.copy_(source))

    def stage(
        self, *, num_layers: int = 0, has_embedding: bool = False, has_head: bool = False
    ) -> Stage:
        """A part of the model, as the worker builds it."""
        part = StagePlan(
            ranks=(0,),
            first_layer=0,
            num_layers=num_layers,
            has_embedding=has_embedding,
            has_head=has_head,
            window=1,
            forward_s=0.0,
            backward_s=0.0,
            send_s=0.0,
            optimizer_s=0.0,
            memory_bytes=0,
            memory_limit_bytes=None,
        )
        model: ModelSpec = self.request.model
        return Stage(model, part, seq_len=self.request.seq_len).initialise(
            seed=0, device=self.device, dtype=TORCH_DTYPE[self.request.dtype]
        )

    def _forward_backward(self, stage: Stage, x: Tensor, targets_BT: Tensor | None) -> Repeats:
        x = x.detach().requires_grad_(x.is_floating_point())
        gradient: Tensor | None = None

        def once() -> tuple[float, float]:
            nonlocal gradient
            start_s = self._now_s()
            y = stage(x)
            if targets_BT is not None:
                y = summed_loss(y, targets_BT, torch.ones_like(targets_BT))
            middle_s = self._now_s()
            if gradient is None:  # in the first, unmeasured turn
                gradient = torch.ones_like(y)
            y.backward(gradient)
            return middle_s - start_s, self._now_s() - middle_s

        return repeat(once)

    def _seconds(self, action: Callable[[], object]) -> float:
        def once() -> tuple[float]:
            start_s = self._now_s()
            action()
            return (self._now_s() - start_s,)

        return repeat(once).medians_s[0]

    def _now_s(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def measured(request: BenchRequest, device: BenchDevice) -> BenchResult:
    """Figures of one real device, the only one of its kind that this process sees.

    Raises:
        PreflightError: torch does not see the device.
        JobError: a part of the model does not fit on it.
    """
    torch.set_num_threads(device.num_threads)
    bench = Bench(request, open_device(device.torch_device, device.torch_plugin))
    timings = []
    for rows in request.rows:
        try:
            timings.append(bench.timing(rows))
        except RuntimeError as error:
            if "OutOfMemory" not in type(error).__name__:
                raise
            raise JobError(
                f"{device.vendor} {device.model}: one layer of {rows} rows x {request.seq_len} tokens"
                " does not fit in its memory",
                hint="lower microbatch_rows or seq_len in the recipe",
            ) from error
    return BenchResult(
        vendor=device.vendor,
        model=device.model,
        source=Source.MEASURED,
        timings=tuple(timings),
        optimizer_s_per_parameter=bench.optimizer_s_per_parameter(),
        matmul_flops_per_s=Quantity(value=bench.matmul_flops_per_s(), source=Source.MEASURED),
        copy_bytes_per_s=Quantity(value=bench.copy_bytes_per_s(), source=Source.MEASURED),
    )


def torch_version() -> str:
    """Version of the torch that measured."""
    return str(torch.__version__)


def repeat(once: Timed) -> Repeats:
    """Run an action until its median is steady: a few unmeasured times, then 5 to 30 times."""
    for _ in range(WARM_UP):
        once()
    repeats: list[tuple[float, ...]] = []
    spent_s = 0.0
    while len(repeats) < MIN_REPEATS or (len(repeats) < MAX_REPEATS and spent_s < BUDGET_S):
        repeats.append(once())
        spent_s += sum(repeats[-1])
    sums = [sum(parts) for parts in repeats]
    return Repeats(
        medians_s=tuple(statistics.median(part) for part in zip(*repeats, strict=True)),
        spread=(max(sums) - min(sums)) / statistics.median(sums),
    )
