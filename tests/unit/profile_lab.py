"""Facts, answers of the bench and of pairs of hosts, as the tests of profile need them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from hetrun.errors import HetrunError
from hetrun.model import (
    CurvePoint,
    DataSpec,
    Device,
    Facts,
    HostFacts,
    HostSpec,
    Link,
    ModelSpec,
    Quantity,
    Recipe,
    Source,
    TrainSpec,
)
from hetrun.profile import devices, network
from hetrun.profile.bench import wanted_of
from hetrun.profile.collectives import Team, TeamResult
from hetrun.profile.pairs import PairResult

RECIPE = Recipe(
    name="tiny",
    model=ModelSpec(num_layers=2, hidden_size=16, num_heads=2, ffn_size=32, vocab_size=257),
    data=DataSpec(seq_len=8),
    train=TrainSpec(steps=1, global_batch_rows=4, microbatch_rows=(2, 1, 2)),
)
QUANTITY = {"value": 1.0, "source": "measured"}
WANTED = wanted_of(RECIPE)


def device(index: int, vendor: str, model: str = "m", **more: Any) -> Device:
    memory = Quantity(value=1.0, source=Source.MEASURED)
    return Device(index=index, vendor=vendor, model=model, memory=memory, **more)


def host(name: str, *devices: Device, spec: HostSpec | None = None, **more: Any) -> HostFacts:
    return HostFacts(spec=spec or HostSpec(name=name), devices=devices, num_cores=8, **more)


def facts(*hosts: HostFacts, declared: tuple[Link, ...] = ()) -> Facts:
    return Facts(created="", inventory="lab", hosts=hosts, links=declared)


def timing(rows: int) -> dict[str, float]:
    names = ["layer_forward_s", "layer_backward_s", "embedding_forward_s"]
    names += ["embedding_backward_s", "head_forward_s", "head_backward_s"]
    return {"rows": rows, **dict.fromkeys(names, 0.001)}


def bench(
    *measured: tuple[str, str],
    rows: Sequence[int] = (1, 2),
    checks: Sequence[dict[str, Any]] = (),
) -> dict[str, bytes]:
    entries = [
        {
            "vendor": vendor,
            "model": model,
            "source": "measured",
            "timings": [timing(row) for row in rows],
            "optimizer_s_per_parameter": 1e-9,
            "matmul_flops_per_s": QUANTITY,
            "copy_bytes_per_s": QUANTITY,
        }
        for vendor, model in measured
    ]
    answer = {"devices": entries, "checks": list(checks), "torch_version": None}
    return {"bench.json": json.dumps(answer).encode()}


def check(index: int, layer_s: float = 0.002) -> dict[str, Any]:
    return {
        "vendor": "nvidia",
        "model": "x",
        "index": index,
        "layer_s": layer_s,
        "matmul_flops_per_s": 1.0,
    }


TWO = facts(host("a1", device(0, "nvidia", "x")), host("a2", device(0, "amd", "y")))


Answers = Mapping[str, Mapping[str, bytes] | HetrunError]


class Lab:
    """Hosts that answer as they are told, in place of the transport."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: Answers = {}
        self.pairs: list[tuple[str, str]] = []  # measured, each with 10 us and 1 GB/s
        monkeypatch.setattr(devices, "on_all", self._on_all)
        monkeypatch.setattr(network, "measure_pair", self._measure_pair)
        monkeypatch.setattr(network, "measure_team", team_result)

    def _on_all(
        self, specs: Sequence[HostSpec], function: object, *, progress: Callable[..., None]
    ) -> Answers:
        for spec in specs:
            progress(spec.name, self.answers[spec.name])
        return self.answers

    def _measure_pair(self, a: HostFacts, b: HostFacts, effort: object) -> PairResult:
        self.pairs.append((a.spec.name, b.spec.name))
        return pair_result(a.spec.name, b.spec.name)


def pair_result(*hosts: str, factor: float = 1.0, asymmetry: float = 1.0) -> PairResult:
    sizes = [1] + [1 << power for power in range(10, 27, 2)]
    points = [CurvePoint(num_bytes=n, seconds=factor * (1e-5 + n / 1e9)) for n in sizes]
    return PairResult(
        hosts=hosts,
        addresses=tuple("192.0.2.1" for _ in hosts),
        points=tuple(points),
        asymmetry=asymmetry,
        slower_from=hosts[0],
    )


def team_result(team: Team, effort: object = None, *, why: str = "") -> TeamResult:
    """An all-reduce at 10 us and 2 GB/s in host memory; in device memory ten times as fast, as are messages."""
    rate = 2e10 if team.is_native else 2e9
    sizes = [4] + [1 << power for power in range(10, 27, 2)]
    points = tuple(CurvePoint(num_bytes=n, seconds=1e-5 + n / rate) for n in sizes)
    addresses = tuple("192.0.2.1" for _ in team.hosts)
    if why:
        return TeamResult(team=team, addresses=addresses, why=why)
    p2p = points if team.is_native else ()
    return TeamResult(team=team, addresses=addresses, all_reduce=points, p2p=p2p)
