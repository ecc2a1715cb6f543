"""What a vendor tool's output says, as frozen dataclasses. Reading the text is left to the files beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from hetrun.model import MIB


class ToolError(str, Enum):
    """Why a tool gave no (or not all) devices; `.hint` is the next thing the user can do."""

    TOOL_MISSING = "tool_missing"
    DRIVER_MISSING = "driver_missing"
    DRIVER_MISMATCH = "driver_mismatch"
    PERMISSION_DENIED = "permission_denied"
    PERMISSION_OR_DRIVER = "permission_or_driver"
    DEVICE_BUSY = "device_busy"
    NO_DEVICES = "no_devices"
    DEVICE_LOST = "device_lost"
    DEVICE_ACCESS_LOST = "device_access_lost"
    PARTIAL_DEVICE_LOST = "partial_device_lost"
    PARTIAL_DEVICE_ERROR = "partial_device_error"
    SHARED_LIB_MISSING = "shared_lib_missing"
    TOOL_USAGE = "tool_usage"
    TIMEOUT = "timeout"

    def __str__(self) -> str:
        return self.value

    @property
    def hint(self) -> str:
        """The next thing to do."""
        return _HINTS[self]


_HINTS = {
    ToolError.TOOL_MISSING: "install the vendor's driver package, or add the tool's directory to "
    "PATH for non-login shells",
    ToolError.DRIVER_MISSING: "load the vendor's kernel driver (lsmod, dmesg); in a container, "
    "load it on the machine outside",
    ToolError.DRIVER_MISMATCH: "reboot, or reload the kernel module: the tool and the loaded "
    "driver have different versions",
    ToolError.PERMISSION_DENIED: "check owner and mode of the device nodes and the user's groups",
    ToolError.PERMISSION_OR_DRIVER: "look at the device nodes: present and not yours means a "
    "missing group, absent means driver or container mapping; a firmware update needs a reboot",
    ToolError.DEVICE_BUSY: "another container or process holds the device: stop it, or give "
    "this one other devices",
    ToolError.NO_DEVICES: "the driver sees no device: check lspci, the container's device "
    "mapping and the virtual machine's pass-through",
    ToolError.DEVICE_LOST: "a device fell off the bus: look at dmesg, reset it or reboot",
    ToolError.DEVICE_ACCESS_LOST: "the container lost its devices (often after a daemon-reload "
    "of the machine outside): restart the container",
    ToolError.PARTIAL_DEVICE_LOST: "one device fell off the bus, the others work: look at dmesg, "
    "reset it or reboot",
    ToolError.PARTIAL_DEVICE_ERROR: "some device's fields cannot be read: reset that device, "
    "or run the tool by hand and compare",
    ToolError.SHARED_LIB_MISSING: "source the vendor's environment script in the host's "
    "`activate`, or add its library directory to the loader's path",
    ToolError.TOOL_USAGE: "this version of the tool does not know the options, or prints "
    "something that is not understood here: run it by hand and report its output",
    ToolError.TIMEOUT: "the tool hung, as it does when a driver is wedged: look at dmesg, "
    "then reset the device or reboot",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A slice of a device that can be used by itself, such as a MIG instance."""

    profile: str | None
    ordinal: int
    uuid: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevice:
    """One chip as its tool shows it; None where the tool does not tell."""

    index: int  # what the visible-devices variable takes, unless `visible_id` says otherwise
    model: str | None = None  # raw, trimmed
    memory_bytes: int | None = None
    driver: str | None = None
    bus_id: str | None = None  # lower case dddd:bb:dd.f
    uuid: str | None = None
    visible_id: str | None = None
    arch: str | None = None
    health: str | None = None
    npu_id: int | None = None
    chip_id: int | None = None
    module_id: int | None = None
    tiles: int | None = None
    cores: int | None = None
    model_truncated: bool = False
    sliced: bool = False  # only its slices can be used
    partitions: tuple[Partition, ...] = ()
    partition_bytes: tuple[tuple[int, int], ...] = ()  # (ordinal, memory), where the tool tells

    @property
    def memory_mib(self) -> int | None:
        """Memory in MiB, the unit in which nearly all tools print it."""
        return None if self.memory_bytes is None else self.memory_bytes // MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LostDevice:
    """A device that the tool names only to say that it is gone."""

    index: int | None = None
    bus_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuAnswer:
    """The processor as `lscpu` shows it."""

    model: str | None = None
    arch: str | None = None
    sockets: int | None = None
    cores_per_socket: int | None = None
    threads_per_core: int | None = None
    logical: int | None = None
    numa_nodes: int | None = None
    flags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PciGroup:
    """Accelerators of one vendor on the PCI bus."""

    vendor: str
    bus_ids: tuple[str, ...]
    device_ids: tuple[str, ...] = ()  # beside `bus_ids`

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.bus_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PciNic:
    """A network adapter on the PCI bus."""

    vendor: str
    bus_id: str
    class_: str  # four hex digits


@dataclass(frozen=True, slots=True, kw_only=True)
class PciScan:
    """What a PCI listing holds for us; `ignored` names what could be taken for an accelerator."""

    accelerators: tuple[PciGroup, ...] = ()
    nics: tuple[PciNic, ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device and the RoCE v2 address to use on it."""

    dev: str
    port: int
    rocev2_gid_index: int | None
    ip: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """Everything read from one run of a tool. `error` may stand beside devices (partial_*, timeout)."""

    devices: tuple[FoundDevice, ...] = ()
    error: ToolError | None = None
    warnings: tuple[str, ...] = ()
    lost: tuple[LostDevice, ...] = ()
    sdk: Mapping[str, str] = field(default_factory=dict)
    detail: Mapping[str, int | str] = field(default_factory=dict)
    memory_fallback: str | None = None  # where the memory size has to come from instead
    cpu: CpuAnswer | None = None
    pci: PciScan | None = None
    rdma: tuple[RdmaPort, ...] = ()
