"""Tools' answers, the bus and the nodes -> devices and warnings."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from hetrun.model import EmulatedChip, HostSpec, Source
from hetrun.probe.answer import read_answer
from hetrun.probe.devices import Found, accelerators, cpu_devices, emulated_devices
from hetrun.vendors import ProbeCommand, ToolError, all_vendors
from tests.unit.probe_output import NONCE, PLAIN, output
from tests.vendors.captures import CAPTURES, Capture

SPEC = HostSpec(name="a1")
GIB = 1 << 30
NVIDIA_PCI = "0000:41:00.0 0x10de 0x20b5 0x030200\n0000:42:00.0 0x10de 0x20b5 0x030200\n"
NVIDIA_CSV = (
    "0, NVIDIA A100 80GB PCIe, GPU-11111111-2222-3333-4444-555555555555, 00000000:41:00.0, 81920, 550.54.15, Disabled\n"
    "1, NVIDIA A100 80GB PCIe, GPU-11111111-2222-3333-4444-666666666666, 00000000:42:00.0, 81920, 550.54.15, Disabled\n"
)
NVIDIA_NODES = "".join(
    f"open crw-rw-rw- 1 root root 195, {number} Nov 21 00:15 /dev/nvidia{number}\n"
    for number in (0, 1)
)
# One function of each vendor whose chips the bus can tell.
PCI = {
    name: f"0000:51:00.0 0x{vendor.pci_ids.vendors[0]} 0x{next(iter(vendor.pci_ids.devices), '0001')} 0x120000\n"
    for name, vendor in all_vendors().items()
    if vendor.pci_ids.vendors
}
ILUVATAR_PCI = "0000:51:00.0 0x1e3e 0x0003 0x120000\n"


def find(
    sections: Mapping[str, str],
    rc: Mapping[str, int] | None = None,
    stderr: Mapping[str, str] | None = None,
) -> Found:
    missing = {
        f"tool-{name}-{index}": 127
        for name, vendor in all_vendors().items()
        for index in range(len(vendor.probe_commands))
        if f"tool-{name}-{index}" not in sections
    }
    said = {**PLAIN, **dict.fromkeys(missing, ""), **sections}
    text = output(said, rc={**missing, **(rc or {})}, stderr=stderr)
    return accelerators(SPEC, read_answer(text, nonce=NONCE), all_vendors(), memory_bytes=100 * GIB)


def test_tool_and_bus_that_agree_give_devices_and_no_warning() -> None:
    found = find({"pci": NVIDIA_PCI, "tool-nvidia-0": NVIDIA_CSV, "nodes": NVIDIA_NODES})
    assert found.warnings == ()
    assert [device.index for device in found.devices] == [0, 1]
    second = found.devices[1]
    assert (second.vendor, second.model) == ("nvidia", "NVIDIA A100 80GB PCIe")
    assert (second.memory.value, second.memory.source) == (80 * GIB, Source.MEASURED)
    assert (second.vendor_index, second.visible_id) == (1, "1")
    assert (second.bus_id, second.driver) == ("0000:42:00.0", "550.54.15")


def test_device_that_only_the_bus_shows_is_named() -> None:
    one = NVIDIA_CSV.splitlines(keepends=True)[0]
    found = find({"pci": NVIDIA_PCI, "tool-nvidia-0": one, "nodes": NVIDIA_NODES})
    assert len(found.devices) == 1
    assert found.warnings == ("NVIDIA: 2 on the PCI bus, 1 in its tool; not shown: 0000:42:00.0",)


def test_missing_tool_matters_only_where_the_bus_shows_a_device() -> None:
    assert find({}) == Found(is_bare=True)
    found = find({"pci": NVIDIA_PCI, "nodes": NVIDIA_NODES})
    assert (found.devices, found.is_bare) == ((), False)
    assert "NVIDIA: nvidia-smi: tool_missing; install" in found.warnings[0]
    assert "not shown: 0000:41:00.0, 0000:42:00.0" in found.warnings[1]


def test_wedged_tool_is_a_timeout() -> None:
    found = find({"pci": NVIDIA_PCI, "tool-nvidia-0": ""}, rc={"tool-nvidia-0": 124})
    assert "NVIDIA: nvidia-smi: timeout" in found.warnings[0]


def test_words_of_a_failing_tool_are_passed_on_cleaned() -> None:
    words = (
        "NVIDIA-SMI has failed because it couldn't communicate with the \x1b[31mNVIDIA driver.\n"
    )
    found = find({"pci": NVIDIA_PCI, "tool-nvidia-0": words}, rc={"tool-nvidia-0": 9})
    assert "driver_missing (it says: NVIDIA-SMI has failed" in found.warnings[0]
    assert "\x1b" not in found.warnings[0]


def test_second_command_serves_where_the_first_fails() -> None:
    short = "\n".join(line.rsplit(", ", 1)[0] for line in NVIDIA_CSV.splitlines()) + "\n"
    found = find(
        {
            "pci": NVIDIA_PCI,
            "nodes": NVIDIA_NODES,
            "tool-nvidia-0": 'Field "mig.mode.current" is not a valid field to query.\n',
            "tool-nvidia-1": short,
        },
        rc={"tool-nvidia-0": 2},
    )
    assert (len(found.devices), found.warnings) == (2, ())


def test_vendors_on_one_host_are_numbered_on() -> None:
    rows = "0, Iluvatar BI-V150, GPU-4c0b7d1e-2f83-5a96-b1c7-d05e8f24a379, 32768 MiB, 4.1.2, 00000000:51:00.0\n"
    found = find(
        {
            "pci": NVIDIA_PCI + ILUVATAR_PCI,
            "tool-nvidia-0": NVIDIA_CSV,
            "tool-iluvatar-0": rows,
            "nodes": NVIDIA_NODES
            + "open crw-rw-rw- 1 root root 5, 0 Nov 21 00:15 /dev/iluvatar0\n",
        }
    )
    assert [(device.index, device.vendor) for device in found.devices] == [
        (0, "iluvatar"),
        (1, "nvidia"),
        (2, "nvidia"),
    ]


def test_lookalike_tool_does_not_steal_anothers_devices() -> None:
    theirs = NVIDIA_CSV.splitlines(keepends=True)[0].replace("41:00.0", "51:00.0")
    found = find({"pci": ILUVATAR_PCI, "tool-nvidia-0": theirs})
    assert found.devices == ()


def test_memory_comes_from_published_figures_where_the_tool_is_silent() -> None:
    csv = NVIDIA_CSV.replace("81920", "[N/A]")
    device = find({"pci": NVIDIA_PCI, "tool-nvidia-0": csv}).devices[0]
    assert (device.memory.value, device.memory.source) == (80 * GIB, Source.SPEC)
    assert "A100" in device.memory.why


def test_unified_memory_is_the_hosts_and_says_so() -> None:
    csv = "0, NVIDIA GB10, GPU-11111111-2222-3333-4444-555555555555, 0000000F:01:00.0, [N/A], 580.95.05, [N/A]\n"
    device = find({"pci": "000f:01:00.0 0x10de 0x2e12 0x030000\n", "tool-nvidia-0": csv}).devices[0]
    assert (device.memory.value, device.memory.source) == (100 * GIB, Source.ASSUMED)


def test_node_that_this_user_cannot_open_is_named_with_its_group() -> None:
    nodes = NVIDIA_NODES.splitlines()[0] + (
        "\nclosed crw-rw---- 1 root video 195, 1 Nov 21 00:15 /dev/nvidia1\n"
    )
    found = find({"pci": NVIDIA_PCI, "tool-nvidia-0": NVIDIA_CSV, "nodes": nodes})
    assert found.warnings == (
        "NVIDIA: this user may not open /dev/nvidia1 (crw-rw---- root video); add it to that group",
    )


def test_fewer_nodes_than_devices_are_counted() -> None:
    one = NVIDIA_NODES.splitlines(keepends=True)[0]
    found = find({"pci": NVIDIA_PCI, "tool-nvidia-0": NVIDIA_CSV, "nodes": one})
    assert len(found.devices) == 2
    assert "NVIDIA: 2 in its tool, 1 device nodes" in found.warnings[0]


def test_device_of_a_tool_that_is_not_on_the_bus_is_named() -> None:
    first = NVIDIA_PCI.splitlines(keepends=True)[0]
    found = find({"pci": first, "tool-nvidia-0": NVIDIA_CSV, "nodes": NVIDIA_NODES})
    assert len(found.devices) == 2
    assert "its tool shows 0000:42:00.0, which the PCI bus does not" in found.warnings[0]


def test_sliced_device_is_not_offered_whole_though_the_query_shows_no_slice() -> None:
    csv = NVIDIA_CSV.replace("Disabled", "Enabled", 1)
    found = find({"pci": NVIDIA_PCI, "tool-nvidia-0": csv, "nodes": NVIDIA_NODES})
    assert [device.vendor_index for device in found.devices] == [1]
    assert "1 of 2 devices are split into partitions and not offered" in found.warnings[0]


def test_two_dies_of_a_board_are_two_devices_and_no_miscount() -> None:
    rows = "".join(
        f"{die}, Iluvatar BI-V150, GPU-4c0b7d1e-2f83-5a96-b1c7-d05e8f24a37{die}, 32768 MiB, 4.1.2, 00000000:51:00.0\n"
        for die in (0, 1)
    )
    nodes = "open crw-rw-rw- 1 root root 5, 0 Nov 21 00:15 /dev/iluvatar0\n"
    found = find({"pci": ILUVATAR_PCI, "tool-iluvatar-0": rows, "nodes": nodes})
    assert (len(found.devices), found.warnings) == (2, ())


def test_broken_driver_is_told_even_where_the_bus_cannot_be_seen() -> None:
    words = "Failed to initialize NVML: Driver/library version mismatch\n"
    found = find({"pci": "", "tool-nvidia-0": words}, rc={"tool-nvidia-0": 18})
    assert found.is_bare
    (warning,) = found.warnings
    assert "driver_mismatch" in warning
    assert ToolError.DRIVER_MISMATCH.hint in warning


ERRORS = [capture for capture in CAPTURES if capture.expect.get("error") and capture.vendor in PCI]


@pytest.mark.parametrize("capture", ERRORS, ids=lambda capture: capture.id)
def test_every_error_class_of_the_captures_reaches_the_user_with_its_hint(capture: Capture) -> None:
    """Each capture stands for the vendor's first command, on a host whose bus shows one of its chips."""
    vendor = replace(
        all_vendors()[capture.vendor], probe_commands=(ProbeCommand(command=capture.command),)
    )
    section = f"tool-{capture.vendor}-0"
    texts = {section: "" if capture.stream == "stderr" else capture.text}
    said = {section: capture.text} if capture.stream == "stderr" else None
    text = output(
        {**PLAIN, "pci": PCI[capture.vendor], **texts},
        rc={section: 0 if capture.rc is None else capture.rc},
        stderr=said,
    )
    answer = read_answer(text, nonce=NONCE)
    found = accelerators(SPEC, answer, {capture.vendor: vendor}, memory_bytes=None)
    error = ToolError(capture.expect["error"])
    assert [w for w in found.warnings if f": {error}" in w and w.endswith(error.hint)]


