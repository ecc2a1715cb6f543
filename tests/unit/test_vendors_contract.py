"""What holds for every vendor, also for one that another package brings."""

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import hetrun.vendors
from hetrun.errors import ConfigError
from hetrun.model import Source
from hetrun.vendors import (
    Confidence,
    FoundDevice,
    PciIds,
    ProbeCommand,
    ToolAnswer,
    ToolError,
    Vendor,
    all_vendors,
    get_vendor,
    read_tool,
    scan_pci,
)

VENDORS = tuple(all_vendors().values())
NAMES = [vendor.name for vendor in VENDORS]
HEX4 = re.compile(r"[0-9a-f]{4}")


@pytest.fixture(autouse=True)
def fresh_vendors() -> Iterator[None]:
    all_vendors.cache_clear()
    yield
    all_vendors.cache_clear()


def test_names_are_unique_and_those_of_their_files() -> None:
    folder = Path(hetrun.vendors.__file__).parent
    files = {path.stem for path in folder.glob("[a-z]*.py")} - {
        "pci",
        "rdma",
        "doc",
        "topology",
        "ports",
    }
    assert set(NAMES) == files
    assert len({vendor.title for vendor in VENDORS}) == len(VENDORS)


@pytest.mark.parametrize("vendor", VENDORS, ids=NAMES)
def test_fields_are_sane(vendor: Vendor) -> None:
    assert vendor.probe_commands
    for command in vendor.probe_commands:
        assert any(tool in command.command for tool in vendor.tools)
        assert all(path.startswith("/") for path in command.paths)
    assert vendor.torch_device.isalpha()
    assert vendor.visible_devices_id in ("index", "uuid", "module_id", "cores")
    assert vendor.visible_devices_env is None or vendor.visible_devices_env.isupper()
    assert all(node.startswith("/dev/") for node in vendor.device_nodes)
    assert all(root.startswith("/") for root in vendor.sdk_roots)
    assert all(part == part.lower() for part, _ in vendor.errors)
    assert all(note.endswith(".") for note in vendor.notes)


@pytest.mark.parametrize("vendor", VENDORS, ids=NAMES)
def test_pci_ids_are_lower_case_hex_and_consistent(vendor: Vendor) -> None:
    ids = vendor.pci_ids
    every = [*ids.vendors, *ids.devices, *ids.skip]
    assert all(HEX4.fullmatch(number) for number in every)
    assert not set(ids.devices) & set(ids.skip)
    assert all(re.fullmatch(r"[0-9a-f]{2,4}", prefix) for prefix in ids.classes)
    assert bool(ids.vendors) == (vendor.name != "cpu")
    assert not ids.known_only or ids.devices


@pytest.mark.parametrize("vendor", VENDORS, ids=NAMES)
def test_chips_are_found_by_their_names_and_know_what_they_do_not_know(vendor: Vendor) -> None:
    for chip in vendor.models:
        assert all(part == part.lower() for part in chip.match)
        assert all(vendor.find_model(part.upper()) is chip for part in chip.match), chip.name
        assert (chip.peak_flops.value is None) == (chip.peak_tflops is None)
        if chip.peak_tflops is not None:
            assert chip.peak_flops.source is Source.SPEC
            assert chip.confidence is not Confidence.UNKNOWN
            assert 10e12 < (chip.peak_flops.value or 0) < 10_000e12
        assert chip.memory_bytes is None or chip.memory_bytes > 1 << 30
        assert chip.source


@pytest.mark.parametrize("vendor", VENDORS, ids=NAMES)
def test_a_chip_of_the_pci_table_is_an_accelerator_of_its_vendor_only(vendor: Vendor) -> None:
    ids = vendor.pci_ids
    pci_class = (ids.classes[0] + "00")[:4]
    for device in ids.devices:
        line = f"0000:01:00.0 0x{ids.vendors[0]} 0x{device} 0x{pci_class}00"
        assert [group.vendor for group in scan_pci(line).accelerators] == [vendor.name]


def test_vendors_with_one_backend_name_have_different_libraries() -> None:
    families = [vendor.collective_family for vendor in VENDORS]
    assert len(set(families)) == len(families)
    assert sum(vendor.collective_backend == "nccl" for vendor in VENDORS) > 1


