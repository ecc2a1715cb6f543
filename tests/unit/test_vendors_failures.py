"""Exit codes and error texts of tools and shells, in several languages, to error classes."""

import pytest

from hetrun.vendors import ToolError, all_vendors, read_tool

SHELLS = [
    ("bash: line 1: {}: command not found", None),
    ("/bin/sh: 1: {}: not found", None),
    ("sh: {}: not found", 1),
    ("zsh:1: command not found: {}", 1),
    ("fish: Unknown command: {}", None),
    ("{}: Command not found.", 1),
    ("bash: /usr/bin/{}: No such file or directory", 1),
    ("timeout: failed to run command '{}': No such file or directory", None),
    ("bash\uff1a行 1: {}\uff1a未找到命令", None),
    ("bash: {}: Kommando nicht gefunden.", 0),
    ("bash: {} : commande introuvable", 1),
    ("", 127),
    ("something else entirely", 127),
]


@pytest.mark.parametrize(("text", "rc"), SHELLS)
def test_any_shell_s_way_to_miss_a_tool_is_tool_missing(text: str, rc: int | None) -> None:
    for name, vendor in all_vendors().items():
        for tool in vendor.tools:
            answer = read_tool(name, f"{tool} -q", stderr=text.format(tool) + "\n", rc=rc)
            assert answer.error is ToolError.TOOL_MISSING, (name, tool)


@pytest.mark.parametrize(
    ("vendor", "text", "rc", "error"),
    [
        ("nvidia", "nvidia-smi: symbol lookup error: undefined symbol: nvmlInit", 127, "shared_lib_missing"),
        ("tenstorrent", "ModuleNotFoundError: No module named 'pyluwen'", 1, "shared_lib_missing"),
        ("nvidia", "bash: nvidia-smi: cannot execute binary file: Exec format error", 126, "tool_usage"),
        ("nvidia", "bash: /usr/bin/nvidia-smi: 权限不够", 126, "permission_denied"),
        ("amd", "rsmi_init() failed", 1, "driver_missing"),
        ("ascend", "Unable to get npu info, the DCMI module is not initialized. ret is -8005", 1, "permission_or_driver"),
        ("cambricon", "ERROR: Can not find Cambricon card.", 1, "no_devices"),
        ("cambricon", "CNDEV_ERROR_NO_DRIVER", 1, "driver_missing"),
        ("cambricon", "CNDEV_ERROR_NO_DEVICE", 1, "no_devices"),
        ("mthreads", "Error: failed to initialize mtml library, please check the driver.", 1, "driver_missing"),
        ("metax", "mx-smi: open /dev/mxcd: No such file or directory", 1, "driver_missing"),
        ("nvidia", "Failed to initialize NVML: Driver Not Loaded", 9, "driver_missing"),
        ("nvidia", "Failed to initialize NVML: GPU access blocked by the operating system", 4, "permission_denied"),
        ("amd", "ERROR: Unable to detect any GPU devices, check amdgpu version (sudo modprobe amdgpu)", 1, "driver_missing"),
        ("cambricon", "cnmon: 权限不够", 126, "permission_denied"),
        ("ascend", "dcmi module initialize failed. ret is -8002", 1, "permission_denied"),
        ("hygon", "No DCU devices found!", 0, "no_devices"),
        ("metax", "no MetaX device found", 0, "no_devices"),
        ("intel", "No device discovered", 0, "no_devices"),
        ("amd", "[]", 0, "no_devices"),
        ("cambricon", '{"CnmonInfo": []}', 0, "no_devices"),
        ("mthreads", '{"Attached GPUs": "0", "GPU": []}', 0, "no_devices"),
        ("enflame", '{"devices": []}', 0, "no_devices"),
        ("tenstorrent", '{"device_info": []}', 0, "no_devices"),
        ("neuron", "[]", 0, "no_devices"),
        ("gaudi", "hl-smi: device or resource busy", 1, "device_busy"),
        ("enflame", "usage: efsmi [-h] [-q]", 2, "tool_usage"),
        ("iluvatar", "ixsmi: unrecognized option '--nosuch'", 1, "tool_usage"),
        ("nvidia", "NVIDIA-SMI: GPU 0000:17:00.0 has fallen off the bus", 1, "device_lost"),
        ("kunlunxin", "", 137, "timeout"),
        ("biren", "", 143, "timeout"),
        ("nvidia", "", 6, "no_devices"),
        ("nvidia", "", 9, "driver_missing"),
    ],
)  # fmt: skip
def test_a_tool_s_own_words_give_the_class(vendor: str, text: str, rc: int, error: str) -> None:
    tool = all_vendors()[vendor].tools[0]
    assert read_tool(vendor, tool, stdout=f"{text}\n" if text else "", rc=rc).error == error


def test_a_header_without_rows_is_no_devices() -> None:
    command = "ixsmi --query-gpu=index,name --format=csv"
    assert read_tool("iluvatar", command, stdout="index, name\n").error is ToolError.NO_DEVICES


