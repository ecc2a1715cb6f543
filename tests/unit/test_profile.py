import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hetrun import profile as profiling
from hetrun.errors import HetrunError, HostError, JobError, PreflightError
from hetrun.model import (
    Connection,
    DataSpec,
    Device,
    EmulatedChip,
    Facts,
    HostFacts,
    HostSpec,
    Link,
    LinkKind,
    ModelSpec,
    Nic,
    Quantity,
    Recipe,
    Source,
    TrainSpec,
)
from hetrun.profile import (
    bench_request,
    choose_samples,
    data_nic,
    kinds,
    links,
    profile,
    read_bench,
)

RECIPE = Recipe(
    name="tiny",
    model=ModelSpec(num_layers=2, hidden_size=16, num_heads=2, ffn_size=32, vocab_size=257),
    data=DataSpec(seq_len=8),
    train=TrainSpec(steps=1, global_batch_rows=4, microbatch_rows=(2, 1, 2)),
)
QUANTITY = {"value": 1.0, "source": "measured"}


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


def bench(*measured: tuple[str, str], rows: Sequence[int] = (1, 2)) -> dict[str, bytes]:
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
    return {"bench.json": json.dumps({"devices": entries, "torch_version": None}).encode()}


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
    request = json.loads(json.dumps(bench_request(sample, RECIPE)))
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
        (bench(("cpu", "other")), "KeyError"),
    ],
)
def test_wrong_answer_of_the_bench_is_a_job_error(files: dict[str, bytes], says: str) -> None:
    (sample,) = choose_samples(facts(host("a1", device(0, "cpu"))))
    with pytest.raises(JobError, match=says) as caught:
        read_bench(sample, files, hosts={("cpu", "m"): ("a1",)}, rows=[1, 2])
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

        monkeypatch.setattr(profiling, "on_all", on_all)

    return set_answers


TWO = facts(host("a1", device(0, "nvidia", "x")), host("a2", device(0, "amd", "y")))


def test_devices_of_all_hosts_meet_in_one_profile(
    answer_with: Callable[[Answers], None],
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
    assert heard == [("a1", "measured x"), ("a2", "measured y")]


def test_one_host_that_fails_fails_the_profile_and_the_rest_is_logged(
    answer_with: Callable[[Answers], None], caplog: pytest.LogCaptureFixture
) -> None:
    answer_with({"a1": JobError("no memory", host="a1"), "a2": bench(("amd", "z"))})
    with pytest.raises(JobError, match="no memory"):
        profile(TWO, RECIPE)
    assert "a2: could not measure either" in caplog.text


# --- links --------------------------------------------------------------------------------------------------


def nic(name: str, address: str, speed_mbps: int | None, *, up: bool = True) -> Nic:
    return Nic(name=name, addresses=(address,), speed_mbps=speed_mbps, up=up)


def by_kind(found: tuple[Link, ...]) -> dict[LinkKind, Link]:
    return {link.kind: link for link in found}


def test_declared_links_win_and_the_closer_match_first() -> None:
    wide = Link(kind=LinkKind.ACROSS, latency_s=1.0, bytes_per_s=1.0, source=Source.MODELLED)
    close = replace(wide, bytes_per_s=2.0, a="nvidia", b="amd")
    (link,) = links(replace(TWO, links=(wide, close)))
    assert link == replace(close, a="amd", b="nvidia")


def test_only_links_that_a_plan_can_use_are_there() -> None:
    assert links(facts(host("a1", device(0, "cpu")))) == ()
    pair = host("a1", device(0, "cpu"), device(1, "cpu"))
    assert [link.kind for link in links(facts(pair))] == [LinkKind.INSIDE_HOST]
    more = links(facts(pair, host("a2", device(0, "amd"))))
    assert [(link.kind, link.a, link.b) for link in more] == [
        (LinkKind.INSIDE_HOST, "cpu", "cpu"),
        (LinkKind.ACROSS, "amd", "cpu"),
    ]


def test_slowest_interface_on_the_way_is_the_links_speed() -> None:
    fast = host("a1", device(0, "amd"), nics=(nic("eth0", "192.0.2.1", 100_000),))
    slow = host("a2", device(0, "amd"), nics=(nic("eth0", "192.0.2.2", 25_000),))
    link = by_kind(links(facts(fast, slow)))[LinkKind.INSIDE_ISLAND]
    assert (link.bytes_per_s, link.source) == (25e9 / 8, Source.SPEC)


def test_unknown_speed_is_assumed_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    fast = host("a1", device(0, "amd"), nics=(nic("eth0", "192.0.2.1", 100_000),))
    dark = host("a2", device(0, "amd"), nics=(nic("eth0", "192.0.2.2", None),))
    with caplog.at_level(logging.WARNING):
        link = by_kind(links(facts(fast, dark)))[LinkKind.INSIDE_ISLAND]
    assert (link.bytes_per_s, link.source) == (1.25e9, Source.ASSUMED)
    assert "link inside_island, amd to amd: 1.25 GB/s after 50 us, assumed" in caplog.text


def test_hosts_on_this_machine_meet_over_loopback() -> None:
    here = [
        host(name, device(0, "cpu"), spec=HostSpec(name=name, connection=Connection.LOCAL))
        for name in ("a", "b")
    ]
    link = by_kind(links(facts(*here)))[LinkKind.INSIDE_ISLAND]
    assert (link.bytes_per_s, link.source) == (2e9, Source.ASSUMED)


def test_accelerators_in_a_box_are_closer_than_processes() -> None:
    cards = by_kind(links(facts(host("a", device(0, "amd"), device(1, "amd")))))
    parts = by_kind(links(facts(host("a", device(0, "cpu"), device(1, "cpu")))))
    assert cards[LinkKind.INSIDE_HOST].bytes_per_s > parts[LinkKind.INSIDE_HOST].bytes_per_s


def test_training_interface_is_the_named_one_then_the_addressed_one_then_the_fastest() -> None:
    nics = (
        nic("lo", "127.0.0.1", None),
        nic("eth0", "192.0.2.1", 1_000),
        nic("eth1", "192.0.2.2", 25_000),
        nic("eth2", "192.0.2.3", 100_000, up=False),
    )

    def chosen(**keys: Any) -> str | None:
        found = data_nic(HostFacts(spec=HostSpec(name="a", **keys), nics=nics))
        return found.name if found else None

    assert chosen(nic="eth0", data_addr="192.0.2.2") == "eth0"
    assert chosen(data_addr="192.0.2.1") == "eth0"
    assert chosen(addr="192.0.2.1") == "eth0"
    assert chosen() == "eth1"
    assert data_nic(HostFacts(spec=HostSpec(name="a"))) is None
