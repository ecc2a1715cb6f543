"""Made-up clusters for the planner's tests: facts, profile and recipe from a few numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import log2

from hetrun import arch
from hetrun.model import (
    GIB,
    Connection,
    DataSpec,
    Device,
    DeviceProfile,
    Dtype,
    EmulatedChip,
    Facts,
    HostFacts,
    HostSpec,
    Link,
    LinkKind,
    ModelSpec,
    Order,
    Plan,
    PlanLimits,
    Profile,
    Quantity,
    Recipe,
    RowTiming,
    RunTiming,
    Source,
    TrainSpec,
)
from hetrun.planner import TorchTarget, plan

MODEL = ModelSpec(
    num_layers=10, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=176, vocab_size=257
)
LINKS = (
    Link(kind=LinkKind.INSIDE_HOST, latency_s=1e-5, bytes_per_s=25e9),
    Link(kind=LinkKind.INSIDE_ISLAND, latency_s=2e-5, bytes_per_s=6e9),
    Link(kind=LinkKind.ACROSS, latency_s=5e-5, bytes_per_s=1.25e9),
)
WHOLE = PlanLimits(orders=(Order.ONE_F_ONE_B,), fractional=False)  # 1F1B over whole layers
FREE_LINKS = tuple(replace(link, latency_s=0.0, bytes_per_s=1e30) for link in LINKS)


@dataclass(frozen=True, kw_only=True)
class Chips:
    """Devices of one vendor; `layer_s` overrides the seconds that FLOPs suggest (forward a third of it)."""

    vendor: str
    num_devices: int
    gflops: float = 1.0
    memory: float | None = 16 * GIB
    per_host: int = 2
    layer_s: float | None = (
        None  # of one row, forward and backward; embedding and head cost nothing then
    )
    emulated: bool = True
    tp_share: float = (
        0.9  # of their summed speed that two devices sharing a layer reach; 4: squared
    )


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A cluster and a recipe."""

    chips: Sequence[Chips]
    model: ModelSpec = MODEL
    batch: int = 48
    rows: tuple[int, ...] = (1, 2, 4)
    seq_len: int = 64
    links: tuple[Link, ...] = LINKS
    dtype: Dtype = Dtype.FP32
    limits: PlanLimits = field(default_factory=PlanLimits)

    @property
    def facts(self) -> Facts:
        """What probe would say."""
        hosts = []
        for chips in self.chips:
            done = 0
            while done < chips.num_devices:
                count = min(chips.per_host, chips.num_devices - done)
                hosts.append(self._host(chips, f"{chips.vendor}-{done // chips.per_host}", count))
                done += count
        return Facts(created="", inventory="lab", hosts=tuple(hosts), links=self.links)

    def _host(self, chips: Chips, name: str, count: int) -> HostFacts:
        chip = EmulatedChip(
            vendor=chips.vendor,
            model=f"{chips.vendor}-chip",
            num_devices=count,
            flops_per_s=chips.gflops * 1e9,
            memory_bytes=int(chips.memory or GIB),
        )
        devices = tuple(
            Device(
                index=index,
                vendor=chips.vendor,
                model=chip.model,
                memory=Quantity(value=chips.memory, source=Source.MODELLED),
                vendor_index=index,
                uuid=f"{name}-{index}",
                emulated=chip if chips.emulated else None,
            )
            for index in range(count)
        )
        return HostFacts(spec=HostSpec(name=name, connection=Connection.LOCAL), devices=devices)

    @property
    def profile(self) -> Profile:
        """What profile would say."""
        return Profile(
            created="",
            recipe="lab",
            model=self.model,
            seq_len=self.seq_len,
            devices=tuple(self._figures(chips) for chips in self.chips),
            links=self.links,
        )

    def _figures(self, chips: Chips) -> DeviceProfile:
        speed = chips.gflops * 1e9
        timings = []
        choices = (False, True)[: 1 + self.limits.recompute]
        for tp, recompute, rows in product(sorted(self.limits.tp), choices, self.rows):
            each_s = [
                arch.run_forward_flops(run, rows, self.seq_len) / speed
                for run in arch.layer_runs(self.model)
            ]
            head_s = arch.head_forward_flops(self.model, rows, self.seq_len) / speed
            if chips.layer_s is not None:
                each_s, head_s = [chips.layer_s * rows / 3 for _ in each_s], 0.0
            each_s = [layer_s / (tp * chips.tp_share ** log2(tp)) for layer_s in each_s]
            runs = tuple(
                RunTiming(
                    num_layers=run.num_layers,
                    forward_s=layer_s,
                    backward_s=(3 if recompute else 2) * layer_s,
                )
                for run, layer_s in zip(arch.layer_runs(self.model), each_s, strict=True)
            )
            layer_s = each_s[0]
            if len(runs) > 1:
                whole_s = sum(run.num_layers * run.forward_s for run in runs)
                layer_s = whole_s / self.model.num_layers
            timings.append(
                RowTiming(
                    rows=rows,
                    layer_forward_s=layer_s,
                    layer_backward_s=(3 if recompute else 2) * layer_s,
                    embedding_forward_s=0.0,
                    embedding_backward_s=0.0,
                    head_forward_s=head_s,
                    head_backward_s=2 * head_s,
                    tp=tp,
                    recompute=recompute,
                    runs=runs if len(runs) > 1 else (),
                    layer_weights_s=layer_s if len(runs) == 1 else None,
                    head_weights_s=head_s,
                )
            )
        return DeviceProfile(
            vendor=chips.vendor,
            model=f"{chips.vendor}-chip",
            hosts=(),
            source=Source.MODELLED,
            timings=tuple(timings),
            optimizer_s_per_parameter=0.0 if chips.layer_s is not None else 10 / speed,
            matmul_flops_per_s=Quantity(value=speed, source=Source.MODELLED),
            copy_bytes_per_s=Quantity(value=None, source=Source.ASSUMED),
        )

    @property
    def recipe(self) -> Recipe:
        """What to train."""
        return Recipe(
            name="lab",
            model=self.model,
            data=DataSpec(seq_len=self.seq_len),
            train=TrainSpec(
                steps=1,
                global_batch_rows=self.batch,
                microbatch_rows=self.rows,
                dtype=self.dtype,
            ),
            plan=self.limits,
        )

    def plan(self, targets: Mapping[str, TorchTarget] | None = None) -> Plan:
        """What the planner says."""
        return plan(self.facts, self.profile, self.recipe, targets=targets or {})


def small_model(num_layers: int, vocab_size: int = 32) -> ModelSpec:
    """A model whose layers weigh little."""
    return ModelSpec(
        num_layers=num_layers, hidden_size=32, num_heads=2, ffn_size=64, vocab_size=vocab_size
    )
