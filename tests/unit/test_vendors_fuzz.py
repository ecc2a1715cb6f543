"""Whatever a tool prints, the answer is an error class or plausible devices: no exception, no wrong device in silence."""

import json
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetrun.vendors import FoundDevice, ToolAnswer, all_vendors, read_tool
from tests.vendors.captures import CAPTURES, Capture

pytestmark = pytest.mark.slow

READABLE = [capture for capture in CAPTURES if capture.stream != "stderr" and not capture.rc]
COMMANDS = sorted({(capture.vendor, capture.command) for capture in CAPTURES})
FUZZ = settings(
    max_examples=80,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
JSON_KEYS = [
    "gpu",
    "gpu_data",
    "card0",
    "GPU",
    "device_list",
    "devices",
    "CnmonInfo",
    "device_info",
    "lscpu",
    "children",
    "field",
    "asic",
    "vram",
    "id",
    "Index",
    "neuron_device",
    "device_id",
    "CardNum",
    "PCI",
    "board_info",
]
# Known only from lines that may be missing as a whole; what is left is right without them.
OF_THE_WHOLE = {"partitions", "sliced", "visible_id"}
BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def assert_plausible(answer: ToolAnswer) -> None:
    assert "parser_failed" not in answer.warnings
    for device in answer.devices:
        assert 0 <= device.index < 4096
        assert device.memory_bytes is None or 0 < device.memory_bytes <= 1 << 42
        assert device.model is None or (device.model.isprintable() and device.model.strip())
        assert device.bus_id is None or BUS_ID.fullmatch(device.bus_id)
    numbers = [device.index for device in answer.devices]
    assert len(set(numbers)) == len(numbers)
    nothing = not (answer.devices or answer.cpu or answer.pci or answer.rdma)
    assert not nothing or answer.error is not None


def differing(device: FoundDevice, full: FoundDevice | None) -> list[str]:
    """Return the fields that say something else than in the uncut output."""
    if full is None:
        return ["index"]
    pairs: list[tuple[str, Any, Any]] = [
        (field.name, getattr(device, field.name), getattr(full, field.name))
        for field in fields(device)
    ]
    return [name for name, cut, whole in pairs if cut not in (None, (), False) and cut != whole]


def assert_cut_tells_nothing_wrong(capture: Capture, cut: str) -> None:
    answer, full = capture.read(cut), capture.read()
    assert_plausible(answer)
    known = {device.index: device for device in full.devices}
    for device in answer.devices:
        wrong = differing(device, known.get(device.index))
        told = set(answer.warnings) & {"index_assumed"}
        assert set(wrong) <= OF_THE_WHOLE or told, (capture.id, wrong, cut[-40:])
    if answer.cpu is not None and full.cpu is not None:
        for field in fields(answer.cpu):
            value = getattr(answer.cpu, field.name)
            assert value in (None, frozenset(), getattr(full.cpu, field.name))
    if answer.pci is not None and full.pci is not None:
        every = {bus_id for group in full.pci.accelerators for bus_id in group.bus_ids}
        assert all(set(group.bus_ids) <= every for group in answer.pci.accelerators)
    for port in answer.rdma:
        assert any(port.ip in (None, other.ip) for other in full.rdma if other.dev == port.dev)


@pytest.mark.parametrize("capture", READABLE, ids=lambda capture: capture.id)
def test_output_cut_anywhere_gives_no_wrong_device(capture: Capture) -> None:
    text = capture.text
    step = max(1, len(text) // 30)
    cuts = {*range(0, len(text), step), *range(max(0, len(text) - 30), len(text))}
    for cut in sorted(cuts):
        assert_cut_tells_nothing_wrong(capture, text[:cut])


@FUZZ
@given(st.sampled_from(READABLE), st.data())
def test_output_cut_at_random_gives_no_wrong_device(capture: Capture, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(capture.text)))
    assert_cut_tells_nothing_wrong(capture, capture.text[:cut])


@FUZZ
@given(st.sampled_from(READABLE), st.randoms(use_true_random=False))
def test_shuffled_lines_give_plausible_devices_or_an_error(capture: Capture, random: Any) -> None:
    lines = capture.text.splitlines(keepends=True)
    random.shuffle(lines)
    assert_plausible(capture.read("".join(lines)))


@FUZZ
@given(st.sampled_from(READABLE), st.data())
def test_lost_and_foreign_lines_give_plausible_devices(
    capture: Capture, data: st.DataObject
) -> None:
    lines = capture.text.splitlines(keepends=True)
    at = data.draw(st.integers(0, len(lines)))
    noise = data.draw(
        st.sampled_from(
            [
                "警告\uff1a设备忙\n",
                "WARNING: something [0] {x}\n",
                "\x1b[31mred\x1b[0m\n",
                "{\n",
                "]\n",
                "|\n",
            ]
        )
        | st.text(max_size=60)
    )
    lost = data.draw(st.integers(0, 2))
    assert_plausible(capture.read("".join([*lines[:at], noise, *lines[at + lost :]])))


@FUZZ
@given(st.sampled_from(READABLE), st.data())
def test_changed_characters_give_plausible_devices(capture: Capture, data: st.DataObject) -> None:
    text = list(capture.text)
    for _ in range(data.draw(st.integers(1, 6))):
        if text:
            at = data.draw(st.integers(0, len(text) - 1))
            text[at] = data.draw(st.characters())
    assert_plausible(capture.read("".join(text)))


@FUZZ
@given(st.sampled_from(COMMANDS), st.binary(max_size=400), st.sampled_from([None, 0, 1, 127, 255]))
def test_binary_garbage_is_an_error_class(
    command: tuple[str, str], data: bytes, rc: int | None
) -> None:
    assert_plausible(read_tool(*command, stdout=data, stderr=data[::-1], rc=rc))


@FUZZ
@given(st.sampled_from(COMMANDS), st.sampled_from(CAPTURES))
def test_another_tool_s_output_gives_plausible_devices_or_an_error(
    command: tuple[str, str], capture: Capture
) -> None:
    assert_plausible(read_tool(*command, stdout=capture.text, rc=capture.rc))


@FUZZ
@given(st.text(max_size=30), st.text(max_size=80), st.text(max_size=80))
def test_any_vendor_and_command_is_answered(vendor: str, command: str, text: str) -> None:
    assert_plausible(read_tool(vendor, command, stdout=text, stderr=text, rc=0))


@FUZZ
@given(
    st.sampled_from(sorted(all_vendors())),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(JSON_KEYS),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ),
)
def test_json_of_any_shape_gives_plausible_devices_or_an_error(vendor: str, value: Any) -> None:
    assert_plausible(read_tool(vendor, "x", stdout=json.dumps(value) + "\n"))


