"""What changed between two probes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrun.cli import render
from hetrun.model import (
    GIB,
    Device,
    DevicePort,
    Facts,
    HostFacts,
    HostSpec,
    Nic,
    Quantity,
    RdmaNic,
    Source,
)
from hetrun.probe import Change, ChangeKind, compare


def device(index: int, **changes: object) -> Device:
    values: dict[str, object] = {
        "index": index,
        "vendor": "aurora",
        "model": "aurora-100",
        "memory": Quantity(value=float(64 * GIB), source=Source.MEASURED),
        "vendor_index": index,
        "bus_id": f"0000:4{index}:00.0",
        "driver": "1.2",
    }
    return Device(**{**values, **changes})  # type: ignore[arg-type]


def host(name: str = "a1", /, **changes: object) -> HostFacts:
    values: dict[str, object] = {
        "spec": HostSpec(name=name),
        "memory_bytes": 100 * GIB,
        "torch_version": "2.6.0",
        "devices": (device(0), device(1)),
        "nics": (Nic(name="eth0", addresses=("10.0.0.1",), speed_mbps=1000),),
    }
    return HostFacts(**{**values, **changes})  # type: ignore[arg-type]


def facts(*hosts: HostFacts) -> Facts:
    return Facts(created="2030-01-01T00:00:00+00:00", inventory="lab", hosts=hosts)


def changes(old: HostFacts, new: HostFacts) -> list[tuple[str, str]]:
    return [(change.kind.value, change.what) for change in compare(facts(old), facts(new))]


def test_equal_probes_differ_in_nothing_and_what_moves_by_itself_is_left_out() -> None:
    now = host(clock_offset_s=0.5, disk_free_bytes=1, memory_bytes=100 * GIB + 4096)
    assert changes(host(), now) == []


def test_hosts_that_come_and_go_are_named_with_what_they_hold() -> None:
    found = compare(facts(host("a1"), host("b1")), facts(host("b1"), host("c1", devices=())))
    assert found == (
        Change(kind=ChangeKind.ADDED, host="c1", what="new host: no device"),
        Change(
            kind=ChangeKind.REMOVED,
            host="a1",
            what="no longer in the inventory; had 2 x aurora aurora-100",
        ),
    )


def test_host_that_falls_silent_is_one_change_not_many() -> None:
    silent = HostFacts(spec=HostSpec(name="a1"), error="no route")
    assert changes(host(), silent) == [("changed", "answers no longer: no route")]
    assert changes(silent, silent) == []
    assert changes(silent, host()) == [("changed", "answers again: 2 x aurora aurora-100")]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"torch_version": "2.7.0"}, "torch 2.6.0 -> 2.7.0"),
        ({"torch_version": None, "torch_error": "no torch"}, "torch 2.6.0 -> no torch"),
        ({"kernel": "6.1"}, "kernel unknown -> 6.1"),
        ({"memory_bytes": 50 * GIB}, "memory 100.0 GiB -> 50.0 GiB"),
        ({"peer_memory": ("x_peermem",)}, "GPUDirect unknown -> x_peermem"),
    ],
)
def test_software_and_memory_of_a_host_are_compared(change: dict[str, object], what: str) -> None:
    assert changes(host(), host("a1", **change)) == [("changed", what)]


def test_devices_are_known_by_their_place_not_by_their_number() -> None:
    moved = host(devices=(device(0, bus_id="0000:41:00.0", vendor_index=1),))
    assert changes(host(), moved) == [("removed", "device gone: aurora aurora-100 at 0000:40:00.0")]
    more = host(devices=(device(0), device(1), device(2, model="aurora-200")))
    assert changes(host(), more) == [("added", "new device: aurora aurora-200 at 0000:42:00.0")]


def test_chips_of_one_board_are_told_apart() -> None:
    board = (device(0, bus_id="0000:40:00.0"), device(1, bus_id="0000:40:00.0"))
    broken = (board[0],)
    both = host(devices=board)
    assert changes(both, both) == []
    gone = "device gone: aurora aurora-100 at 0000:40:00.0"
    assert changes(both, host(devices=broken)) == [("removed", gone)]


def test_what_changed_about_a_device_is_named() -> None:
    half = Quantity(value=float(32 * GIB), source=Source.MEASURED)
    now = host(devices=(device(0, driver="1.3", memory=half), device(1)))
    assert changes(host(), now) == [
        ("changed", "aurora aurora-100 at 0000:40:00.0: driver 1.2 -> 1.3"),
        ("changed", "aurora aurora-100 at 0000:40:00.0: memory 64.0 GiB -> 32.0 GiB"),
    ]


def test_links_and_warnings_are_compared() -> None:
    port = RdmaNic(device="mlx5_0", port=1, link_layer="Ethernet", active=True, rate_gbps=200.0)
    old = host(rdma=(port,), warnings=("old one",))
    new = host(
        rdma=(replace(port, active=False),),
        nics=(Nic(name="eth0", addresses=("10.0.0.2",), speed_mbps=1000),),
        warnings=("new one",),
    )
    assert changes(old, new) == [
        ("changed", "eth0: 10.0.0.1, 1000 Mbit/s -> 10.0.0.2, 1000 Mbit/s"),
        ("changed", "mlx5_0/1: Ethernet, active, 200 Gbit/s -> Ethernet, down, 200 Gbit/s"),
        ("added", "warning new: new one"),
        ("removed", "warning gone: old one"),
    ]


def test_changes_are_shown_once_for_all_hosts_that_share_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    render.talk.cache_clear()
    names = [f"a{number}" for number in range(8)]
    old = facts(*(host(name) for name in names))
    new = facts(*(host(name, torch_version="2.7.0") for name in names))
    render.show_changes(old, new, Path("old.json"))
    render.show_changes(old, old, Path("old.json"))
    render.show_changes(None, old, None)
    out, err = capfd.readouterr()
    render.talk.cache_clear()
    assert out == ""
    assert "8 changes since old.json of 2030-01-01" in err
    assert "~ a0, a1, a2 and 5 more: torch 2.6.0 -> 2.7.0" in err
    assert err.count("torch") == 1
    assert "nothing changed since old.json" in err


def test_port_inside_a_device_that_goes_down_is_a_change() -> None:
    up = DevicePort(device=3, address="10.0.0.3", up=True)
    (change,) = compare(
        facts(host(device_ports=(up,))), facts(host(device_ports=(replace(up, up=False),)))
    )
    assert change.what == "RoCE inside device 3: 10.0.0.3, up -> 10.0.0.3, down"
