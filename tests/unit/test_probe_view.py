"""How the facts look at a glance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetrun.cli import render
from hetrun.model import (
    GIB,
    Device,
    DeviceLink,
    DevicePort,
    Facts,
    HostFacts,
    HostSpec,
    Nic,
    NicLink,
    Quantity,
    RdmaNic,
    Source,
)
from hetrun.vendors import all_vendors


@pytest.fixture(autouse=True)
def _fresh_console(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "260")
    render.talk.cache_clear()
    yield
    render.talk.cache_clear()


def host(name: str, *, vendor: str = "nvidia", model: str = "A100", **changes: object) -> HostFacts:
    memory = Quantity(value=float(80 * GIB), source=Source.MEASURED)
    devices = tuple(
        Device(
            index=index,
            vendor=vendor,
            model=model,
            memory=memory,
            driver="550.54",
            sdk="/usr/local/cuda-12.4 12.4.1",
        )
        for index in range(2)
    )
    values: dict[str, object] = {
        "spec": HostSpec(name=name),
        "devices": devices,
        "torch_version": "2.6.0",
        "python_version": "3.11.2",
        "nics": (
            Nic(name="docker0", addresses=("172.17.0.1",), speed_mbps=90000),
            Nic(name="ens3", addresses=("10.0.0.1",), speed_mbps=25000),
            Nic(name="lo", addresses=("127.0.0.1",)),
        ),
    }
    return HostFacts(**{**values, **changes})  # type: ignore[arg-type]


def shown(capfd: pytest.CaptureFixture[str], *hosts: HostFacts) -> list[str]:
    facts = Facts(created="2030-01-01T00:00:00+00:00", inventory="lab", hosts=hosts)
    render.show_facts(facts, Path("facts.json"), as_json=False)
    return [" ".join(line.split()) for line in capfd.readouterr().err.splitlines()]


def test_row_holds_links_toolkit_and_number_of_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    port = RdmaNic(device="mlx5_0", port=1, link_layer="Ethernet", active=True, rate_gbps=200.0)
    full = host(
        "a1",
        rdma=(port, port),
        peer_memory=("x_peermem",),
        device_links=(DeviceLink(a=0, b=1, kind="NV12"),),
        warnings=("w1", "w2"),
    )
    lines = shown(capfd, full)
    assert (
        "a1 nvidia A100 2 80.0 GiB 550.54, cuda-12.4 Python 3.11.2, torch 2.6.0 "
        "NV12, ens3 25 Gbit/s, 2 x RoCE 200 Gbit/s, GPUDirect 2"
    ) in lines
    assert "a1: w1" in lines


def test_islands_name_the_library_that_joins_their_devices(
    capfd: pytest.CaptureFixture[str],
) -> None:
    other = all_vendors()["biren"]
    lines = shown(
        capfd, host("a1"), host("b1", vendor="biren", model="106M"), host("b2", model="H100")
    )
    assert "nvidia 4 2 2 x A100, 2 x H100 nccl" in lines
    assert f"biren 2 1 2 x 106M {other.collective_family}" in lines


def test_hundreds_of_equal_hosts_are_one_row_and_their_warnings_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    hosts = [host(f"a{number}", warnings=("clock is 9 s behind",)) for number in range(200)]
    lines = shown(
        capfd, *hosts, host("odd", model="H100"), HostFacts(spec=HostSpec(name="x"), error="dead")
    )
    assert len(lines) < 20
    assert any(line.startswith("a0, a1, a2 and 197 more nvidia A100 2 ") for line in lines)
    assert any(line.startswith("odd nvidia H100 2 ") for line in lines)
    assert "a0, a1, a2 and 197 more: clock is 9 s behind" in lines
    assert "x no answer" in lines


def test_host_that_knows_itself_by_loopback_only_is_mentioned(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capfd, host("a1", hostname="n1", names={"n1": ("127.0.1.1",)}), host("b1"))
    assert any(line.startswith("a1: own name is a loopback address") for line in lines)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_word_of_the_table_breaks_on_any_screen(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    render.talk.cache_clear()
    port = RdmaNic(device="mlx5_0", port=1, link_layer="InfiniBand", active=True, rate_gbps=400.0)
    near = (
        NicLink(nic="mlx5_0", device=0, kind="PIX"),
        NicLink(nic="mlx5_0", device=1, kind="SYS"),
    )
    inside = (DevicePort(device=0, address="10.0.0.1", up=True), DevicePort(device=1, up=False))
    full = host("a1", rdma=(port,) * 8, nic_links=near, device_ports=inside, peer_memory=("x",))
    lines = shown(capfd, full, host("b1", vendor="biren", model="106M"))
    words = " ".join(lines).split()
    for word in ("Interpreter", "InfiniBand", "GPUDirect", "PIX/SYS,", "2.6.0", "cuda-12.4"):
        assert word in words
    assert "RoCE inside (1 of 2" in " ".join(lines)
    assert all(len(line) <= width for line in lines)
