"""What probe found on the hosts. How it is asked is left to `hetrun/probe.py` and `vendors/`."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.model.base import SCHEMA_VERSION, Noun, Quantity
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
    emulated: EmulatedChip | None = None
    num_threads: int = 1  # of the host's processor, for the rank that drives it


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic(Noun):
    """One network interface; speed in Mbit/s as the kernel says, None where it does not."""

    name: str
    addresses: tuple[str, ...] = ()
    speed_mbps: int | None = None
    mtu: int | None = None
    up: bool = True


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
    nics: tuple[Nic, ...] = ()
    devices: tuple[Device, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(Noun):
    """facts.json: the answer of `hetrun probe`."""

    schema_version: int = SCHEMA_VERSION
    created: str  # ISO 8601, UTC
    inventory: str
    hosts: tuple[HostFacts, ...]
    links: tuple[Link, ...] = ()  # declared in the inventory, for emulated chips
