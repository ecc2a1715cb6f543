import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetrun.errors import ConfigError, HetrunError, HostError, JobError, PreflightError
from hetrun.model import (
    CurveKind,
    CurvePoint,
    DataSpec,
    Device,
    EmulatedChip,
    Facts,
    HostFacts,
    HostSpec,
    Link,
    LinkKind,
    ModelSpec,
    PlanLimits,
    Quantity,
    Recipe,
    Source,
    TrainSpec,
)
from hetrun.profile import devices, network, num_steps, profile, profile_from_spec
from hetrun.profile.bench import bench_request, read_bench, wanted_of
from hetrun.profile.pairs import PairResult
from hetrun.profile.samples import add_checks, choose_samples, kinds

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


# --- who measures what --------------------------------------------------------------------------------------


def test_each_kind_is_measured_once_and_on_as_many_hosts_as_there_are() -> None:
    both = (device(0, "nvidia", "x"), device(1, "nvidia", "x"), device(2, "amd", "y"))
    found = facts(host("a1", *both), host("a2", *both), host("a3", device(0, "amd", "y")))
    samples = choose_samples(found)
    assert [(item.host.spec.name, [each.vendor for each in item.devices]) for item in samples] == [
        ("a1", ["amd"]),
        ("a2", ["nvidia"]),
    ]
    assert kinds(found) == {("amd", "y"): ("a1", "a2", "a3"), ("nvidia", "x"): ("a1", "a2")}


def test_equals_of_a_measured_device_are_checked_and_emulated_chips_are_not() -> None:
    chip = EmulatedChip(vendor="v", model="m", num_devices=2, flops_per_s=2.0, memory_bytes=3)
    cards = (device(0, "nvidia", "x"), device(1, "nvidia", "x"), device(2, "amd", "only one"))
    played = (device(0, "v", emulated=chip), device(1, "v", emulated=chip))
    parts = (device(0, "cpu"), device(1, "cpu"))
    found = facts(
        host("a", *cards),
        host("b", device(0, "nvidia", "x")),
        host("c", *played),
        host("d", *parts),
    )
    samples = add_checks(found, choose_samples(found))
    checks = {item.host.spec.name: [d.index for d in item.checks] for item in samples}
    full = {item.host.spec.name: [d.index for d in item.devices] for item in samples}
    assert full == {"a": [2], "b": [0], "c": [0], "d": [0]}
    assert checks == {"a": [0, 1], "b": [], "c": [], "d": []}
    (kept,) = [s for s in add_checks(found, ()) if s.host.spec.name == "b"]
    assert [d.index for d in kept.checks] == [0]  # known from the cache, still compared


def test_parts_of_processors_are_equals_only_with_as_many_threads() -> None:
    def hosts(threads: int) -> Facts:
        return facts(
            host("a", device(0, "cpu", num_threads=4)),
            host("b", device(0, "cpu", num_threads=threads)),
        )

    def checks(found: Facts) -> list[int]:
        return [len(item.checks) for item in add_checks(found, choose_samples(found))]

    assert checks(hosts(4)) == [0, 1]
    assert checks(hosts(2)) == [0]


def test_wanted_is_what_a_plan_may_choose_from() -> None:
    recipe = replace(
        RECIPE,
        train=replace(RECIPE.train, microbatch_rows=(1, 2, 4)),
        plan=PlanLimits(tp=(2,), recompute=True),
    )
    cases = wanted_of(recipe).cases
    assert cases == sorted(cases)
    assert {(tp, again) for tp, again, _ in cases} == {
        (tp, again) for tp in (1, 2) for again in (False, True)
    }
    assert {rows for _, _, rows in wanted_of(recipe, quick=True).cases} == {1, 4}
    with pytest.raises(ConfigError, match="num_heads is 2"):
        wanted_of(replace(RECIPE, plan=PlanLimits(tp=(4,))))


def test_silent_hosts_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    silent = HostFacts(spec=HostSpec(name="a2"), error="gone")
    assert len(choose_samples(facts(host("a1", device(0, "cpu")), silent))) == 1
    assert "a2 did not answer" in caplog.text
    with pytest.raises(HostError, match="no host answered"):
        choose_samples(facts(silent))


def test_no_device_anywhere_is_an_error() -> None:
    with pytest.raises(PreflightError, match="no host offers a device"):
        choose_samples(facts(host("a1")))


def test_bench_is_asked_with_the_vendors_words() -> None:
    chip = EmulatedChip(vendor="v", model="m", num_devices=1, flops_per_s=2.0, memory_bytes=3)
    (sample,) = choose_samples(
        facts(
            host(
                "a1",
                device(0, "nvidia", "x", visible_id="3", num_threads=4),
                device(1, "v", emulated=chip),
            )
        )
    )
    request = json.loads(json.dumps(bench_request(sample, WANTED)))
    assert (request["rows"], request["seq_len"], request["dtype"]) == ([1, 2], 8, "fp32")
    assert request["model"]["hidden_size"] == 16
    real, emulated = request["devices"]
    assert (real["torch_device"], real["visible_env"], real["visible_id"]) == (
        "cuda",
        "CUDA_VISIBLE_DEVICES",
        "3",
    )
    assert (emulated["torch_device"], emulated["emulated"]["flops_per_s"]) == ("cpu", 2.0)
    assert (real["num_threads"], emulated["num_threads"]) == (4, 1)


