"""Split devices: MIG instances, partitions that share memory, virtual devices, tiles."""

from __future__ import annotations

import pytest

from hetrun.model import Source
from hetrun.vendors import get_vendor, read_tool
from tests.unit.test_probe_devices import GIB, NVIDIA_CSV, NVIDIA_NODES, NVIDIA_PCI, find
from tests.vendors.captures import ROOT

GPU = "GPU-11111111-2222-3333-4444-555555555555"
MIG = [f"MIG-0c2f7ad1-98b3-5e17-a6cf-00000000000{number}" for number in range(4)]
LISTING = (
    f"GPU 0: NVIDIA A100 80GB PCIe (UUID: {GPU})\n"
    f"  MIG 3g.40gb     Device  0: (UUID: {MIG[0]})\n"
    f"  MIG 1g.10gb     Device  1: (UUID: {MIG[1]})\n"
    "GPU 1: NVIDIA A100 80GB PCIe (UUID: GPU-11111111-2222-3333-4444-666666666666)\n"
)
TABLE = """\
+---------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |
|-----------------------------------------+----------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |         Memory-Usage | GPU-Util  Compute M. |
|                                         |                      |               MIG M. |
|=========================================+======================+======================|
|   0  NVIDIA A100 80GB PCIe          Off | 00000000:41:00.0 Off |                   On |
| N/A   47C    P0              78W / 300W |     87MiB / 81920MiB |     N/A      Default |
|                                         |                      |              Enabled |
+-----------------------------------------+----------------------+----------------------+

+---------------------------------------------------------------------------------------+
| MIG devices:                                                                          |
+------------------+--------------------------------+-----------+-----------------------+
| GPU  GI  CI  MIG |                   Memory-Usage |        Vol|      Shared           |
|      ID  ID  Dev |                     BAR1-Usage | SM     Unc| CE ENC DEC OFA JPG    |
|==================+================================+===========+=======================|
|  0    2   0   0  |              37MiB / 40192MiB  | 42      0 |  3   0    2    0    0 |
|                  |               0MiB / 65535MiB  |           |                       |
+------------------+--------------------------------+-----------+-----------------------+
"""
PCI = {"pci": NVIDIA_PCI, "nodes": NVIDIA_NODES}
SLICED = NVIDIA_CSV.replace("Disabled", "Enabled", 1)


def test_instances_are_offered_in_place_of_their_gpu() -> None:
    found = find({**PCI, "tool-nvidia-0": SLICED, "tool-nvidia-2": TABLE, "tool-nvidia-3": LISTING})
    first, second, whole = found.devices
    assert first.model == "NVIDIA A100 80GB PCIe MIG 3g.40gb"
    assert (first.visible_id, first.uuid, first.bus_id) == (MIG[0], MIG[0], "0000:41:00.0")
    assert (first.driver, first.vendor_index) == ("550.54.15", None)
    assert (first.memory.value, first.memory.source) == (40192 << 20, Source.MEASURED)
    assert (second.memory.value, second.memory.source) == (10 * 10**9, Source.ASSUMED)
    assert "profile's name" in second.memory.why
    assert (whole.vendor_index, whole.visible_id, whole.memory.value) == (1, "1", 80 * GIB)
    assert [device.index for device in found.devices] == [0, 1, 2]
    (warning,) = found.warnings
    assert "2 instances of one device: NCCL" in warning
    assert "NCCL before 2.30 takes one rank per GPU" in warning


def test_one_instance_on_each_gpu_is_nothing_to_warn_of() -> None:
    one = "".join(line for line in LISTING.splitlines(keepends=True) if "1g.10gb" not in line)
    found = find({**PCI, "tool-nvidia-0": SLICED, "tool-nvidia-3": one})
    assert (len(found.devices), found.warnings) == (2, ())


def test_listing_alone_makes_a_gpu_split_where_the_query_may_not_say() -> None:
    csv = NVIDIA_CSV.replace("Disabled", "[Insufficient Permissions]", 1)
    found = find({**PCI, "tool-nvidia-0": csv, "tool-nvidia-3": LISTING})
    assert [device.visible_id for device in found.devices] == [MIG[0], MIG[1], "1"]


