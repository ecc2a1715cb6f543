"""Matrices of links as the tools of several vendors print them, and ports inside devices. Layouts from public sources."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun.vendors import (
    ChipLink,
    ChipPort,
    NicPlace,
    Topology,
    all_vendors,
    read_ports,
    read_topology,
)


def _square(name: str, words: list[list[str]], *, gap: str = "       ", tail: str = "") -> str:
    head = gap.join(["", *(f"{name}{number}" for number in range(len(words)))])
    rows = [gap.join([f"{name}{at}", *row]) + tail for at, row in enumerate(words)]
    return "\n".join([head + (gap + "CPU Affinity" if tail else ""), *rows]) + "\n"


PAIR = [["X", "{w}"], ["{w}", "X"]]


def _pair(name: str, word: str, **more: str) -> str:
    return _square(name, [[cell.replace("{w}", word) for cell in row] for row in PAIR], **more)


ROCM_TYPES = (
    "============================ ROCm System Management Interface ============================\n"
    "======================================= PCI Bus ID =======================================\n"
    "GPU[0]\t\t: PCI Bus: 0000:C1:00.0\nGPU[1]\t\t: PCI Bus: 0000:C6:00.0\n"
    "================================ Weight between two GPUs =================================\n"
    + _square("GPU", [["0", "15"], ["15", "0"]])
    + "\n================================= Hops between two GPUs ==================================\n"
    + _square("GPU", [["0", "1"], ["1", "0"]])
    + "\n=============================== Link Type between two GPUs ===============================\n"
    + _square("GPU", [["0", "XGMI"], ["XGMI", "0"]])
    + "================================== End of ROCm SMI Log ===================================\n"
)
INTEL = (
    "         GPU 0/0|GPU 0/1|GPU 1/0|GPU 1/1|CPU Affinity\n"
    "GPU 0/0 |S      |MDF    |XL*    |XL16   |0-23,48-71\n"
    "GPU 0/1 |MDF    |S      |XL16   |XL*    |0-23,48-71\n"
    "GPU 1/0 |XL*    |XL16   |S      |MDF    |24-47,72-95\n"
    "GPU 1/1 |XL16   |XL*    |MDF    |S      |24-47,72-95\n"
)
KUNLUN = (
    "        XPU0    XPU1    NIC0    NIC1    CPU Affinity    NUMA Affinity\n"
    "XPU0     X      XL      PIX     SYS     0-95,192-287    0\n"
    "XPU1    XL       X      PHB     SYS     0-95,192-287    0\n"
    "NIC0    PIX     PHB      X      SYS\n"
    "NIC1    SYS     SYS     SYS      X\n\n"
    "NIC Legend:\n\n  NIC0: mlx5_bond_0\n  NIC1: mlx5_bond_1\n"
)
MTHREADS = (
    "           GPU0     GPU1     mlx5_0   CPU Affinity  NUMA Affinity\n"
    "  GPU0     X        MT2      SPB      0-31,64-95    0\n"
    "  GPU1     MT2      X        NODE     0-31,64-95    0\n"
    "  mlx5_0   SPB      NODE     X\n"
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (_pair("NPU", "HCCS", tail="       144-167"), "HCCS"),
        (_pair("GPU", "PIX", tail="\t16-31,80-95"), "PIX"),
        (_pair("MLU", "MLK"), "MLK"),
        (_pair("HCU", "XGMI"), "XGMI"),
        (_pair("GPU", "MX", gap="\t"), "MX"),
        (
            "=== MetaX System Management Interface Log ===\nAttached GPUs   : 2\n"
            + _pair("GPU", "MX"),
            "MX",
        ),
        (ROCM_TYPES, "XGMI"),
        (INTEL, "XL16"),
        (KUNLUN, "XL"),
        (MTHREADS, "MT2"),
    ],
)
def test_pair_of_each_layout(text: str, word: str) -> None:
    assert read_topology(text).links == (ChipLink(a=0, b=1, kind=word),)
    assert read_topology(text.replace("\n", "\r\n").encode()).links == read_topology(text).links


def test_addresses_beside_the_matrix_are_kept() -> None:
    assert read_topology(ROCM_TYPES).bus_ids == {0: "0000:c1:00.0", 1: "0000:c6:00.0"}


def test_ports_are_named_by_the_legend_or_by_themselves() -> None:
    assert read_topology(KUNLUN).nics == (
        NicPlace(chip=0, nic="mlx5_bond_0", kind="PIX"),
        NicPlace(chip=0, nic="mlx5_bond_1", kind="SYS"),
        NicPlace(chip=1, nic="mlx5_bond_0", kind="PHB"),
        NicPlace(chip=1, nic="mlx5_bond_1", kind="SYS"),
    )
    assert read_topology(MTHREADS).nics == (
        NicPlace(chip=0, nic="mlx5_0", kind="SPB"),
        NicPlace(chip=1, nic="mlx5_0", kind="NODE"),
    )


def test_one_chip_with_ports_has_places_and_no_link() -> None:
    text = "\tGPU0\tNIC0\tCPU Affinity\nGPU0\t X \tPIX\t0-7\nNIC0\tPIX\t X \n\n  NIC0: mlx5_0\n"
    topology = read_topology(text)
    assert (topology.links, topology.nics) == ((), (NicPlace(chip=0, nic="mlx5_0", kind="PIX"),))


@pytest.mark.parametrize(
    "text",
    [
        INTEL.replace("XL16", "XL4", 1),  # one cell of a pair of tiles differs
        _pair("GPU", "N/A"),
        _pair("GPU", "40"),
        _pair("NPU", "HCCS").replace("HCCS", "PIX", 1),
    ],
)
def test_what_does_not_agree_stays_unknown(text: str) -> None:
    assert read_topology(text).links == ()


def test_a_port_s_row_that_differs_or_is_cut_makes_its_place_unknown() -> None:
    other = KUNLUN.replace("NIC0    PIX", "NIC0    PXB")
    assert not [
        place for place in read_topology(other).nics if place.chip == 0 and "0" in place.nic
    ]
    cut = KUNLUN[: KUNLUN.index("PHB      X")]
    assert {place.nic for place in read_topology(cut).nics} <= {"NIC0", "NIC1"}  # names no port


TEXTS = (INTEL, KUNLUN, MTHREADS, ROCM_TYPES, _pair("NPU", "HCCS", tail="   0-7"))


@given(st.sampled_from(TEXTS), st.data())
def test_a_damaged_matrix_gives_no_pair_that_is_not_in_the_whole_one(
    text: str, data: st.DataObject
) -> None:
    """Cut anywhere, a line left out, or a cell left out: what is said is still true."""
    whole = read_topology(text)
    at = data.draw(st.integers(0, len(text)))
    lines = text.splitlines(keepends=True)
    gone = data.draw(st.integers(0, len(lines) - 1))
    words = lines[gone].split(" ")
    words.pop(data.draw(st.integers(0, len(words) - 1)))
    for damaged in (
        text[:at],
        "".join(lines[:gone] + lines[gone + 1 :]),
        "".join([*lines[:gone], " ".join(words), *lines[gone + 1 :]]),
    ):
        assert set(read_topology(damaged).links) <= set(whole.links)


@given(st.text(alphabet="GPUXN#0123 /|*XLNIC:mlx5_\t\n[]", max_size=500) | st.binary(max_size=300))
def test_no_text_breaks_the_readers(text: str | bytes) -> None:
    for link in read_topology(text).links:
        assert 0 <= link.a < link.b
    assert isinstance(read_ports(text), tuple)


def test_many_chips_in_any_order_of_rows() -> None:
    size = 64
    words = [
        [
            "X" if a == b else f"NV{a + b}" if a + b < 99 and a // 8 == b // 8 else "SYS"
            for b in range(size)
        ]
        for a in range(size)
    ]
    lines = _square("GPU", words, gap="\t").splitlines()
    rows = lines[1:]
    random.Random(3).shuffle(rows)
    topology = read_topology("\n".join([lines[0], *rows]) + "\n")
    told = {(link.a, link.b): link.kind for link in topology.links}
    assert len(told) == size * (size - 1) // 2
    assert all(words[a][b] == kind for (a, b), kind in told.items())


def test_vendors_whose_tool_tells_of_links() -> None:
    told = {name for name, vendor in all_vendors().items() if vendor.topology_command}
    assert told == {
        *("amd", "ascend", "biren", "cambricon", "hygon", "iluvatar", "intel", "kunlunxin"),
        *("metax", "mthreads", "nvidia"),
    }


PORTS = (
    "device 0\nipaddr:10.30.12.9\nnetmask:255.255.255.0\nlink status: UP\n"
    "device 1\nlink status: DOWN\n"
    "device 2\nipaddr:0.0.0.0\nnetmask:0.0.0.0\nlink status: UP\n"
    "device 3\nhccn_tool: cannot open device\n"
    "device 12\nipaddr : fd00::12\nlink status:UP\n"
)


def test_ports_inside_devices_have_an_address_and_a_state() -> None:
    assert read_ports(PORTS) == (
        ChipPort(chip=0, address="10.30.12.9", up=True),
        ChipPort(chip=1, address=None, up=False),
        ChipPort(chip=2, address=None, up=True),
        ChipPort(chip=12, address="fd00::12", up=True),
    )
    assert read_ports("ipaddr:10.0.0.1\nlink status: UP\n") == ()  # of which device?
    assert read_topology("") == Topology()
