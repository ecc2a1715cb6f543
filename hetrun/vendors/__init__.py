"""Everything vendor-specific that runs on the controller: one file per vendor, found by itself.

Running the tools is left to `probe.py`; here their text becomes devices. A vendor from another
package joins through an entry point in the group `hetrun.vendors` that names its `Vendor`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType

from hetrun.errors import ConfigError
from hetrun.vendors._read.answer import (
    CpuAnswer,
    FoundDevice,
    LostDevice,
    Partition,
    PciGroup,
    PciNic,
    PciScan,
    RdmaPort,
    ToolAnswer,
    ToolError,
)
from hetrun.vendors._read.finish import read
from hetrun.vendors._read.run import ToolRun, clean, tool_run
from hetrun.vendors._read.vendor import Chip, Confidence, PciIds, ProbeCommand, Vendor
from hetrun.vendors.doc import vendors_markdown as _vendors_markdown
from hetrun.vendors.pci import scan_pci as _scan_pci
from hetrun.vendors.ports import ChipPort, read_ports
from hetrun.vendors.rdma import rocev2_gids
from hetrun.vendors.topology import ChipLink, NicPlace, Topology, read_topology

__all__ = [
    "Chip",
    "ChipLink",
    "ChipPort",
    "Confidence",
    "CpuAnswer",
    "FoundDevice",
    "LostDevice",
    "NicPlace",
    "Partition",
    "PciGroup",
    "PciIds",
    "PciNic",
    "PciScan",
    "ProbeCommand",
    "RdmaPort",
    "ToolAnswer",
    "ToolError",
    "ToolRun",
    "Topology",
    "Vendor",
    "all_vendors",
    "get_vendor",
    "read_ports",
    "read_tool",
    "read_topology",
    "rocev2_gids",
    "scan_pci",
    "vendors_markdown",
]


@cache
def all_vendors() -> Mapping[str, Vendor]:
    """Return all vendors by name: the files beside this one, then entry points, in order of name."""
    found: dict[str, Vendor] = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            vendor = getattr(importlib.import_module(f"{__name__}.{module.name}"), "VENDOR", None)
            if isinstance(vendor, Vendor):
                found[vendor.name] = vendor
    for entry in entry_points(group="hetrun.vendors"):
        vendor = entry.load()
        if not isinstance(vendor, Vendor):
            raise ConfigError(
                f"entry point {entry.name} of group hetrun.vendors: {entry.value} is no Vendor",
                hint=f"uninstall the package that brings {entry.name}, or report it there",
            )
        if vendor.name in found:
            raise ConfigError(
                f"entry point {entry.name} of group hetrun.vendors: vendor {vendor.name} is there "
                "already",
                hint=f"uninstall the package that brings {entry.name}, or report it there",
            )
        found[vendor.name] = vendor
    return MappingProxyType(dict(sorted(found.items())))


def get_vendor(name: str) -> Vendor:
    """Return one vendor.

    Raises:
        ConfigError: nobody brings a vendor of this name.
    """
    vendor = all_vendors().get(name)
    if vendor is None:
        raise ConfigError(
            f"vendor {name!r} is not known", hint=f"known are: {', '.join(all_vendors())}"
        )
    return vendor


def vendors_markdown() -> str:
    """Return docs/vendors.md: what is supported, and how sure we are of each fact."""
    return _vendors_markdown(all_vendors())


def scan_pci(listing: str) -> PciScan:
    """Sort a PCI listing (lines 'address 0xvendor 0xdevice 0xclass', or lspci -n / -nn) by vendor."""
    return _scan_pci(listing, all_vendors().values())


def read_tool(
    vendor: str,
    command: str,
    *,
    stdout: str | bytes = "",
    stderr: str | bytes = "",
    rc: int | None = 0,
) -> ToolAnswer:
    """Read what a vendor's tool printed. Never raises: what cannot be read is an error class.

    `stdout` must be whole, with its last newline: text that stops inside a line is taken as cut.
    "pci" and "rdma" stand for the two listings that belong to no vendor.
    """
    if vendor in ("pci", "rdma"):
        return _read_listing(vendor, clean(stdout)[0])
    known = all_vendors().get(vendor)
    if known is None:
        return ToolAnswer(error=ToolError.TOOL_USAGE, warnings=("vendor_unknown",))
    return read(known, tool_run(known.tools, command, stdout=stdout, stderr=stderr, rc=rc))


def _read_listing(name: str, text: str) -> ToolAnswer:
    """Wrap the answer of `scan_pci` or `rocev2_gids`; a listing without any line for us is an error."""
    if name == "rdma":
        ports = rocev2_gids(text)
        return ToolAnswer(rdma=ports, error=None if ports else _nothing(text))
    scan = scan_pci(text)
    found = scan.accelerators or scan.nics or scan.ignored
    return ToolAnswer(pci=scan, error=None if found else _nothing(text))


def _nothing(text: str) -> ToolError:
    return ToolError.TOOL_USAGE if text.strip() else ToolError.NO_DEVICES
