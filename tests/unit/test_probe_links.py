"""RDMA ports, GPUDirect modules and matrices of links, from what a host's script prints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun.model import DeviceLink, RdmaNic
from hetrun.probe.answer import read_answer
from hetrun.probe.host import parse_host
from hetrun.probe.links import find_peer_memory, find_rdma, numa_nodes, rdma_warnings
from hetrun.vendors import ChipLink, read_topology
from tests.unit.probe_output import NONCE, PLAIN, output
from tests.unit.test_probe_devices import NVIDIA_CSV, NVIDIA_NODES, NVIDIA_PCI, SPEC

RDMA = (
    "mlx5_0\t1\tEthernet\t4: ACTIVE\t200 Gb/sec (4X HDR)\tens3f0\t0000:41:00.0\t0\n"
    "mlx5_1\t1\tEthernet\t1: DOWN\t40 Gb/sec (4X QDR)\tens3f1\t0000:41:00.1\t0\n"
    "mlx5_2\t1\tInfiniBand\t4: ACTIVE\t400 Gb/sec (4X NDR)\t\t0000:9a:00.0\t1\n"
    "hns_0\t1\tEthernet\t4: ACTIVE\t100 Gb/sec (4X EDR)\tenp1\t\t-1\n"
)
GIDS = (
    "/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/1:RoCE v2\n"
    "/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/5:RoCE v2\n"
    "/sys/class/infiniband/mlx5_0/ports/1/gids/0:fe80:0000:0000:0000:0ac0:ebff:fe11:2233\n"
    "/sys/class/infiniband/mlx5_0/ports/1/gids/1:fe80:0000:0000:0000:0ac0:ebff:fe11:2233\n"
    "/sys/class/infiniband/mlx5_0/ports/1/gids/4:0000:0000:0000:0000:0000:ffff:0a00:0007\n"
    "/sys/class/infiniband/mlx5_0/ports/1/gids/5:0000:0000:0000:0000:0000:ffff:0a00:0007\n"
)
MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tSYS\tPXB\t48-63,176-191\t3\t\tN/A\n"
    "GPU1\tNV12\t X \tNODE\tSYS\t0-23\t0\t\tN/A\n"
    "GPU2\tSYS\tNODE\t X \tSYS\t0-23\t0\t\tN/A\n"
    "NIC0\tPXB\tSYS\tSYS\t X \n\n"
    "Legend:\n\n  X    = Self\n  SYS  = over the link between processors\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)


def answer(**sections: str):  # type: ignore[no-untyped-def]
    return read_answer(output({**PLAIN, **sections}), nonce=NONCE)


def test_rdma_ports_carry_layer_rate_and_the_gid_that_sysfs_gives() -> None:
    first, down, fabric, bare = find_rdma(answer(rdma=RDMA, gids=GIDS))
    assert first == RdmaNic(
        device="mlx5_0",
        port=1,
        link_layer="Ethernet",
        active=True,
        rate_gbps=200.0,
        nic="ens3f0",
        bus_id="0000:41:00.0",
        numa_node=0,
        gid_index=5,  # not the habitual 3: 1 is link-local, 4 is version 1
        addr="10.0.0.7",
    )
    assert not down.active
    assert (fabric.link_layer, fabric.nic, fabric.gid_index) == ("InfiniBand", None, None)
    assert (bare.bus_id, bare.numa_node) == (None, None)


def test_rdma_that_cannot_be_used_says_why() -> None:
    found = find_rdma(answer(rdma=RDMA, gids=GIDS))
    down, address, locked = rdma_warnings(found, 64 << 10)
    assert "mlx5_1/1 not active" in down
    assert "hns_0/1 has no RoCE v2 address" in address
    assert "64 KiB" in locked
    assert "memlock" in locked
    assert rdma_warnings(found[:1], -1) == rdma_warnings(found[:1], None) == []
    assert rdma_warnings((), 64 << 10) == []  # without RDMA nothing needs pinned memory


def test_broken_lines_of_rdma_are_left_out() -> None:
    assert find_rdma(answer(rdma="mlx5_0\t1\n\nx\ty\t\t\t\t\t\t\n", gids="junk")) == ()


def test_modules_that_reach_device_memory_are_named_once() -> None:
    assert find_peer_memory(answer(peers="nvidia-peermem\nnvidia_peermem\namdkfd\n")) == (
        "amdkfd",
        "nvidia_peermem",
    )


def test_numa_nodes_are_those_of_the_bus() -> None:
    assert numa_nodes(answer(numa="0000:41:00.0 1\n0000:42:00.0 -1\njunk\n")) == {"0000:41:00.0": 1}


def test_matrix_gives_each_pair_of_chips_once() -> None:
    assert read_topology(MATRIX).links == (
        ChipLink(a=0, b=1, kind="NV12"),
        ChipLink(a=0, b=2, kind="SYS"),
        ChipLink(a=1, b=2, kind="NODE"),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nvidia-smi: unknown command topo\n",
        "\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tSYS\tX\n",  # the two cells of a pair differ
        "\tGPU0\tGPU1\nGPU0\tX\tN/A\nGPU1\tN/A\tX\n",
        "\tGPU0\tGPU1\nGPU0\tX\tNV4\n",  # cut
    ],
)
def test_pairs_that_are_not_told_stay_unknown(text: str) -> None:
    assert read_topology(text).links == ()


def test_second_matrix_does_not_overwrite_the_first() -> None:
    more = " \tGPU0\tGPU1\t\n GPU0\tX\tGNS\n GPU1\tGNS\tX\n"
    assert {link.kind for link in read_topology(MATRIX + more).links} == {"NV12", "SYS", "NODE"}


@given(st.text(alphabet="GPU#0123 XNVSY\t\n", max_size=400) | st.binary(max_size=300))
def test_no_text_breaks_the_reader_of_matrices(text: str | bytes) -> None:
    for link in read_topology(text).links:
        assert 0 <= link.a < link.b


def test_links_name_the_hosts_devices_not_the_tools_numbers() -> None:
    rows = "0, Iluvatar BI-V150, GPU-4c0b7d1e-2f83-5a96-b1c7-d05e8f24a379, 32768 MiB, 4.1.2, 00000000:51:00.0\n"
    sections = {
        **PLAIN,
        "pci": NVIDIA_PCI + "0000:51:00.0 0x1e3e 0x0003 0x120000\n",
        "nodes": NVIDIA_NODES + "open crw-rw-rw- 1 root root 5, 0 Nov 21 00:15 /dev/iluvatar0\n",
        "tool-iluvatar-0": rows,
        "tool-nvidia-0": NVIDIA_CSV,
        "topo-nvidia": MATRIX,  # its third chip is not offered
        "numa": "0000:42:00.0 1\n",
    }
    facts = parse_host(SPEC, output(sections), nonce=NONCE)
    assert [device.vendor for device in facts.devices] == ["iluvatar", "nvidia", "nvidia"]
    assert facts.device_links == (DeviceLink(a=1, b=2, kind="NV12"),)
    assert [device.numa_node for device in facts.devices] == [None, None, 1]