@pytest.mark.parametrize(
    ("vendor", "name", "chip"),
    [
        ("nvidia", "NVIDIA A10", "A10"),
        ("nvidia", "NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("nvidia", "NVIDIA H200 NVL", "H200 NVL"),
        ("nvidia", "NVIDIA A10G", None),
        ("nvidia", "NVIDIA GH200 480GB", None),
        ("nvidia", None, None),
        ("enflame", "ZIXIAOC200", "S60"),
        ("gaudi", "HL-225", "Gaudi2"),
        ("intel", "Intel(R) Graphics [0xe211]", "Arc Pro B60"),
        ("ascend", "910B4-1", "Ascend 910B4-1"),
        ("ascend", "Ascend 910B3", "Ascend 910B3"),
    ],
)
def test_names_that_tools_print_mean_the_right_chip(
    vendor: str, name: str | None, chip: str | None
) -> None:
    found = get_vendor(vendor).find_model(name)
    assert (found.name if found else None) == chip


def test_a_sliced_device_has_no_visible_id() -> None:
    command = "nvidia-smi --query-gpu=index,name,mig.mode.current --format=csv,noheader"
    answer = read_tool(
        "nvidia", command, stdout="0, NVIDIA A30, Enabled\n1, NVIDIA A30, Disabled\n"
    )
    assert [device.visible_id for device in answer.devices] == [None, "1"]


def test_a_vendor_s_variable_takes_the_id_it_asks_for() -> None:
    text = "3, 5, HL-225\n"
    answer = read_tool("gaudi", "hl-smi -Q index,module_id,name -f csv,noheader", stdout=text)
    assert [device.visible_id for device in answer.devices] == ["5"]


def test_cores_of_a_device_are_its_visible_id_where_the_tool_tells_them() -> None:
    text = (
        '[{"neuron_device": 0, "neuroncore_ids": [0, 1]}, {"neuron_device": 1},'
        ' {"neuron_device": 2, "neuroncore_ids": [4]}, {"neuron_device": 3, "neuroncore_ids": [6, 8]}]'
    )
    answer = read_tool("neuron", "neuron-ls -j", stdout=f"{text}\n")
    assert [device.visible_id for device in answer.devices] == ["0-1", None, "4", None]


def parse_dummy(run: object) -> ToolAnswer:
    return ToolAnswer(devices=(FoundDevice(index=0, model="Dummy 1", uuid="D-7"),))


DUMMY = Vendor(
    name="dummy",
    title="Dummy",
    parse=parse_dummy,
    tools=("dummy-smi",),
    probe_commands=(ProbeCommand("dummy-smi"),),
    torch_device="dummy",
    torch_plugin="torch_dummy",
    collective_backend="dccl",
    collective_family="dccl",
    visible_devices_env="DUMMY_VISIBLE_DEVICES",
    visible_devices_id="uuid",
    pci_ids=PciIds(vendors=("fffe",), company="dummy"),
)


def bring(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = EntryPoint(name="dummy", value=value, group="hetrun.vendors")
    monkeypatch.setattr(hetrun.vendors, "entry_points", lambda group: [entry])


def test_a_vendor_of_another_package_needs_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, f"{__name__}:DUMMY")
    assert get_vendor("dummy") == DUMMY
    assert set(all_vendors()) == {*NAMES, "dummy"}
    answer = read_tool("dummy", "dummy-smi", stdout="x\n")
    assert [device.visible_id for device in answer.devices] == ["D-7"]
    groups = scan_pci("0000:01:00.0 0xfffe 0x0001 0x120000\n").accelerators
    assert [(group.vendor, group.count) for group in groups] == [("dummy", 1)]


def fail(run: object) -> ToolAnswer:
    raise KeyError("index")


FAILING = replace(DUMMY, parse=fail)


def test_a_parser_that_raises_is_an_error_class(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, f"{__name__}:FAILING")
    answer = read_tool("dummy", "dummy-smi", stdout="0, x\n")
    assert (answer.error, answer.warnings) == (ToolError.TOOL_USAGE, ("parser_failed",))


def test_an_entry_point_that_is_no_vendor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, f"{__name__}:NAMES")
    with pytest.raises(ConfigError, match=r"entry point dummy .* is no Vendor"):
        all_vendors()


def test_an_entry_point_cannot_take_a_name_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, "hetrun.vendors.cpu:VENDOR")
    with pytest.raises(ConfigError, match="vendor cpu is there already"):
        all_vendors()


def test_an_unknown_vendor_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'nobody' is not known") as error:
        get_vendor("nobody")
    assert "nvidia" in (error.value.hint or "")


def test_vendors_stand_in_order_of_name() -> None:
    assert list(all_vendors()) == sorted(NAMES)
