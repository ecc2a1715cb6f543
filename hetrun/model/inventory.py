"""Hosts as the user declares them. Reading the YAML is left to `hetrun/inventory.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hetrun.model.base import (
    ENV_NAME,
    Noun,
    Source,
    check_host_address,
    check_name,
    check_text,
    need,
)

MAX_DEVICES = (
    1024  # of one host: larger hosts do not exist, and every device costs work in each step
)


class Connection(str, Enum):
    """How commands reach a host."""

    LOCAL = "local"
    SSH = "ssh"


class LinkKind(str, Enum):
    """What lies between two devices. An island = devices of one vendor, joined by its own library."""

    INSIDE_HOST = "inside_host"  # same host, same vendor
    INSIDE_ISLAND = "inside_island"  # other host, same vendor
    ACROSS = "across"  # other vendor


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Noun):
    """Seconds for n bytes one way = latency_s + n / bytes_per_s. `a` and `b` are vendors; None = any vendor."""

    kind: LinkKind
    latency_s: float
    bytes_per_s: float
    source: Source = Source.ASSUMED
    a: str | None = None
    b: str | None = None

    def __post_init__(self) -> None:
        need(
            self.latency_s >= 0,
            f"link {self.kind.value}: latency_s {self.latency_s}, need 0 or more",
        )
        need(
            self.bytes_per_s > 0,
            f"link {self.kind.value}: bytes_per_s {self.bytes_per_s}, need more than 0",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedChip(Noun):
    """Chips that a host plays on its CPU: real tensors, modelled time and memory."""

    vendor: str
    model: str
    num_devices: int
    flops_per_s: float  # achieved, not peak
    memory_bytes: int

    def __post_init__(self) -> None:
        check_name("emulated vendor", self.vendor)
        check_name("emulated model", self.model)
        need(
            1 <= self.num_devices <= MAX_DEVICES,
            f"emulated {self.model}: num_devices {self.num_devices}, need 1 to {MAX_DEVICES}",
        )
        need(
            self.flops_per_s > 0,
            f"emulated {self.model}: flops_per_s {self.flops_per_s}, need more than 0",
        )
        need(
            self.memory_bytes > 0,
            f"emulated {self.model}: memory_bytes {self.memory_bytes}, need more than 0",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHop(Noun):
    """One jump host on the way; its key is checked like the target's."""

    addr: str
    port: int = 22
    user: str | None = None
    identity: str | None = None

    def __post_init__(self) -> None:
        check_host_address("jump addr", self.addr)
        need(0 < self.port < 65536, f"jump {self.addr}: port {self.port}, need 1 to 65535")
        check_text("jump user", self.user)
        check_text("jump identity", self.identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec(Noun):
    """One host of the inventory, with its group's vars applied. Paths are on that host unless said."""

    name: str
    connection: Connection = Connection.SSH
    group: str | None = None
    addr: str | None = None  # where SSH goes; the name when None
    port: int | None = None  # None: what the user's ssh configuration says, else 22
    user: str | None = None
    identity: str | None = None  # private key file on the controller
    known_hosts: str | None = None  # file on the controller, beside the user's and the system's
    jump: tuple[SshHop, ...] = ()
    python: str = "python3"  # interpreter with the vendor's torch
    become: bool = False  # may run `sudo -n` for vendor tools that need root, and for nothing else
    activate: str | None = None  # script sourced before python, such as a vendor's set_env.sh
    work_dir: str | None = None  # for bundles and runs; the user's cache directory when None
    data_addr: str | None = None  # address for training traffic; `addr` when None
    nic: str | None = None  # interface for training traffic; found from data_addr when None
    cpu_devices: int = 1  # how many devices a host without accelerators offers
    emulate: tuple[EmulatedChip, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("host", self.name)
        for what in ("addr", "data_addr"):
            check_host_address(f"host {self.name}: {what}", getattr(self, what))
        for what in ("user", "identity", "known_hosts", "python", "activate", "work_dir", "nic"):
            check_text(f"host {self.name}: {what}", getattr(self, what))
        for what in ("activate", "work_dir"):
            path = getattr(self, what)
            need(
                path is None or path.startswith("/"),
                f"host {self.name}: {what} {path!r}, need an absolute path",
            )
        need(
            self.python.startswith("/") or "/" not in self.python,
            f"host {self.name}: python {self.python!r}, need an absolute path or a bare name",
        )
        need(
            self.port is None or 0 < self.port < 65536,
            f"host {self.name}: port {self.port}, need 1 to 65535",
        )
        need(
            1 <= self.cpu_devices <= MAX_DEVICES,
            f"host {self.name}: cpu_devices {self.cpu_devices}, need 1 to {MAX_DEVICES}",
        )
        for key in self.env:
            need(
                bool(ENV_NAME.fullmatch(key)),
                f"host {self.name}: env {key!r}, need letters, digits and '_'",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory(Noun):
    """All hosts, and declared link figures for emulated chips."""

    name: str
    hosts: tuple[HostSpec, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        need(bool(self.hosts), f"inventory {self.name}: no hosts, need at least 1")
        names = [host.name for host in self.hosts]
        twice = sorted({name for name in names if names.count(name) > 1})
        need(not twice, f"inventory {self.name}: host {', '.join(twice)} stands there twice")