@pytest.mark.parametrize(
    ("profile", "num_bytes"),
    [
        ("1c.3g.40gb", 40 * 10**9 // 3),  # three of them share 40 GB
        ("2c.3g.40gb", 40 * 10**9 * 2 // 3),
        ("1g.10gb+me", 10 * 10**9),
        ("7g.141gb", 141 * 10**9),
        ("1g", None),
    ],
)
def test_profile_s_name_tells_the_memory(profile: str, num_bytes: int | None) -> None:
    text = LISTING.replace("3g.40gb", profile)
    device = find({**PCI, "tool-nvidia-0": SLICED, "tool-nvidia-3": text}).devices[0]
    assert (device.memory.value, device.memory.source) == (num_bytes, Source.ASSUMED)


def test_instances_without_an_id_are_counted_not_offered() -> None:
    found = find({**PCI, "tool-nvidia-0": SLICED, "tool-nvidia-2": TABLE})
    assert [device.vendor_index for device in found.devices] == [1]
    assert "1 of 2 devices are split into partitions and not offered" in found.warnings[0]


def test_a_slice_has_none_of_its_gpu_s_published_figures() -> None:
    vendor = get_vendor("nvidia")
    assert vendor.find_model("NVIDIA A100 80GB PCIe") is not None
    assert vendor.find_model("NVIDIA A100 80GB PCIe MIG 3g.40gb") is None


def test_table_cut_among_the_instances_says_so() -> None:
    cut = TABLE[: TABLE.index("37MiB / 40192MiB")]
    assert "output_unterminated" in read_tool("nvidia", "nvidia-smi", stdout=cut).warnings
    assert "output_unterminated" not in read_tool("nvidia", "nvidia-smi", stdout=TABLE).warnings


def test_log_in_xml_tells_each_instance_s_memory() -> None:
    text = (
        '<?xml version="1.0" ?>\n<nvidia_smi_log><attached_gpus>1</attached_gpus>'
        '<gpu id="00000000:41:00.0"><product_name>NVIDIA A100</product_name>'
        "<mig_mode><current_mig>Enabled</current_mig></mig_mode><mig_devices>"
        "<mig_device><index>0</index><fb_memory_usage><total>20096 MiB</total></fb_memory_usage></mig_device>"
        "<mig_device><index>1</index><fb_memory_usage><total>N/A</total></fb_memory_usage></mig_device>"
        "</mig_devices><fb_memory_usage><total>40960 MiB</total></fb_memory_usage></gpu></nvidia_smi_log>\n"
    )
    (device,) = read_tool("nvidia", "nvidia-smi -q -x", stdout=text).devices
    assert device.partition_bytes == ((0, 20096 << 20),)
    assert [part.ordinal for part in device.partitions] == [0, 1]


AMD_PCI = "0000:0c:00.0 0x1002 0x74a1 0x120000\n"
AMD_NODES = "open crw-rw-rw- 1 root render 235, 0 Nov 21 00:15 /dev/kfd\n"


def _amd(size: int, *, functions: int = 4) -> dict[str, str]:
    gpus = ", ".join(
        f'{{"gpu": {number}, "asic": {{"market_name": "AMD Instinct MI300X"}}, '
        f'"bus": {{"bdf": "0000:0c:00.{number}"}}, "vram": {{"size": {{"value": {size}, "unit": "MB"}}}}}}'
        for number in range(functions)
    )
    return {"pci": AMD_PCI, "nodes": AMD_NODES, "tool-amd-0": f"[{gpus}]\n"}


def test_partitions_that_show_all_memory_get_a_share_each() -> None:
    found = find({**_amd(196592), "numa": "0000:0c:00.0 1\n"})
    assert {(d.memory.value, d.memory.source) for d in found.devices} == {
        ((196592 << 20) // 4, Source.ASSUMED)
    }
    assert [device.bus_id for device in found.devices] == [f"0000:0c:00.{n}" for n in range(4)]
    assert {device.numa_node for device in found.devices} == {1}
    (warning,) = found.warnings
    assert "partitions of 0000:0c:00 each show the memory of all" in warning


def test_partitions_whose_memory_is_divided_already_keep_it() -> None:
    found = find(_amd(49148))
    assert {d.memory.value for d in found.devices} == {49148 << 20}
    assert {d.memory.source for d in found.devices} == {Source.MEASURED}
    assert found.warnings == ()


def test_virtual_devices_tiles_and_cores_are_told_not_lost() -> None:
    ascend = (ROOT / "ascend" / "ascend-info-910b3.txt").read_text()
    nodes = "open crw-rw---- 1 root HwHiAiUser 240, 100 Nov 21 00:15 /dev/vdavinci100\n"
    found = find({"pci": "", "tool-ascend-1": ascend, "nodes": nodes})
    assert any("virtual devices /dev/vdavinci100 are there" in text for text in found.warnings)
    intel = (ROOT / "intel" / "intel-xpusmi-device-v1.txt").read_text()
    assert any("2 tiles are offered whole" in w for w in find({"tool-intel-0": intel}).warnings)
    assert get_vendor("intel").extra_env == {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}
    neuron = (ROOT / "neuron" / "neuron-ls-json.txt").read_text()
    assert any("4 cores are offered whole" in w for w in find({"tool-neuron-0": neuron}).warnings)
