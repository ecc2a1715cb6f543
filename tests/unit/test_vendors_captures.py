"""Every captured tool output gives exactly the answer that stands beside it."""

from dataclasses import asdict
from typing import Any

import pytest

from hetrun.vendors import FoundDevice, all_vendors, read_tool
from tests.vendors.captures import CAPTURES, ROOT, Capture


def facts_of(device: FoundDevice, keys: dict[str, Any]) -> dict[str, Any]:
    facts = asdict(device) | {"memory_mib": device.memory_mib}
    facts["partitions"] = list(facts["partitions"])
    return {key: facts[key] for key in keys}


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda capture: capture.id)
def test_a_capture_gives_its_devices_and_error(capture: Capture) -> None:
    answer, expect = capture.read(), capture.expect
    assert answer.error == expect["error"]
    assert len(answer.devices) == len(expect["devices"])
    for device, keys in zip(answer.devices, expect["devices"], strict=True):
        assert facts_of(device, keys) == keys


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda capture: capture.id)
def test_a_capture_gives_its_warnings_and_details(capture: Capture) -> None:
    answer, expect = capture.read(), capture.expect
    assert list(answer.warnings) == expect.get("warnings", [])
    assert dict(answer.sdk) == expect.get("sdk", {})
    assert dict(answer.detail) == expect.get("detail", {})
    assert [asdict(lost) for lost in answer.lost] == expect.get("lost", [])
    assert answer.memory_fallback == expect.get("memory_fallback")


@pytest.mark.parametrize(
    "capture",
    [capture for capture in CAPTURES if capture.vendor in ("cpu", "pci", "rdma")],
    ids=lambda capture: capture.id,
)
def test_a_listing_gives_its_processor_bus_or_ports(capture: Capture) -> None:
    answer, expect = capture.read(), capture.expect
    if "cpu" in expect:
        wanted = dict(expect["cpu"])
        flags = set(wanted.pop("flags_has", ()))
        assert answer.cpu is not None
        assert flags <= answer.cpu.flags
        assert {key: getattr(answer.cpu, key) for key in wanted} == wanted
    if "pci" in expect:
        assert answer.pci is not None
        groups = [
            {"vendor": group.vendor, "count": group.count, "bus_ids": list(group.bus_ids)}
            for group in answer.pci.accelerators
        ]
        assert groups == expect["pci"]["accelerators"]
        assert [asdict(nic) for nic in answer.pci.nics] == expect["pci"]["nics"]
        assert list(answer.pci.ignored) == expect["pci"]["ignored"]
    if "rdma" in expect:
        assert [asdict(port) for port in answer.rdma] == expect["rdma"]


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda capture: capture.id)
def test_bytes_and_windows_line_ends_read_like_text(capture: Capture) -> None:
    assert capture.read(capture.text.replace("\n", "\r\n")) == capture.read()
    if capture.stream != "stderr":
        data = capture.text.encode()
        answer = read_tool(capture.vendor, capture.command, stdout=data, rc=capture.rc)
        assert answer == capture.read()


@pytest.mark.parametrize(
    "capture",
    [capture for capture in CAPTURES if capture.expect["devices"]],
    ids=lambda capture: capture.id,
)
def test_without_the_command_the_layout_alone_gives_no_other_devices(capture: Capture) -> None:
    known = {device.index: device for device in capture.read().devices}
    for device in read_tool(capture.vendor, "sh -c probe", stdout=capture.text).devices:
        full = known[device.index]
        assert device.model in (None, full.model)
        assert device.memory_bytes in (None, full.memory_bytes)
        assert device.bus_id in (None, full.bus_id)


def test_every_vendor_has_a_capture_with_devices_and_no_capture_lacks_its_vendor() -> None:
    with_devices = {capture.vendor for capture in CAPTURES if capture.expect["devices"]}
    assert set(all_vendors()) - {"cpu"} <= with_devices
    assert {capture.vendor for capture in CAPTURES} <= set(all_vendors()) | {"pci", "rdma"}
    files = {path.name for path in ROOT.glob("*/*.txt")}
    assert len(files) == len(CAPTURES)
