"""What stands on the PCI bus: accelerators by vendor, network adapters, and look-alikes that are neither.

Which ids belong to whom is decided in the vendors' files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import PciGroup, PciNic, PciScan
from hetrun.vendors._read.run import MAX_LINE
from hetrun.vendors._read.vendor import Vendor

# 'address 0xvvvv 0xdddd 0xcccccc', as a loop over /sys/bus/pci/devices prints it
_SYS = re.compile(
    r"\s{0,8}(\S{7,16})\s{1,8}0x([0-9a-f]{4})\s{1,8}0x([0-9a-f]{4})\s{1,8}0x([0-9a-f]{6})(?:\s.{0,400})?"
)
# lspci -nn: 'address class text [cccc]: .. [vvvv:dddd] ..'; lspci -n: 'address cccc: vvvv:dddd ..'
_LSPCI_NN = re.compile(
    r"(\S{7,16})\s.{1,300}?\[([0-9a-f]{4})\]: .{0,400}\[([0-9a-f]{4}):([0-9a-f]{4})\]"
)
_LSPCI_N = re.compile(r"(\S{7,16})\s(?:Class )?([0-9a-f]{4}): ([0-9a-f]{4}):([0-9a-f]{4})\b")
_COMPANIES = {
    "1002": "amd",
    "1013": "cirrus",
    "1022": "amd",
    "102b": "matrox",
    "10de": "nvidia",
    "10ec": "realtek",
    "1234": "qemu",
    "14e4": "broadcom",
    "15ad": "vmware",
    "15b3": "mellanox",
    "1a03": "aspeed",
    "1ae0": "google",
    "1af4": "virtio",
    "1b36": "qemu",
    "1d0f": "amazon",
    "1d94": "hygon",
    "1ded": "alibaba",
    "1eab": "huawei",
    "19e5": "huawei",
    "1414": "microsoft",
    "1425": "chelsio",
    "1d17": "zhaoxin",
    "1dd8": "pensando",
    "1fc9": "tehuti",
    "8086": "intel",
    "8088": "wangxun",
    "1d93": "yunsilicon",
}


def scan_pci(listing: str, vendors: Iterable[Vendor]) -> PciScan:
    """Sort the functions of a PCI listing; lines that are none are skipped."""
    known = sorted(vendors, key=lambda vendor: vendor.name)
    found: dict[str, list[tuple[str, str]]] = {}
    nics: list[PciNic] = []
    ignored: list[str] = []
    seen: set[str] = set()
    for line in listing.split("\n"):
        function = _function(line) if len(line) <= MAX_LINE else None
        if function is None or function[0] in seen:
            continue
        address, pci_vendor, device, pci_class = function
        seen.add(address)
        owner = next(
            (v for v in known if v.pci_ids.is_accelerator(pci_vendor, device, pci_class)), None
        )
        if owner is not None:
            found.setdefault(owner.name, []).append((address, device))
        elif pci_class.startswith("02"):
            company = _company(known, pci_vendor)
            nics.append(PciNic(vendor=company, bus_id=address, class_=pci_class))
        else:
            ignored += _label(known, pci_vendor, device, pci_class)
    groups = tuple(
        PciGroup(
            vendor=name,
            bus_ids=tuple(address for address, _ in functions),
            device_ids=tuple(device for _, device in functions),
        )
        for name, functions in found.items()
    )
    return PciScan(accelerators=groups, nics=tuple(nics), ignored=tuple(dict.fromkeys(ignored)))


def _function(line: str) -> tuple[str, str, str, str] | None:
    """Return address, vendor id, device id and four digits of class; None if the line is none."""
    lowered = line.lower().rstrip()
    match = _SYS.fullmatch(lowered)
    if match is not None:
        address, parts = text.bdf(match[1]), (match[2], match[3], match[4][:4])
    else:
        match = _LSPCI_N.match(lowered) or _LSPCI_NN.match(lowered)
        if match is None:
            return None
        address, parts = text.bdf(match[1]), (match[3], match[4], match[2])
    return None if address is None else (address, *parts)


def _company(known: Iterable[Vendor], pci_vendor: str) -> str:
    owned = (v.pci_ids.company for v in known if pci_vendor in v.pci_ids.vendors)
    return next((name for name in owned if name), _COMPANIES.get(pci_vendor, pci_vendor))


def _label(known: Iterable[Vendor], pci_vendor: str, device: str, pci_class: str) -> list[str]:
    """Name what could be taken for an accelerator: screens, parts of accelerators, parts of their makers."""
    owner = next((v.pci_ids for v in known if pci_vendor in v.pci_ids.vendors), None)
    company = _company(known, pci_vendor)
    if owner is not None and device in owner.skip:
        return [f"{company} {owner.skip[device]}"]
    if pci_class.startswith("03"):
        return [f"{company} vga"]
    if pci_class.startswith(("12", "0b40")):
        return [f"{company} accelerator {pci_vendor}:{device}"]
    if owner is None:
        return []
    if owner.others:
        return [f"{company} {owner.others}"]
    return [f"{company} audio"] if pci_class.startswith("04") and not owner.known_only else []
