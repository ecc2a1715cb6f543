"""What the product has to know about one vendor. Each vendor's facts stand in its own file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hetrun.model import MIB, Quantity, Source
from hetrun.vendors._read.answer import ToolAnswer, ToolError
from hetrun.vendors._read.run import ToolRun


class Confidence(str, Enum):
    """How sure we are of a chip's figures: many good sources, one decent source, press, or nobody knows."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ProbeCommand:
    """Shell text that asks one tool, and directories to search after PATH."""

    command: str
    paths: tuple[str, ...] = ()
    needs_root: bool = False  # run with sudo where the inventory says `become: true`


@dataclass(frozen=True, slots=True, kw_only=True)
class PciIds:
    """Which PCI functions are accelerators of this vendor. All ids are lower-case hex without 0x.

    A function counts if its vendor id is in `vendors`, its device id is not in `skip`, and either
    its device id is in `devices`, or (unless `known_only`) its class starts with one of `classes`.
    """

    vendors: tuple[str, ...] = ()
    company: str = ""  # as it is called where it makes other parts too
    devices: Mapping[str, str] = field(default_factory=dict)  # device id -> chip
    classes: tuple[str, ...] = ("0300", "0302", "0380", "1200")
    skip: Mapping[str, str] = field(default_factory=dict)  # device id -> what it is instead
    known_only: bool = False
    others: str = ""  # what functions of other classes are, such as "cpu bridges"

    def is_accelerator(self, vendor: str, device: str, pci_class: str) -> bool:
        """Decide for one function, by its three ids."""
        if vendor not in self.vendors or device in self.skip:
            return False
        if device in self.devices:
            return not pci_class.startswith(("04", "06"))  # never the audio part or a bridge
        return not self.known_only and pci_class.startswith(self.classes)


@dataclass(frozen=True, slots=True)
class Chip:
    """Published figures of one chip (one device, not one board), in the units of tables. None = nobody knows."""

    name: str
    match: tuple[str, ...]  # lower-case words of the names that tools print; the longest match wins
    memory_mib: int | None  # as the tool shows it
    peak_tflops: float | None  # dense, in `dtype`
    tb_per_s: float | None  # memory bandwidth
    confidence: Confidence
    source: str
    dtype: str = "bf16"

    @property
    def memory_bytes(self) -> int | None:
        """Memory size, as the tool shows it."""
        return None if self.memory_mib is None else self.memory_mib * MIB

    @property
    def peak_flops(self) -> Quantity:
        """Dense peak per second, with its source."""
        value = None if self.peak_tflops is None else self.peak_tflops * 1e12
        source = Source.SPEC if value is not None else Source.ASSUMED
        why = f"{self.dtype}, {self.source}, confidence {self.confidence.value}"
        return Quantity(
            value=value, source=source, why=why if value is not None else "not published"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """One vendor: how to find its devices, how to read its tools, how torch drives them."""

    name: str
    title: str
    parse: Callable[[ToolRun], ToolAnswer]
    tools: tuple[str, ...]  # names of its executables
    probe_commands: tuple[ProbeCommand, ...]  # best first; the rest are for when that one fails
    torch_device: str
    torch_plugin: str | None  # module to import before the device exists
    collective_backend: str  # name in torch.distributed
    collective_family: str  # library behind it: equal backend names do not mean they can talk
    visible_devices_env: str | None
    visible_devices_id: str = "index"  # "index", "uuid", "module_id" or "cores"
    container_devices_env: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    # names the interface of its collective library; "{nic}" stands for it, "=" asks for exactly this name
    nic_env: Mapping[str, str] = field(default_factory=dict)
    pci_ids: PciIds = field(default_factory=PciIds)
    device_nodes: tuple[str, ...] = ()  # glob patterns
    kernel_modules: tuple[str, ...] = ()
    topology_command: ProbeCommand | None = None  # prints the matrix that `topology.py` reads
    ports_command: ProbeCommand | None = (
        None  # prints the RoCE ports in its devices, for `ports.py`
    )
    slice_nodes: tuple[str, ...] = ()  # glob patterns of virtual devices, which are not offered
    partitions_by_function: bool = False  # functions of one PCI device are its partitions
    instances_note: str = ""  # what several instances of one split device cannot do
    peer_memory_modules: tuple[str, ...] = ()  # let an RDMA NIC reach device memory
    sdk_roots: tuple[str, ...] = ()
    sdk_env: tuple[str, ...] = ()
    models: tuple[Chip, ...] = ()
    errors: tuple[tuple[str, ToolError], ...] = ()  # lower-case part of a line -> class
    rc_errors: Mapping[int, ToolError] = field(default_factory=dict)  # where the text tells nothing
    unverified: tuple[str, ...] = ()  # fields above without a public source behind them
    notes: tuple[str, ...] = ()

    def find_model(self, name: str | None) -> Chip | None:
        """Return the chip that a tool's (or the PCI table's) name means, None if it is not known."""
        lowered = (name or "").lower()
        if _has_word(lowered, "mig"):
            return None  # a slice has no published figures
        best: tuple[int, Chip] | None = None
        for chip in self.models:
            length = max((len(part) for part in chip.match if _has_word(lowered, part)), default=0)
            if length and (best is None or length > best[0]):
                best = (length, chip)
        return None if best is None else best[1]


def _has_word(text: str, part: str) -> bool:
    """True if the part stands in the text as whole words, so that 'a10' is not found in 'a100'."""
    at = text.find(part)
    while at >= 0:
        before, after = text[at - 1 : at] if at else "", text[at + len(part) : at + len(part) + 1]
        if not before.isalnum() and not after.isalnum():
            return True
        at = text.find(part, at + 1)
    return False