def test_captures_hold_every_error_class() -> None:
    assert {capture.expect["error"] for capture in ERRORS} == {error.value for error in ToolError}


def test_container_without_nodes_is_told() -> None:
    found = find({"pci": NVIDIA_PCI, "tool-nvidia-0": NVIDIA_CSV, "nodes": ""})
    assert "no device node" in found.warnings[0]


def test_processor_bridges_of_a_chip_maker_are_no_accelerators() -> None:
    bridges = "0000:00:00.0 0x1d94 0x1450 0x060000\n0000:06:00.0 0x1d94 0x7901 0x010601\n"
    assert find({"pci": bridges}) == Found(is_bare=True)


def test_emulated_chips_are_modelled() -> None:
    chips = tuple(
        EmulatedChip(vendor="v", model=name, num_devices=2, flops_per_s=1.0, memory_bytes=7)
        for name in ("m", "n")
    )
    devices = emulated_devices(HostSpec(name="a", emulate=chips))
    assert [(device.index, device.model) for device in devices] == [
        (0, "m"),
        (1, "m"),
        (2, "n"),
        (3, "n"),
    ]
    assert {device.memory.source for device in devices} == {Source.MODELLED}


def test_processor_is_shared_out_equally() -> None:
    devices = cpu_devices(HostSpec(name="a", cpu_devices=3), model="X", memory_bytes=10)
    assert [device.memory.value for device in devices] == [3, 3, 3]
    nothing = cpu_devices(HostSpec(name="a", cpu_devices=3), model="X", memory_bytes=2)[0]
    assert nothing.memory.value is None  # a share of no byte is no size
    unknown = cpu_devices(HostSpec(name="a"), model=None, memory_bytes=None)[0]
    assert (unknown.model, unknown.memory.value) == ("unknown", None)