BIG = 10_000_000
LAYOUTS = [
    "nvidia-query-a100",
    "nvidia-table-mig",
    "nvidia-xml",
    "nvidia-q-text",
    "nvidia-list-mig-h100",
    "amd-rocm-smi-json-warning",
    "amd-rocm-smi-csv",
    "amd-smi-text",
    "ascend-info-910a",
    "ascend-info-m-310p",
    "ascend-usages-310p",
    "cambricon-table-v4",
    "cpu-lscpu-json",
    "enflame-q-text",
    "enflame-table-v17",
    "hygon-rocmsmi-text-z100",
    "intel-discovery-table",
    "kunlunxin-m-lines",
    "metax-table-229",
    "mthreads-table-s80",
    "neuron-ls-json",
    "pci-mixed-host",
    "rdma-two-ports",
    "tenstorrent-snapshot",
]


@pytest.mark.parametrize("name", LAYOUTS)
def test_ten_megabytes_of_a_layout_are_read_in_time(name: str) -> None:
    """Takes half a second at most: the pytest timeout would catch a runaway pattern."""
    capture = next(capture for capture in CAPTURES if capture.id == name)
    text = (capture.text * (BIG // len(capture.text) + 1))[:BIG]
    assert_plausible(capture.read(text))


@pytest.mark.parametrize(
    "pattern",
    ["|", "[", "\n", ",", "| 0 ", "\x1b[", '{"a":', "<?xml version='1.0'?><a>"],
)
def test_ten_megabytes_of_a_pattern_are_answered_in_time(pattern: str) -> None:
    text = pattern * (BIG // len(pattern))
    for vendor in all_vendors():
        assert_plausible(read_tool(vendor, "x", stdout=text))
