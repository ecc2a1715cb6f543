"""Who measures what, what is asked, and what comes back."""

import json
from dataclasses import replace

import pytest

from hetrun.arch.hf import from_config
from hetrun.errors import ConfigError, HostError, JobError, PreflightError
from hetrun.model import (
    CurveKind,
    EmulatedChip,
    Facts,
    HostFacts,
    HostSpec,
    Link,
    LinkKind,
    PlanLimits,
    Source,
)
from hetrun.profile import num_steps, profile
from hetrun.profile.bench import bench_request, read_bench, wanted_of
from hetrun.profile.samples import add_checks, choose_samples, kinds
from tests.unit.arch_configs import MIXTRAL_8X7B
from tests.unit.profile_lab import (
    RECIPE,
    TWO,
    WANTED,
    Lab,
    bench,
    check,
    device,
    facts,
    host,
)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(monkeypatch)


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
    assert (real["env"], emulated["env"]) == ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {})
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


def test_devices_of_all_hosts_meet_in_one_profile(lab: Lab) -> None:
    lab.answers = {"a1": bench(("nvidia", "x")), "a2": bench(("amd", "y"))}
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
        ("a2 - a1", "across: 1 GB/s, 10 us; all-reduce 2 GB/s"),
    ]
    assert len({who for who, _ in heard}) == num_steps(TWO)
    assert lab.pairs == [("a2", "a1")]
    (link,) = found.links
    assert (link.a, link.b, link.source) == ("amd", "nvidia", Source.MEASURED)
    assert link.bytes_per_s == pytest.approx(1e9)
    assert link.latency_s == pytest.approx(1e-5, rel=1e-3)
    p2p, all_reduce = found.curves
    assert (p2p.kind, p2p.source) == (CurveKind.P2P, Source.MEASURED)
    assert (all_reduce.kind, all_reduce.source) == (CurveKind.ALL_REDUCE, Source.MEASURED)
    assert (all_reduce.backend, all_reduce.num_ranks, all_reduce.hosts) == ("gloo", 2, ("a2", "a1"))
    assert all_reduce.bytes_per_s == pytest.approx(2e9)
    assert found.warnings[0].startswith(
        "link across, amd to nvidia: an all-reduce of 67.1 MB with gloo takes 33.6 ms, from single"
    )


def test_one_host_that_fails_fails_the_profile_and_the_rest_is_logged(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    lab.answers = {"a1": JobError("no memory", host="a1"), "a2": bench(("amd", "z"))}
    with pytest.raises(JobError, match="no memory"):
        profile(TWO, RECIPE)
    assert "a2: could not measure either" in caplog.text


def test_device_slower_than_its_equals_is_named(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    cards = tuple(device(number, "nvidia", "x") for number in range(3))
    answer = bench(("nvidia", "x"), checks=[check(1), check(2, layer_s=0.003)])
    lab.answers = {"a1": answer}
    inside = Link(kind=LinkKind.INSIDE_HOST, latency_s=1.0, bytes_per_s=1.0)
    found = profile(facts(host("a1", *cards), declared=(inside,)), RECIPE)
    said = "a1/2 is slower than its equals: a layer takes 1.50 times as long, a product 1.00 times"
    assert found.devices[0].warnings == (said,)
    assert said in caplog.text


def test_shares_of_what_transformers_builds_are_not_measured_and_no_host_is_asked(lab: Lab) -> None:
    shared = replace(RECIPE, model=from_config(MIXTRAL_8X7B), plan=replace(RECIPE.plan, tp=(1, 2)))
    with pytest.raises(ConfigError, match="tp 2 of a mixtral model cannot be measured") as caught:
        profile(facts(host("a1", device(0, "nvidia", "x"))), shared)
    assert "--from-spec" in (caught.value.hint or "")  # a host that is asked has no answer here
