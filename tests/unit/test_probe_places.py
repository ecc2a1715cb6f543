"""How near ports are to devices: from the tool's matrix, PCI paths, NUMA nodes; ports inside devices."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hetrun.model import DeviceLink, DevicePort, HostFacts, NicLink
from hetrun.probe import nearest_nics
from hetrun.probe.host import parse_host
from hetrun.probe.places import last_function
from tests.unit.probe_output import NONCE, PLAIN, output
from tests.unit.test_probe_devices import NVIDIA_CSV, NVIDIA_NODES, NVIDIA_PCI, SPEC
from tests.unit.test_probe_links import MATRIX
from tests.unit.test_probe_slices import AMD_NODES, LISTING, SLICED
from tests.unit.test_vendors_topology import ROCM_TYPES
from tests.vendors.captures import ROOT

ROOT_PATH = "/sys/devices/pci0000:40/0000:40:01.0"
SWITCH = f"{ROOT_PATH}/0000:3e:00.0"  # upstream side of a switch
RDMA = "mlx5_0\t1\tInfiniBand\t4: ACTIVE\t400 Gb/sec (4X NDR)\t\t0000:9a:00.0\t1\n"
NVIDIA: Mapping[str, str] = {
    **PLAIN,
    "pci": NVIDIA_PCI,
    "nodes": NVIDIA_NODES,
    "tool-nvidia-0": NVIDIA_CSV,
    "rdma": RDMA,
}


def parse(**sections: str) -> HostFacts:
    return parse_host(SPEC, output({**NVIDIA, **sections}), nonce=NONCE)


@pytest.mark.parametrize(
    ("nic", "device", "kind"),
    [
        (f"{ROOT_PATH}/0000:41:00.1", f"{ROOT_PATH}/0000:41:00.0", "PIX"),
        (f"{SWITCH}/0000:3f:00.0/0000:9a:00.0", f"{SWITCH}/0000:3f:01.0/0000:41:00.0", "PIX"),
        (
            f"{SWITCH}/0000:3f:00.0/0000:50:00.0/0000:51:00.0/0000:9a:00.0",
            f"{SWITCH}/0000:3f:01.0/0000:41:00.0",
            "PXB",
        ),
        ("/sys/devices/pci0000:40/0000:40:02.0/0000:9a:00.0", f"{ROOT_PATH}/0000:41:00.0", "PHB"),
        ("/sys/devices/pci0000:80/0000:80:01.0/0000:9a:00.0", f"{ROOT_PATH}/0000:41:00.0", "NODE"),
        # two platforms each with a bridge of that name
        (
            "/sys/devices/platform/b/pci0000:40/0000:40:01.0/0000:9a:00.0",
            "/sys/devices/platform/a/pci0000:40/0000:40:01.0/0000:41:00.0",
            "NODE",
        ),
    ],
)
def test_way_over_bridges_tells_how_near_a_port_is(nic: str, device: str, kind: str) -> None:
    bus_id = nic.rpartition("/")[2]
    facts = parse(
        rdma=RDMA.replace("0000:9a:00.0", bus_id),
        paths=f"{nic}\n{device}\n",
        numa="0000:41:00.0 1\n0000:42:00.0 0\n",
    )
    assert facts.nic_links == (
        NicLink(nic="mlx5_0", device=0, kind=kind),
        NicLink(nic="mlx5_0", device=1, kind="SYS"),  # its path is not shown, its node is
    )
    assert nearest_nics(facts, 0) == (kind, ("mlx5_0",))


def test_nothing_known_is_nothing_said() -> None:
    assert parse().nic_links == ()
    assert nearest_nics(parse(), 0) is None
    assert parse(paths="junk\n/sys/devices/pci0000:40/x\n/a/b\n\n").nic_links == ()


def test_tool_is_believed_before_paths() -> None:
    path = "/sys/devices/pci0000:80/0000:80:01.0/0000:9a:00.0\n/sys/devices/pci0000:80/0000:80:01.0/0000:42:00.0\n"
    matrix = MATRIX.replace("GPU1\tNV12\t X \tNODE\tSYS", "GPU1\tNV12\t X \tNODE\tN/A")
    facts = parse(**{"topo-nvidia": matrix, "paths": path})
    assert facts.nic_links == (
        NicLink(nic="mlx5_0", device=0, kind="PXB", by_tool=True),
        NicLink(nic="mlx5_0", device=1, kind="PIX"),  # the tool says two things of this pair
    )


def test_ports_of_a_matrix_that_the_host_does_not_have_are_left_out() -> None:
    facts = parse(**{"topo-nvidia": MATRIX.replace("NIC0: mlx5_0", "NIC0: mlx5_7")})
    assert facts.nic_links == ()


def test_instances_of_a_gpu_are_as_near_as_the_gpu() -> None:
    path = f"{SWITCH}/0000:3f:00.0/0000:9a:00.0\n{SWITCH}/0000:3f:01.0/0000:41:00.0\n"
    facts = parse(**{"tool-nvidia-0": SLICED, "tool-nvidia-3": LISTING, "paths": path})
    assert [(link.device, link.kind) for link in facts.nic_links] == [(0, "PIX"), (1, "PIX")]
    assert facts.device_links == ()  # the matrix is about whole GPUs


def test_interfaces_that_are_no_rdma_port_are_placed_too() -> None:
    nics = f"eth0 1500 up 25000 {ROOT_PATH}/0000:43:00.0/virtio1/net/eth0\nlo 65536 unknown -1 /sys/devices/virtual/net/lo\n"
    facts = parse(nics=nics, paths=f"{ROOT_PATH}/0000:43:00.0\n{ROOT_PATH}/0000:41:00.0\n", rdma="")
    assert [nic.bus_id for nic in facts.nics] == ["0000:43:00.0", None]
    assert facts.nic_links == (NicLink(nic="eth0", device=0, kind="PIX"),)
    assert nearest_nics(facts, 0) is None  # no RDMA port


def test_address_is_the_last_function_of_a_path() -> None:
    assert last_function(f"{SWITCH}/0000:41:00.0/infiniband/mlx5_0") == "0000:41:00.0"
    assert last_function("/sys/devices/virtual/net/lo") is None
    assert last_function("") is None


def test_matrix_with_addresses_is_joined_by_them_not_by_numbers() -> None:
    """rocm-smi may count in another order than amd-smi."""
    gpus = ", ".join(
        f'{{"gpu": {number}, "asic": {{"market_name": "MI300X"}}, "bus": {{"bdf": "{bdf}"}}}}'
        for number, bdf in enumerate(("0000:B1:00.0", "0000:C6:00.0", "0000:C1:00.0"))
    )
    pci = "".join(f"0000:{bus}:00.0 0x1002 0x74a1 0x120000\n" for bus in ("b1", "c1", "c6"))
    facts = parse(
        **{
            "pci": pci,
            "nodes": AMD_NODES,
            "tool-nvidia-0": "",
            "tool-amd-0": f"[{gpus}]\n",
            "topo-amd": ROCM_TYPES,
        }
    )
    assert facts.device_links == (DeviceLink(a=1, b=2, kind="XGMI"),)


def test_matrix_that_counts_otherwise_than_the_list_says_nothing() -> None:
    ascend = (ROOT / "ascend" / "ascend-info-910b3.txt").read_text()
    two = parse_host(SPEC, output({**PLAIN, "pci": "", "tool-ascend-1": ascend}), nonce=NONCE)
    numbers = [device.vendor_index for device in two.devices]
    assert len(numbers) >= 2
    for shift, expected in ((0, 1), (40, 0)):
        names = [f"NPU{(number or 0) + shift}" for number in numbers]
        head = "   ".join(["", *names])
        rows = [
            "   ".join([row, *("X" if row == name else "HCCS" for name in names)]) for row in names
        ]
        matrix = "\n".join([head, *rows]) + "\n"
        text = output({**PLAIN, "pci": "", "tool-ascend-1": ascend, "topo-ascend": matrix})
        links = parse_host(SPEC, text, nonce=NONCE).device_links
        assert bool(links) == bool(expected)


def test_ports_inside_devices_are_facts_and_warnings() -> None:
    ascend = (ROOT / "ascend" / "ascend-info-910b3.txt").read_text()
    ports = "device 0\nipaddr:10.30.12.9\nlink status: UP\ndevice 1\nlink status: DOWN\ndevice 99\nlink status: UP\n"
    sections = {**PLAIN, "pci": "", "tool-ascend-1": ascend, "ports-ascend": ports}
    facts = parse_host(SPEC, output(sections), nonce=NONCE)
    assert facts.device_ports == (
        DevicePort(device=0, address="10.30.12.9", up=True),
        DevicePort(device=1, address=None, up=False),
    )
    said = " ".join(facts.warnings)
    assert "RoCE port inside device 1: link down" in said
    assert "RoCE port inside device 1: no address" in said


def test_numbers_that_overlap_by_chance_give_no_wrong_pair() -> None:
    """The list counts 0 to 3, the matrix calls the same chips 1, 2, 4 and 5."""
    rows = "".join(
        f"{n}, NVIDIA A100 80GB PCIe, GPU-11111111-2222-3333-4444-55555555555{n}, 00000000:4{n}:00.0, 81920, 5.1, Disabled\n"
        for n in range(4)
    )
    names = ["GPU1", "GPU2", "GPU4", "GPU5"]
    matrix = "   ".join(["", *names]) + "\n"
    matrix += "".join(
        "   ".join([a, *("X" if a == b else "PIX" for b in names)]) + "\n" for a in names
    )
    facts = parse(**{"pci": "", "tool-nvidia-0": rows, "topo-nvidia": matrix})
    assert (len(facts.devices), facts.device_links) == (4, ())
