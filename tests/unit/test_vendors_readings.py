"""The small readings under all parsers, and the two listings that belong to no vendor."""

import pytest

from hetrun.vendors import ToolError, read_tool, rocev2_gids, scan_pci
from hetrun.vendors._read import text


@pytest.mark.parametrize(
    ("said", "unit", "mib"),
    [
        ("81920 MiB", None, 81920),
        ("81920MB", None, 81920),
        ("48GiB", None, 49152),
        ("31.25 GiB", None, 32000),
        ("32768Mib", None, 32768),
        ("67108864 KBytes", None, 65536),
        ("68719476736", "B", 65536),
        (65536, "MiB", 65536),
        ("81920", None, None),
        ("0 MiB", None, None),
        ("-1", "MiB", None),
        ("N/A", "MiB", None),
        ("[Insufficient Permissions]", "MiB", None),
        ("9" * 30, "MiB", None),
        ("81920 MiB free", None, None),
        (True, "MiB", None),
        (None, "MiB", None),
    ],
)
def test_memory_is_read_with_its_unit_or_not_at_all(
    said: object, unit: str | None, mib: int | None
) -> None:
    assert text.memory(said, unit) == (None if mib is None else mib << 20)


@pytest.mark.parametrize(
    ("said", "bus_id"),
    [
        ("00000000:0F:00.0", "0000:0f:00.0"),
        ("0000000F:01:00.0", "000f:01:00.0"),
        ("00:01:00.0", "0000:01:00.0"),
        ("cc:00.0", "0000:cc:00.0"),
        ("bus 10000:01:00.0 here", "10000:01:00.0"),
        ("0000:9D:00.", None),
        ("0000:9D:3f.0", None),
        ("0000:9D:00.8", None),
        ("16:04:37", None),
        ("N/A", None),
        (7, None),
    ],
)
def test_pci_addresses_are_normalised(said: object, bus_id: str | None) -> None:
    assert text.bdf(said) == bus_id


def test_a_row_with_a_column_missing_is_no_device() -> None:
    table = (
        "| npu-smi 24.1.0          Version: 24.1.0   |\n"
        "| NPU   Name     | Health | Power(W) Temp(C) Hugepages-Usage(page) |\n"
        "| Chip           | Bus-Id | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB) |\n"
        "| 0     910B3    | OK     | 96.4   51    0 / 0 |\n"
        "| 0              | 0000:C1:00.0 | 0   3389 / 15169 |\n"
    )
    answer = read_tool("ascend", "npu-smi info", stdout=table)
    assert (answer.devices, answer.error) == ((), ToolError.PARTIAL_DEVICE_ERROR)


def test_the_device_that_tells_more_wins_whatever_the_order() -> None:
    one = '{"device_id": 0, "device_name": "B580", "memory_physical_size_byte": "12884901888"}\n'
    many = '{"device_list": [{"device_id": 0, "device_name": "B580"}]}\n'
    for output in (one + many, many + one):
        answer = read_tool("intel", "xpu-smi discovery -j", stdout=output)
        assert [device.memory_mib for device in answer.devices] == [12288]


def test_a_broken_list_is_not_read_as_single_devices() -> None:
    device = '{"device_id": 0, "device_name": "Intel(R) Arc(TM) B580 Graphics"}'
    answer = read_tool(
        "intel", "xpu-smi discovery -j", stdout='{"device_list": [\n' + device + ",\n"
    )
    assert (answer.devices, answer.error) == ((), ToolError.TOOL_USAGE)


def test_a_pci_function_counts_once_and_other_lines_not_at_all() -> None:
    line = "0000:41:00.0 0x10de 0x20b5 0x030200\n"
    scan = scan_pci(f"{line}{line}cat: No such file\n0000:42:00.0 0x10de 0x20b5 0x0302\n")
    assert [(group.vendor, group.bus_ids) for group in scan.accelerators] == [
        ("nvidia", ("0000:41:00.0",))
    ]


def test_lspci_numbers_are_read_too_and_unknown_accelerators_are_named() -> None:
    scan = scan_pci("41:00.0 0302: 10de:20b5 (rev a1)\n42:00.0 1200: 1ed2:0001\n")
    assert [group.bus_ids for group in scan.accelerators] == [("0000:41:00.0",)]
    assert scan.ignored == ("1ed2 accelerator 1ed2:0001",)


PORT = "/sys/class/infiniband/mlx5_0/ports/1/"


def test_a_global_ipv6_address_is_taken_where_there_is_no_ipv4() -> None:
    listing = (
        f"{PORT}gid_attrs/types/0:RoCE v2\n{PORT}gid_attrs/types/1:RoCE v2\n"
        f"{PORT}gids/0:fe80:0000:0000:0000:0e42:a1ff:fe5c:7d10\n"
        f"{PORT}gids/1:2001:0db8:0000:0000:0000:0000:0000:0001\n"
    )
    [port] = rocev2_gids(listing)
    assert (port.rocev2_gid_index, port.ip) == (1, "2001:db8::1")


def test_an_address_of_the_old_protocol_or_a_cut_one_is_never_taken() -> None:
    old = f"{PORT}gid_attrs/types/3:IB/RoCE v1\n{PORT}gids/3:0000:0000:0000:0000:0000:ffff:0a14:0305\n"
    cut = f"{PORT}gid_attrs/types/3:RoCE v2\n{PORT}gids/3:0000:0000:0000:0000:0000:ffff:0a14:03"
    for listing in (old, cut):
        [port] = rocev2_gids(listing)
        assert (port.rocev2_gid_index, port.ip) == (None, None)


@pytest.mark.parametrize("name", ["pci", "rdma"])
def test_a_listing_with_nothing_in_it_is_an_error_class(name: str) -> None:
    assert read_tool(name, "x", stdout="\n").error is ToolError.NO_DEVICES
    assert read_tool(name, "x", stdout="hello\n").error is ToolError.TOOL_USAGE


def test_chip_line_before_any_npu_line_is_no_chip() -> None:
    text = "Chip ID : 0\nNPU ID : 3\nChip Count : 1\n"
    (device,) = read_tool("ascend", "npu-smi info -l", stdout=text).devices
    assert (device.npu_id, device.chip_id) == (3, 0)


@pytest.mark.parametrize(
    ("text", "rc", "error"),
    [
        ("No devices were found\n", 0, ToolError.NO_DEVICES),
        ("Something 5 went wrong.\n", 0, ToolError.TOOL_USAGE),
        ("NVIDIA-SMI 550 hiccup\n", 3, ToolError.TOOL_USAGE),
        ("Failed to initialize NVML: Unknown Error\n", 255, ToolError.DEVICE_ACCESS_LOST),
    ],
)
def test_sentence_is_no_product_though_one_column_was_asked_for(
    text: str, rc: int, error: ToolError
) -> None:
    query = "nvidia-smi --query-gpu=name --format=csv,noheader"
    answer = read_tool("nvidia", query, stdout=text, rc=rc)
    assert (answer.devices, answer.error) == ((), error)
