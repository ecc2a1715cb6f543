"""What probe found on the hosts. How it is asked is left to `hetrun/probe.py` and `vendors/`."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetrun.model.base import SCHEMA_VERSION, Noun, Quantity, need
from hetrun.model.inventory import EmulatedChip, HostSpec, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(Noun):
    """One schedulable chip. `index` counts in the host, `vendor_index` is the vendor tool's own number.

    `visible_id` is what the vendor's visible-devices variable takes for it.
    """

    index: int
    vendor: str
    model: str | None
    memory: Quantity  # bytes
    vendor_index: int | None = None
    driver: str | None = None
    bus_id: str | None = None
    uuid: str | None = None
    visible_id: str | None = None
    sdk: str | None = None  # toolkit that its tool names, such as "cuda_version 12.4"
    numa_node: int | None = None
    emulated: EmulatedChip | None = None
    num_threads: int = 1  # of the host's processor, for the rank that drives it

    def __post_init__(self) -> None:
        need(self.index >= 0, f"device {self.index}: index, need 0 or more")
        memory = self.memory.value
        need(
            memory is None or memory > 0,
            f"device {self.index}: memory of {memory} bytes, need more than 0, or null if unknown",
        )
        need(
            self.num_threads >= 1,
            f"device {self.index}: num_threads {self.num_threads}, need at least 1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic(Noun):
    """One network interface; speed in Mbit/s as the kernel says, None where it does not."""

    name: str
    addresses: tuple[str, ...] = ()
    speed_mbps: int | None = None
    mtu: int | None = None
    up: bool = True
    bus_id: str | None = None  # of the PCI function, None for virtual ones


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaNic(Noun):
    """One port of an RDMA device. `gid_index` is the RoCE v2 address to use on it, None where it has none."""

    device: str  # such as mlx5_0
    port: int
    link_layer: str | None = None  # "InfiniBand" or "Ethernet", as the kernel says
    active: bool = False
    rate_gbps: float | None = None  # Gbit/s, as the kernel says
    nic: str | None = None  # network interface on the same function
    bus_id: str | None = None
    numa_node: int | None = None
    gid_index: int | None = None
    addr: str | None = None  # of that gid


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLink(Noun):
    """What joins two devices of a host, in the word of the vendor's tool (NV18, PIX, SYS, ...)."""

    a: int  # `Device.index`
    b: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NicLink(Noun):
    """What lies between a network port and a device: PIX, PXB, PHB, NODE or SYS, or the tool's own word.

    From the vendor's tool, else from the PCI paths and NUMA nodes that the kernel shows.
    """

    nic: str  # `RdmaNic.device`, or `Nic.name` where it is no RDMA port
    device: int  # `Device.index`
    kind: str
    by_tool: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePort(Noun):
    """The RoCE port inside a device; None where its tool does not tell."""

    device: int  # `Device.index`
    address: str | None = None
    up: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts(Noun):
    """What probe found on one host; `error` is set, and the rest unknown, where the host did not answer."""

    spec: HostSpec
    error: str | None = None
    kernel: str | None = None
    cpu_model: str | None = None
    num_cores: int | None = None
    memory_bytes: int | None = None
    disk_free_bytes: int | None = None
    shm_bytes: int | None = None  # size of /dev/shm
    clock_offset_s: float | None = None  # host clock minus controller clock
    python_path: str | None = None
    python_version: str | None = None
    torch_version: str | None = None
    torch_error: str | None = None
    plugin_errors: dict[str, str] = field(default_factory=dict)  # plug-in -> why it does not load
    plugins: tuple[str, ...] = ()  # torch plug-ins that were imported
    hostname: str | None = None
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)  # own names -> addresses there
    max_open_files: int | None = None  # soft limit of a process, -1 = none
    max_locked_bytes: int | None = None  # the same for pinned memory
    rdma: tuple[RdmaNic, ...] = ()
    peer_memory: tuple[str, ...] = ()  # loaded modules through which a NIC reaches device memory
    device_links: tuple[DeviceLink, ...] = ()  # those that a tool told
    nic_links: tuple[NicLink, ...] = ()  # every port to every device, as far as known
    device_ports: tuple[DevicePort, ...] = ()
    nics: tuple[Nic, ...] = ()
    devices: tuple[Device, ...] = ()
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        numbers = [device.index for device in self.devices]
        need(
            len(set(numbers)) == len(numbers),
            f"host {self.spec.name}: devices numbered {numbers}, need each number once",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(Noun):
    """facts.json: the answer of `hetrun probe`."""

    schema_version: int = SCHEMA_VERSION
    created: str  # ISO 8601, UTC
    inventory: str
    hosts: tuple[HostFacts, ...]
    links: tuple[Link, ...] = ()  # declared in the inventory, for emulated chips

    def __post_init__(self) -> None:
        names = [host.spec.name for host in self.hosts]
        twice = sorted({name for name in names if names.count(name) > 1})
        need(not twice, f"facts: host {', '.join(twice)} stands there twice")