def test_output_that_nobody_understands_says_so() -> None:
    answer = read_tool("metax", "mx-smi", stdout="hello\n")
    assert (answer.error, answer.warnings) == (ToolError.TOOL_USAGE, ("output_unreadable",))
    crash = read_tool("intel", "xpu-smi discovery -j", stderr="Segmentation fault\n", rc=139)
    assert (crash.error, crash.warnings) == (ToolError.TOOL_USAGE, ("tool_crashed",))


def test_an_unknown_vendor_is_an_error_class() -> None:
    answer = read_tool("nobody", "nobody-smi", stdout="0, x\n")
    assert (answer.error, answer.warnings) == (ToolError.TOOL_USAGE, ("vendor_unknown",))


def test_a_tool_that_hangs_keeps_the_devices_it_had_printed() -> None:
    table = "npu-smi info"
    rows = (
        "| npu-smi 24.1.0                   Version: 24.1.0   |\n"
        "| NPU   Name     | Health | Power(W) Temp(C) Hugepages-Usage(page) |\n"
        "| Chip           | Bus-Id | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB) |\n"
        "| 0     910B3    | OK     | 96.4   51    0 / 0 |\n"
        "| 0              | 0000:C1:00.0 | 0   0 / 0   3389 / 65536 |\n"
    )
    answer = read_tool("ascend", table, stdout=rows, rc=124)
    assert answer.error is ToolError.TIMEOUT
    assert [device.memory_mib for device in answer.devices] == [65536]


def test_two_different_devices_under_one_number_are_both_dropped() -> None:
    command = "nvidia-smi --query-gpu=index,name --format=csv,noheader"
    rows = "0, NVIDIA L40S\n1, NVIDIA L40S\n1, NVIDIA L4\n0, NVIDIA L40S\n"
    answer = read_tool("nvidia", command, stdout=rows)
    assert [device.index for device in answer.devices] == [0]
    assert answer.error is ToolError.PARTIAL_DEVICE_ERROR
    assert "index_twice:1" in answer.warnings


def test_a_listing_without_numbers_is_numbered_in_order_and_says_so() -> None:
    command = "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader"
    answer = read_tool("nvidia", command, stdout="NVIDIA L40S, 46068 MiB\nNVIDIA L4, 23034 MiB\n")
    assert [(device.index, device.model) for device in answer.devices] == [
        (0, "NVIDIA L40S"),
        (1, "NVIDIA L4"),
    ]
    assert "index_assumed" in answer.warnings


def test_cards_of_another_maker_are_left_to_it() -> None:
    text = '{"card0": {"Card Series": "MI210", "Card Vendor": "Advanced Micro Devices, Inc."}}\n'
    answer = read_tool("hygon", "rocm-smi --showproductname --json", stdout=text)
    assert (answer.devices, answer.error) == ((), ToolError.NO_DEVICES)
    assert read_tool("amd", "rocm-smi --showproductname --json", stdout=text).devices


def test_every_error_class_has_a_hint() -> None:
    for error in ToolError:
        assert len(error.hint) > 20
        assert str(error) == error.value


@pytest.mark.parametrize("text", ['[{"gpu": ' + "9" * 5000 + "}]\n", "[" * 50_000 + "\n", "{" * 9])
def test_json_beyond_reason_is_not_understood(text: str) -> None:
    answer = read_tool("amd", "amd-smi list --json", stdout=text)
    assert (answer.error, answer.warnings) == (ToolError.TOOL_USAGE, ("output_unreadable",))


def test_one_line_longer_than_any_output_is_cut_not_lost() -> None:
    answer = read_tool("amd", "amd-smi list --json", stdout='[{"gpu": 0}, ' * 400_000)
    assert answer.error is ToolError.TOOL_USAGE
    assert "output_cut" in answer.warnings


def test_a_key_that_stands_twice_with_two_values_is_worth_nothing() -> None:
    text = '[{"neuron_device": 0, "memory_size": 34359738368, "memory_size": 8589934592}]\n'
    answer = read_tool("neuron", "neuron-ls -j", stdout=text)
    assert [device.memory_bytes for device in answer.devices] == [None]
    assert "memory_unknown" in answer.warnings


def test_devices_behind_a_bracket_in_a_warning_are_found() -> None:
    text = '[WARN] slow start {retry}\n[{"neuron_device": 0, "memory_size": 34359738368}]\n'
    assert len(read_tool("neuron", "neuron-ls -j", stdout=text).devices) == 1


def test_the_whole_devices_inside_a_broken_document_are_not_believed() -> None:
    text = '[\n  {"neuron_device": 0, "memory_size": 34359738368},\n  {"neuron_device": 1, "mem'
    assert read_tool("neuron", "neuron-ls -j", stdout=text).error is ToolError.TOOL_USAGE
