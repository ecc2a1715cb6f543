"""ONE probe over odd machines: mixed vendors, tools that hang or flood, login shells, dead and changed hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetrun.cli import render
from hetrun.model import DeviceLink, DevicePort, Facts, HostFacts, HostSpec, Inventory, NicLink
from hetrun.probe import Answered, answered, probe, script
from tests.ssh.lab import Lab, LabHost, make_key
from tests.ssh.odd_hosts import (
    PATH_OF_STUBS,
    PYTHON,
    add_bus,
    add_nodes,
    add_rdma,
    add_tools,
    only_busybox,
    says,
)
from tests.vendors.captures import ROOT

pytestmark = pytest.mark.ssh
GIB = 1 << 30
TOOL_LIMIT_S = 2
A100 = "NVIDIA A100 80GB PCIe, GPU-11111111-2222-3333-4444-55555555555{0}, 00000000:4{0}:00.0, 81920, 550.54.15, Disabled"
ROWS = "\n".join(f"{n}, {A100.format(n)}" for n in (0, 1))
MATRIX = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV12\tPXB\t0-7\nGPU1\tNV12\t X \tSYS\t0-7\n"
    "NIC0\tPXB\tSYS\t X \n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
MIG = "MIG-0c2f7ad1-98b3-5e17-a6cf-3be7d0419c5"
SLICED = A100.format(0).replace("Disabled", "Enabled")
LISTING = (
    "GPU 0: NVIDIA A100 80GB PCIe (UUID: GPU-11111111-2222-3333-4444-555555555550)\n"
    f"  MIG 3g.40gb     Device  0: (UUID: {MIG}0)\n  MIG 1g.10gb     Device  1: (UUID: {MIG}1)\n"
)
SPLIT = (
    f'#!/bin/sh\ncase "$*" in\n*query-gpu*) cat <<"HERE"\n0, {SLICED}\nHERE\n;;\n'
    f'-L) cat <<"HERE"\n{LISTING}HERE\n;;\n*) exit 2;;\nesac\n'
)
HCCN = """#!/bin/sh
[ "$1" = -i ] || exit 2
case "$3" in
-ip) [ "$2" = 5 ] || printf 'ipaddr:10.30.12.%s\\nnetmask:255.255.255.0\\n' "$2" ;;
-link) [ "$2" = 3 ] && echo 'link status: DOWN' || echo 'link status: UP' ;;
esac
"""
NVIDIA = (
    f'#!/bin/sh\ncase "$*" in\n*query-gpu*) cat <<"HERE"\n{ROWS}\nHERE\n;;\n'
    f'*topo*) cat <<"HERE"\n{MATRIX}HERE\n;;\n*) exit 2;;\nesac\n'
)
BUS = (
    "0000:40:00.0 10de 20b5 030200 0",
    "0000:41:00.0 10de 20b5 030200 1",
    "0000:42:00.0 10de 20b5 030200 1",  # its tool has lost this one
    "0000:26:00.0 1d94 6210 0b4000",
    "0000:43:00.0 1d94 6210 0b4000",
    "0000:00:01.0 1d94 1453 060400",  # a bridge of that maker's processors
)


@dataclass(frozen=True)
class Outcome:
    """One probe of all hosts."""

    facts: Facts
    seconds: float
    order: tuple[str, ...]  # of the hosts as they were through

    def host(self, name: str) -> HostFacts:
        """Facts of one host."""
        return next(host for host in self.facts.hosts if host.spec.name == name)


def _spec(host: LabHost, name: str, **changes: object) -> HostSpec:
    return host.spec(**{"name": name, "python": PYTHON, "data_addr": host.addr, **changes})


def _mixed(lab: Lab) -> HostSpec:
    host = lab.host(31, sshd=PATH_OF_STUBS)
    hygon = (ROOT / "hygon" / "hygon-hysmi-json.txt").read_text()
    add_tools(host, {"stubs/nvidia-smi": NVIDIA, "hyhal/bin/hy-smi": says(hygon)})
    add_bus(host, BUS)
    add_rdma(host, peer="nvidia-peermem")
    add_nodes(host, "nvidia0", "nvidia1", "nvidia2", "nvidiactl", "kfd", "mkfd")
    return _spec(host, "mixed")


def _hanging(lab: Lab) -> HostSpec:
    host = lab.host(32, sshd=PATH_OF_STUBS, shell="/bin/csh")  # noqa: S604 - a login shell
    hang = "#!/bin/sh\ntrap '' TERM\necho 0, half a row\nsleep 300\n"
    add_tools(host, {"stubs/nvidia-smi": hang})
    add_bus(host, BUS[:1])
    host.start_file(".cshrc", "echo noise of csh\n")
    return _spec(host, "hanging")


def _flooding(lab: Lab) -> HostSpec:
    host = lab.host(33, sshd=PATH_OF_STUBS, shell="/usr/bin/fish")  # noqa: S604 - a login shell
    flood = f"#!/bin/sh\ncat <<'HERE'\n{ROWS}\nHERE\nhead -c 10000000 /dev/zero | tr '\\0' 'x'\n"
    add_tools(host, {"stubs/nvidia-smi": flood})
    add_bus(host, BUS[:2])
    return _spec(host, "flooding")


def _noisy(lab: Lab) -> HostSpec:
    banner = lab.folder / "banner"
    banner.write_text("Authorised use only.\n" * 40)
    host = lab.host(34, sshd=f"{PATH_OF_STUBS}\nBanner {banner}")
    host.start_file(".bashrc", "echo loud; echo louder >&2; printf '\\033[31m{\"ok\":1}\\n'\n")
    brsmi = says("0, Biren106M, 65536\n1, Biren106M, 65536\n", only_for="query-gpu")
    add_tools(host, {"stubs/brsmi": brsmi})
    add_bus(host, ("0000:51:00.0 1ee0 0001 120000", "0000:52:00.0 1ee0 0001 120000"))
    return _spec(host, "noisy")


def _impostor(lab: Lab) -> HostSpec:
    host = lab.host(35)
    other = lab.folder / "impostor"
    make_key(other)
    lab.trust(host, key=other)
    return _spec(host, "impostor")


def _slow(lab: Lab) -> HostSpec:
    host = lab.host(36, sshd=PATH_OF_STUBS)
    host.start_file(".bashrc", "sleep 4\n")
    add_tools(host, {})
    (host.folder / "hosts").write_text(
        "127.0.0.1 localhost\n10.77.0.36 slow.lab\n10.77.0.99 split.lab\n"
    )
    return _spec(host, "slow", data_addr="slow.lab")


def _split(lab: Lab) -> HostSpec:
    host = lab.host(38, sshd=PATH_OF_STUBS)
    ascend = (ROOT / "ascend" / "ascend-info-910b3.txt").read_text()
    tools = {"stubs/nvidia-smi": SPLIT, "stubs/npu-smi": says(ascend), "stubs/hccn_tool": HCCN}
    add_tools(host, tools)
    add_bus(host, BUS[:1])
    add_nodes(host, "nvidia0", "nvidiactl", *(f"davinci{number}" for number in range(8)))
    # it takes the slow host for itself, and does not know the noisy one
    (host.folder / "hosts").write_text("127.0.0.1 localhost slow.lab\n10.77.0.38 split.lab\n")
    return _spec(host, "split", data_addr="split.lab")


def _bare(lab: Lab) -> HostSpec:
    host = lab.host(37, sshd="SetEnv PATH=/opt/stubs", shell="/bin/sh")  # noqa: S604 - a login shell
    only_busybox(host)
    return _spec(host, "bare", python="python3")


@pytest.fixture(scope="module")
def outcome(lab: Lab) -> Iterator[Outcome]:
    before = list(lab.hosts)
    builders = (_mixed, _hanging, _flooding, _noisy, _impostor, _slow, _split, _bare)
    dead = HostSpec(name="dead", addr="10.77.0.250", user="root")
    specs = (dead, *(build(lab) for build in builders))
    order: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(script, "TOOL_TIMEOUT_S", TOOL_LIMIT_S)
    started_s = time.monotonic()
    facts = probe(Inventory(name="lab", hosts=specs), progress=lambda name, _: order.append(name))
    seconds = time.monotonic() - started_s
    patch.undo()
    yield Outcome(facts=facts, seconds=seconds, order=tuple(order))
    for host in [host for host in lab.hosts if host not in before]:
        lab.drop(host)


def test_one_probe_over_all_of_them_ends_in_bounded_time(outcome: Outcome) -> None:
    assert outcome.seconds < 25  # 5 s on an idle machine
    assert sorted(outcome.order) == sorted(host.spec.name for host in outcome.facts.hosts)
    assert answered(outcome.facts) is Answered.SOME
    silent = {host.spec.name for host in outcome.facts.hosts if host.error}
    assert silent == {"dead", "impostor"}


def test_dead_and_changed_hosts_say_which_is_which(outcome: Outcome) -> None:
    assert "10.77.0.250" in (outcome.host("dead").error or "")
    assert "key" in (outcome.host("impostor").error or "")
    assert outcome.host("impostor").devices == ()


def test_two_vendors_on_one_host_are_both_there_with_their_links(outcome: Outcome) -> None:
    facts = outcome.host("mixed")
    found = [(d.vendor, d.model, d.bus_id, d.numa_node) for d in facts.devices]
    assert found == [
        ("hygon", "K100_AI", "0000:26:00.0", None),
        ("hygon", "K100_AI", "0000:43:00.0", None),
        ("nvidia", "NVIDIA A100 80GB PCIe", "0000:40:00.0", 0),
        ("nvidia", "NVIDIA A100 80GB PCIe", "0000:41:00.0", 1),
    ]
    assert facts.devices[2].memory.value == 80 * GIB
    assert facts.device_links == (DeviceLink(a=2, b=3, kind="NV12"),)
    (port,) = facts.rdma
    assert (port.device, port.link_layer, port.rate_gbps) == ("mlx5_0", "Ethernet", 200.0)
    assert (port.gid_index, port.addr, port.nic, port.numa_node) == (5, "10.77.0.31", "eth0", 1)
    assert facts.peer_memory == ("nvidia_peermem",)
    assert facts.torch_version == "2.6.0+stub"
    (lost,) = [warning for warning in facts.warnings if "PCI bus" in warning]
    assert lost == "NVIDIA: 3 on the PCI bus, 2 in its tool; not shown: 0000:42:00.0"


def test_name_that_leads_nowhere_is_known(outcome: Outcome) -> None:
    facts = outcome.host("mixed")
    assert facts.hostname == "h31"
    assert facts.names["h31"] == ("127.0.1.1",)


def test_instances_are_offered_and_ports_inside_devices_are_told(outcome: Outcome) -> None:
    facts = outcome.host("split")
    sliced = [device for device in facts.devices if device.vendor == "nvidia"]
    assert [(device.model, device.visible_id) for device in sliced] == [
        ("NVIDIA A100 80GB PCIe MIG 3g.40gb", f"{MIG}0"),
        ("NVIDIA A100 80GB PCIe MIG 1g.10gb", f"{MIG}1"),
    ]
    assert {device.bus_id for device in sliced} == {"0000:40:00.0"}
    number = {d.index: d.vendor_index for d in facts.devices if d.vendor == "ascend"}
    ports = {number[port.device]: port for port in facts.device_ports}
    assert set(ports) == set(number.values())
    first = next(index for index, its in number.items() if its == 0)
    assert ports[0] == DevicePort(device=first, address="10.30.12.0", up=True)
    if 3 in ports:
        assert ports[3].up is False


def test_nearness_of_a_port_comes_from_the_tool_or_the_nodes(outcome: Outcome) -> None:
    facts = outcome.host("mixed")
    places = {(link.nic, link.device): link for link in facts.nic_links}
    assert places["mlx5_0", 2] == NicLink(nic="mlx5_0", device=2, kind="PXB", by_tool=True)
    assert places["mlx5_0", 3] == NicLink(nic="mlx5_0", device=3, kind="SYS", by_tool=True)


def test_names_of_other_hosts_that_lead_elsewhere_are_told_on_both(outcome: Outcome) -> None:
    split = " | ".join(outcome.host("split").warnings)
    assert "slow.lab, the address of slow, is 127.0.0.1 there, a loopback address" in split
    slow = " | ".join(outcome.host("slow").warnings)
    assert "split.lab, the address of split, is 10.77.0.99 there and 10.77.0.38 on split" in slow
    noisy = " | ".join(outcome.host("noisy").warnings)
    assert "do not resolve there: slow.lab (slow), split.lab (split)" in noisy
    assert "resolve" not in " ".join(outcome.host("bare").warnings)  # it has no getent: not known
    assert set(outcome.host("split").names) == {"h38", "split.lab"}


def test_hanging_tool_is_a_timeout_with_its_hint_under_csh(outcome: Outcome) -> None:
    facts = outcome.host("hanging")
    assert facts.devices == ()
    (warning,) = [warning for warning in facts.warnings if "nvidia-smi" in warning]
    assert ": timeout" in warning
    assert "the tool hung" in warning
    assert facts.python_version == "3.11.2"  # what else there is to know came through


def test_flood_of_a_tool_costs_neither_time_nor_its_rows_under_fish(outcome: Outcome) -> None:
    facts = outcome.host("flooding")
    assert len(facts.devices) == 2
    assert facts.error is None


def test_banner_and_noisy_start_files_do_not_reach_the_facts(outcome: Outcome) -> None:
    facts = outcome.host("noisy")
    assert [(d.vendor, d.model, d.memory.value) for d in facts.devices] == [
        ("biren", "Biren106M", 64 * GIB)
    ] * 2
    assert "loud" not in repr(facts)


def test_slow_host_is_waited_for(outcome: Outcome) -> None:
    facts = outcome.host("slow")
    assert (facts.error, facts.torch_version) == (None, "2.6.0+stub")
    assert abs(facts.clock_offset_s or 99) < 1  # the wait is not taken for a wrong clock


def test_busybox_alone_with_a_home_that_is_read_only_is_enough(outcome: Outcome) -> None:
    facts = outcome.host("bare")
    assert facts.error is None
    assert (facts.python_version, facts.torch_version) == (None, None)
    assert any("python3 cannot be run" in warning for warning in facts.warnings)
    assert facts.num_cores
    assert facts.memory_bytes
    assert facts.max_open_files
    assert "10.77.0.37" in {address for nic in facts.nics for address in nic.addresses}
    assert facts.hostname == "h37"


def test_table_shows_all_of_it(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "260")
    render.talk.cache_clear()
    render.show_facts(outcome.facts, Path("facts.json"), as_json=False)
    render.talk.cache_clear()
    lines = [" ".join(line.split()) for line in capfd.readouterr().err.splitlines()]
    assert any(line.startswith("dead no answer") for line in lines)
    assert any(line.startswith("mixed hygon K100_AI 2 64.0 GiB") for line in lines)
    (second,) = [
        line for line in lines if line.startswith("nvidia NVIDIA A100 80GB PCIe 2 80.0 GiB")
    ]
    assert "550.54.15" in second
    assert second.endswith("NV12, NIC PXB/SYS")
    assert any("RoCE 200 Gbit/s (gid 5), GPUDirect" in line for line in lines)
    assert any(line.startswith("nvidia 6 3 4 x NVIDIA A100 80GB PCIe, 1 x") for line in lines)


def test_nothing_is_left_on_the_hosts(lab: Lab, outcome: Outcome) -> None:
    for host in lab.hosts:
        if host.name in ("h31", "h33", "h34", "h36", "h37", "h38"):
            host.wait_empty(5.0)
        elif host.name == "h32":
            host.wait_empty(8.0)  # a tool that ignores TERM is killed in the end