# --- what comes back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "KeyError"),
        ({"bench.json": b"{"}, "wrong way"),
        ({"bench.json": b'{"devices": [{}]}'}, "KeyError"),
        ({"bench.json": b'{"devices": [3]}'}, "TypeError"),
        ({"bench.json": b'{"devices": [{"vendor": "cpu", "model": "m"}]}'}, "timings: is missing"),
        (bench(), r"measured \[\], asked for"),
        (bench(("cpu", "m"), rows=[1]), "measured"),
        (bench(("cpu", "m"), checks=[check(1)]), r"checked devices \[1\]"),
        (bench(("cpu", "m"), checks=[check(1, layer_s=0.0)]), "layer_s"),
        (bench(("cpu", "other")), "KeyError"),
    ],
)
def test_wrong_answer_of_the_bench_is_a_job_error(files: dict[str, bytes], says: str) -> None:
    (sample,) = choose_samples(facts(host("a1", device(0, "cpu"))))
    with pytest.raises(JobError, match=says) as caught:
        read_bench(sample, files, hosts={("cpu", "m"): ("a1",)}, wanted=WANTED)
    assert caught.value.host == "a1"


Answers = Mapping[str, Mapping[str, bytes] | HetrunError]


@pytest.fixture
def answer_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], None]:
    def set_answers(answers: Answers) -> None:
        def on_all(
            specs: Sequence[HostSpec], function: object, *, progress: Callable[..., None]
        ) -> Answers:
            for spec in specs:
                progress(spec.name, answers[spec.name])
            return answers

        monkeypatch.setattr(devices, "on_all", on_all)

    return set_answers


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Pairs of hosts that were measured; each has 10 us and 1 GB/s."""
    measured: list[tuple[str, str]] = []

    def measure(a: HostFacts, b: HostFacts, effort: object) -> PairResult:
        measured.append((a.spec.name, b.spec.name))
        return pair_result(a.spec.name, b.spec.name)

    monkeypatch.setattr(network, "measure_pair", measure)
    return measured


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


TWO = facts(host("a1", device(0, "nvidia", "x")), host("a2", device(0, "amd", "y")))


def test_devices_of_all_hosts_meet_in_one_profile(
    answer_with: Callable[[Answers], None], pairs: list[tuple[str, str]]
) -> None:
    answer_with({"a1": bench(("nvidia", "x")), "a2": bench(("amd", "y"))})
    heard: list[tuple[str, str]] = []
    found = profile(TWO, RECIPE, progress=lambda host, text: heard.append((host, text)))
    assert [(item.vendor, item.hosts) for item in found.devices] == [
        ("amd", ("a2",)),
        ("nvidia", ("a1",)),
    ]
    assert [item.rows for item in found.devices[0].timings] == [1, 2]
    assert (found.recipe, found.model, found.seq_len) == ("tiny", RECIPE.model, 8)
    assert [link.kind for link in found.links] == [LinkKind.ACROSS]
    assert heard == [
        ("a1", "measured x"),
        ("a2", "measured y"),
        ("a2 - a1", "across: 1 GB/s, 10 us"),
    ]
    assert len({who for who, _ in heard}) == num_steps(TWO)
    assert pairs == [("a2", "a1")]
    (link,) = found.links
    assert (link.a, link.b, link.source) == ("amd", "nvidia", Source.MEASURED)
    assert link.bytes_per_s == pytest.approx(1e9)
    assert link.latency_s == pytest.approx(1e-5)
    p2p, all_reduce = found.curves
    assert (p2p.kind, p2p.source) == (CurveKind.P2P, Source.MEASURED)
    assert (all_reduce.kind, all_reduce.source) == (CurveKind.ALL_REDUCE, Source.MODELLED)
    assert all_reduce.points[-1].seconds == pytest.approx(2 * (1e-5 + (1 << 25) / 1e9))


def test_one_host_that_fails_fails_the_profile_and_the_rest_is_logged(
    answer_with: Callable[[Answers], None], caplog: pytest.LogCaptureFixture
) -> None:
    answer_with({"a1": JobError("no memory", host="a1"), "a2": bench(("amd", "z"))})
    with pytest.raises(JobError, match="no memory"):
        profile(TWO, RECIPE)
    assert "a2: could not measure either" in caplog.text


def test_device_slower_than_its_equals_is_named(
    answer_with: Callable[[Answers], None], caplog: pytest.LogCaptureFixture
) -> None:
    cards = tuple(device(number, "nvidia", "x") for number in range(3))
    answer = bench(("nvidia", "x"), checks=[check(1), check(2, layer_s=0.003)])
    answer_with({"a1": answer})
    inside = Link(kind=LinkKind.INSIDE_HOST, latency_s=1.0, bytes_per_s=1.0)
    found = profile(facts(host("a1", *cards), declared=(inside,)), RECIPE)
    said = "a1/2 is slower than its equals: a layer takes 1.50 times as long, a product 1.00 times"
    assert found.devices[0].warnings == (said,)
    assert said in caplog.text


# --- the cache ----------------------------------------------------------------------------------------------


def test_figures_are_measured_once_and_then_come_from_the_cache(
    answer_with: Callable[[Answers], None],
    pairs: list[tuple[str, str]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer_with({"a1": bench(("nvidia", "x")), "a2": bench(("amd", "y"))})
    first = profile(TWO, RECIPE, cache=tmp_path)
    answer_with({})  # a host that is asked now fails the test
    again = profile(TWO, RECIPE, cache=tmp_path)
    assert again.devices == first.devices
    assert "nvidia x: figures from the cache; --no-cache measures anew" in caplog.text
    assert len(pairs) == 2  # links are measured each time
    with pytest.raises(KeyError):
        profile(TWO, RECIPE, cache=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"driver": "2"},
        {"num_threads": 2},
        {"model": "y"},
    ],
)
def test_another_device_is_measured_anew(
    answer_with: Callable[[Answers], None], tmp_path: Path, changes: dict[str, Any]
) -> None:
    answer_with({"a1": bench(("nvidia", "x"))})
    one = facts(host("a1", device(0, "nvidia", "x", driver="1")))
    profile(one, RECIPE, cache=tmp_path)
    answer_with({})
    profile(one, RECIPE, cache=tmp_path)
    other = facts(host("a1", replace(device(0, "nvidia", "x", driver="1"), **changes)))
    with pytest.raises(KeyError):
        profile(other, RECIPE, cache=tmp_path)


def test_another_shape_torch_or_haste_is_measured_anew(
    answer_with: Callable[[Answers], None], tmp_path: Path
) -> None:
    one = facts(host("a1", device(0, "nvidia", "x"), torch_version="2.9"))
    answer_with({"a1": bench(("nvidia", "x"))})
    profile(one, RECIPE, cache=tmp_path)
    answer_with({})
    for found, recipe, quick in (
        (facts(host("a1", device(0, "nvidia", "x"), torch_version="2.10")), RECIPE, False),
        (one, replace(RECIPE, data=DataSpec(seq_len=16)), False),
        (one, RECIPE, True),
    ):
        with pytest.raises(KeyError):
            profile(found, recipe, cache=tmp_path, quick=quick)
    profile(one, replace(RECIPE, name="other-name"), cache=tmp_path)


def test_damaged_cache_is_measured_anew(
    answer_with: Callable[[Answers], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = facts(host("a1", device(0, "nvidia", "x")))
    answer_with({"a1": bench(("nvidia", "x"))})
    first = profile(one, RECIPE, cache=tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_text("{")
    assert profile(one, RECIPE, cache=tmp_path).devices == first.devices
    assert "the kept figures are damaged" in caplog.text


def test_cache_that_cannot_be_written_only_warns(
    answer_with: Callable[[Answers], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    answer_with({"a1": bench(("nvidia", "x"))})
    profile(facts(host("a1", device(0, "nvidia", "x"))), RECIPE, cache=tmp_path / "file")
    assert "the figures of x are not kept" in caplog.text


# --- estimates ----------------------------------------------------------------------------------------------


def test_estimates_are_labelled_assumed_and_emulated_chips_modelled() -> None:
    chip = EmulatedChip(vendor="v", model="m", num_devices=1, flops_per_s=2e9, memory_bytes=3)
    cards = host(
        "a1", device(0, "nvidia", "NVIDIA A100-SXM4-80GB"), device(1, "cpu", num_threads=4)
    )
    found = profile_from_spec(facts(cards, host("a2", device(0, "v", emulated=chip))), RECIPE)
    by_vendor = {item.vendor: item for item in found.devices}
    assert {vendor: item.source for vendor, item in by_vendor.items()} == {
        "cpu": Source.ASSUMED,
        "nvidia": Source.ASSUMED,
        "v": Source.MODELLED,
    }
    a100 = by_vendor["nvidia"]
    assert a100.matmul_flops_per_s.value == pytest.approx(0.40 * 312e12)
    assert "40% of 312 TFLOP/s" in a100.matmul_flops_per_s.why
    assert a100.timings[0].layer_backward_s == 2 * a100.timings[0].layer_forward_s
    assert by_vendor["v"].matmul_flops_per_s.value == 2e9
    assert {link.source for link in found.links} == {Source.ASSUMED}
    assert len(found.warnings) == len(found.links) == 3
    assert not found.curves


def test_chip_without_a_published_peak_is_not_estimated() -> None:
    with pytest.raises(PreflightError, match="nvidia unheard-of: no peak is published") as caught:
        profile_from_spec(facts(host("a1", device(0, "nvidia", "unheard-of"))), RECIPE)
    assert "--from-spec" in (caught.value.hint or "")
