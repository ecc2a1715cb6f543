"""Measures one real device with the very modules that train on it. Which devices, and the answer's file, are left to `bench.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hetrun.arch import layer_runs
from hetrun.errors import JobError
from hetrun.model import (
    ModelSpec,
    Quantity,
    RowTiming,
    Source,
    StagePlan,
)
from hetrun.runtime.bench import BenchDevice, BenchRequest, BenchResult, CheckResult
from hetrun.runtime.deferred import DeferredWeights, accumulate_all
from hetrun.runtime.device import open_device, synchronize
from hetrun.runtime.hf_stage import build_stage
from hetrun.runtime.network import Stage, summed_loss
from hetrun.runtime.precision import Precision
from hetrun.runtime.repeats import Layers, Repeats, Timed, repeat
from hetrun.runtime.steadiness import finding
from hetrun.runtime.tensor_parallel import Share, share_layers

_MATMUL_SIZE = {"cpu": 1024}
_MATMUL_SIZE_OF_ACCELERATORS = 8192
_COPY_BYTES = {"cpu": 64 << 20}
_COPY_BYTES_OF_ACCELERATORS = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A device and what to measure on it; `findings` tells which repeats were not alike."""

    request: BenchRequest
    device: torch.device
    findings: list[str] = field(default_factory=list)
    precision: Precision = field(init=False)

    def __post_init__(self) -> None:
        precision = Precision(self.request.dtype, self.device)
        object.__setattr__(self, "precision", precision)

    def timings(self, rows: int) -> Iterator[RowTiming]:
        """One layer at each tp, stored and recomputed; embedding and head whole, so measured once for all."""
        plain = self.timing(rows)
        weights_s = plain.layer_weights_s
        for tp in self.request.tp:
            for recompute in (False, True)[: 1 + self.request.recompute]:
                if (tp, recompute) == (1, False):
                    yield plain
                    continue
                layers = self._layers(rows, tp=tp, recompute=recompute)
                if not recompute:
                    weights_s = self._layer_weights_s(rows, layers, tp=tp)
                found = replace(layers.put_into(plain), tp=tp, recompute=recompute)
                if weights_s is not None:
                    weights_s = min(weights_s, found.layer_backward_s)
                yield replace(found, layer_weights_s=weights_s)

    def timing(self, rows: int) -> RowTiming:
        """One layer, the embedding, and the head with its loss, each forward and backward."""
        model = self.request.model
        tokens_BT = torch.randint(model.vocab_size, (rows, self.request.seq_len))
        tokens_BT = tokens_BT.to(self.device)
        hidden_BTH = self._hidden(rows)
        layers = self._layers(rows)
        embedding = self._repeat(
            f"embedding of {rows} rows",
            self._forward_backward(self.stage(has_embedding=True), tokens_BT, None),
        )
        last = self.stage(has_head=True)
        head = self._repeat(
            f"head of {rows} rows", self._forward_backward(last, hidden_BTH, tokens_BT)
        )
        once = self._forward_backward(last, hidden_BTH, tokens_BT)
        timing = RowTiming(
            rows=rows,
            layer_forward_s=layers.mean_s(0),
            layer_backward_s=layers.mean_s(1),
            embedding_forward_s=embedding.medians_s[0],
            embedding_backward_s=embedding.medians_s[1],
            head_forward_s=head.medians_s[0],
            head_backward_s=head.medians_s[1],
            layer_weights_s=self._layer_weights_s(rows, layers),
            head_weights_s=self._weights_s(last, once, whole=head),
        )
        return layers.put_into(timing)

    def layer_s(self, rows: int) -> float:
        """Seconds of one layer, forward and backward: what equal devices are compared by."""
        layers = self._layers(rows)
        return layers.mean_s(0) + layers.mean_s(1)

    def optimizer_s_per_parameter(self) -> float:
        """AdamW on one layer."""
        stage = self.stage(num_layers=1)
        for parameter in stage.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-6)
        num_parameters = sum(parameter.numel() for parameter in stage.parameters())
        return self._seconds("optimizer", optimizer.step) / num_parameters

    def matmul_flops_per_s(self) -> float:
        """Best this device does on a large square product."""
        size = _MATMUL_SIZE.get(self.device.type, _MATMUL_SIZE_OF_ACCELERATORS)
        matrix = torch.randn(size, size).to(self.device, self.precision.activations)
        out = torch.empty_like(matrix)
        seconds = self._seconds("matmul", lambda: torch.matmul(matrix, matrix, out=out))
        return 2.0 * size**3 / seconds

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written per second by a copy inside the device's memory."""
        size = _COPY_BYTES.get(self.device.type, _COPY_BYTES_OF_ACCELERATORS)
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2.0 * size / self._seconds("copy", lambda: target.copy_(source))

    def stage(
        self,
        *,
        first_layer: int = 0,
        num_layers: int = 0,
        has_embedding: bool = False,
        has_head: bool = False,
        tp: int = 1,
    ) -> Stage:
        """A part of the model, as the worker builds it; with `tp`, one device's share of its layers.

        Raises:
            ConfigError: layers that transformers builds are to be shared.
        """
        part = StagePlan(
            ranks=(0,),
            first_layer=first_layer,
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
        stage = build_stage(model, part, seq_len=self.request.seq_len)
        share_layers(stage, Share(0, tp, None))
        stage.initialise(seed=0, device=self.device, dtype=self.precision.parameters)
        self.precision.prepare(stage)
        return stage

    def _hidden(self, rows: int) -> Tensor:
        hidden_BTH = torch.randn(rows, self.request.seq_len, self.request.model.hidden_size)
        return hidden_BTH.to(self.device, self.precision.activations)

    def _layers(self, rows: int, *, tp: int = 1, recompute: bool = False) -> Layers:
        """Time the first layer of each run of equal ones, and look at the memory of one more turn."""
        more = f", tp {tp}" * (tp > 1) + ", recomputed" * recompute
        found = []
        first = 0
        for run in layer_runs(self.request.model):
            stage, x = self.stage(first_layer=first, num_layers=1, tp=tp), self._hidden(rows)
            once = self._forward_backward(stage.layer_alone(x), x, None, recompute=recompute)
            layer = self._repeat(f"layer {first} of {rows} rows{more}", once)
            found.append((run, layer, self._peak_bytes(once)))
            first += run.num_layers
        return Layers(tuple(found))

    def _layer_weights_s(self, rows: int, layers: Layers, *, tp: int = 1) -> float | None:
        """As `_weights_s`; None where layers differ, since then nothing is put off."""
        if len(layers.runs) > 1:
            return None
        stage, x = self.stage(num_layers=1, tp=tp), self._hidden(rows)
        once = self._forward_backward(stage.layer_alone(x), x, None)
        return self._weights_s(stage, once, whole=layers.runs[0][1])

    def _weights_s(self, stage: Stage, both: Timed, *, whole: Repeats) -> float:
        """The part of a backward that only the weights' gradients need; `both` is a forward and backward of the stage.

        Both passes are timed as the engine runs them; the backward in one pass is shared out alike. So the parts add
        up to it, though two passes take a little longer than one.
        """
        deferred = DeferredWeights(stage, self.precision.arithmetic)

        def once() -> tuple[float, float]:
            _, first_s = both()
            start_s = self._now_s()
            accumulate_all(deferred.take())
            return first_s, self._now_s() - start_s

        with self.precision.step():
            first_s, second_s = repeat(once, quick=True).medians_s
        return whole.medians_s[1] * second_s / (first_s + second_s)

    def _peak_bytes(self, once: Timed) -> int | None:
        """Most bytes that one more turn takes above what is there; None where torch does not count them.

        Weights and their gradients are there by then, so what is seen are activations and temporaries.
        """
        backend = getattr(torch, self.device.type, None)
        wanted = ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated")
        if self.device.type == "cpu" or not all(hasattr(backend, name) for name in wanted):
            return None
        backend.reset_peak_memory_stats(self.device)  # type: ignore[union-attr]
        before = backend.memory_allocated(self.device)  # type: ignore[union-attr]
        once()
        return int(backend.max_memory_allocated(self.device) - before)  # type: ignore[union-attr]

    def _forward_backward(
        self,
        part: Callable[[Tensor], Tensor],
        x: Tensor,
        targets_BT: Tensor | None,
        *,
        recompute: bool = False,
    ) -> Timed:
        x = x.detach().requires_grad_(x.is_floating_point())
        gradient: Tensor | None = None

        def once() -> tuple[float, float]:
            nonlocal gradient
            start_s = self._now_s()
            with self.precision.arithmetic():
                if recompute:
                    y = checkpoint(part, x, use_reentrant=False, preserve_rng_state=False)
                else:
                    y = part(x)
            if targets_BT is not None:
                y = summed_loss(y, targets_BT, torch.ones_like(targets_BT))
            middle_s = self._now_s()
            if gradient is None:  # in the first, unmeasured turn
                gradient = torch.ones_like(y)
            y.backward(gradient)
            return middle_s - start_s, self._now_s() - middle_s

        return once

    def _seconds(self, what: str, action: Callable[[], object]) -> float:
        def once() -> tuple[float]:
            start_s = self._now_s()
            action()
            return (self._now_s() - start_s,)

        return self._repeat(what, once).medians_s[0]

    def _repeat(self, what: str, once: Timed) -> Repeats:
        with self.precision.step():  # as in training: matrices are cast once
            repeats = repeat(once, quick=self.request.quick)
        found = finding(what, repeats.sums_s)
        if found:
            self.findings.append(found)
        return repeats

    def _now_s(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def measured(request: BenchRequest, device: BenchDevice) -> BenchResult:
    """Figures of one real device, the only one of its kind that this process sees.

    Raises:
        PreflightError: torch does not see the device.
        ConfigError: the layer cannot be shared as the request wants.
        JobError: a part of the model does not fit on it.
    """
    bench = _open(request, device)
    timings: list[RowTiming] = []
    for rows in request.rows:
        with _told_if_too_large(request, device, rows):
            timings += bench.timings(rows)
    return BenchResult(
        vendor=device.vendor,
        model=device.model,
        source=Source.MEASURED,
        timings=tuple(sorted(timings, key=lambda item: (item.tp, item.recompute, item.rows))),
        optimizer_s_per_parameter=bench.optimizer_s_per_parameter(),
        matmul_flops_per_s=Quantity(value=bench.matmul_flops_per_s(), source=Source.MEASURED),
        copy_bytes_per_s=Quantity(value=bench.copy_bytes_per_s(), source=Source.MEASURED),
        warnings=tuple(bench.findings),
    )


def checked(request: BenchRequest, device: BenchDevice) -> CheckResult:
    """One product and one layer of the fewest rows: enough to see a device that is slower than its equals.

    Raises:
        PreflightError: torch does not see the device.
        JobError: one layer does not fit on it.
    """
    bench = _open(request, device)
    rows = min(request.rows)
    with _told_if_too_large(request, device, rows):
        layer_s = bench.layer_s(rows)
    return CheckResult(
        vendor=device.vendor,
        model=device.model,
        index=device.index,
        layer_s=layer_s,
        matmul_flops_per_s=bench.matmul_flops_per_s(),
    )


def _open(request: BenchRequest, device: BenchDevice) -> Bench:
    torch.set_num_threads(device.num_threads)
    return Bench(request, open_device(device.torch_device, device.torch_plugin))


@contextmanager
def _told_if_too_large(request: BenchRequest, device: BenchDevice, rows: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "OutOfMemory" not in type(error).__name__:
            raise
        raise JobError(
            f"{device.vendor} {device.model}: one layer of {rows} rows x {request.seq_len} tokens"
            " does not fit in its memory",
            hint="lower microbatch_rows or seq_len in the recipe",
        ) from error


def torch_version() -> str:
    """Version of the torch that measured."""
    return str(torch.__version__)
