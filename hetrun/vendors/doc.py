"""docs/vendors.md from the vendors' own files: what is supported, and how sure we are of each fact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hetrun.vendors._read.vendor import Chip, Vendor

_HEAD = """# Vendors

Written by `hetrun.vendors.vendors_markdown()` from the files in `hetrun/vendors/`; a test compares the two. Do not edit.

No accelerator of any of these vendors was at hand. "public" means that a public source says so, or that a
public project does so; "unverified" means a single weak source or a guess. Where a figure is not published
it stays empty, and a plan uses what `hetrun profile` measures.

"""

_ADD = """
To add one, write one file with a `Vendor` (see any file in `hetrun/vendors/`) and captured outputs with their right answers in
`tests/vendors/<name>/`; [CONTRIBUTING.md](../CONTRIBUTING.md) has the steps. A package of your own joins through an entry point in the group
`hetrun.vendors`, without a change here.
"""


def vendors_markdown(vendors: Mapping[str, Vendor]) -> str:
    """Return the page for these vendors."""
    parts = [_HEAD, *_table(_OVERVIEW, (_overview(vendor) for vendor in vendors.values()))]
    parts.append(_ADD)
    parts.append(
        "\nEqual backend names do not mean that two vendors' ranks can talk: the library must be the same.\n"
    )
    for vendor in vendors.values():
        parts += _section(vendor)
    return "".join(parts)


_OVERVIEW = ("vendor", "name", "tool", "torch device", "plugin", "backend (library)", "selected by")


def _overview(vendor: Vendor) -> tuple[str, ...]:
    selected = vendor.visible_devices_env
    return (
        vendor.title,
        f"`{vendor.name}`",
        ", ".join(f"`{tool}`" for tool in vendor.tools),
        f"`{vendor.torch_device}`",
        f"`{vendor.torch_plugin}`" if vendor.torch_plugin else "built in",
        f"`{vendor.collective_backend}` ({vendor.collective_family})",
        f"`{selected}` ({vendor.visible_devices_id})" if selected else "",
    )


def _section(vendor: Vendor) -> list[str]:
    parts = [f"\n## {vendor.title}\n\n"]
    parts += _table(("fact", "value", "how sure"), _facts(vendor))
    if vendor.models:
        parts.append("\n")
        parts += _table(_CHIPS, (_chip(chip) for chip in vendor.models))
    if vendor.notes:
        parts.append("\n")
        parts += [f"- {note}\n" for note in vendor.notes]
    return parts


def _facts(vendor: Vendor) -> list[tuple[str, str, str]]:
    ids = vendor.pci_ids
    rows = {
        "probe_commands": "; ".join(_code(command.command) for command in vendor.probe_commands),
        "probe_commands.paths": _codes(
            dict.fromkeys(p for c in vendor.probe_commands for p in c.paths)
        ),
        "run as root": _codes(c.command for c in vendor.probe_commands if c.needs_root)
        and "with sudo -n where the inventory says `become: true`",
        "topology_command": _code(vendor.topology_command.command)
        if vendor.topology_command
        else "",
        "ports_command": _code(vendor.ports_command.command) if vendor.ports_command else "",
        "slice_nodes": _codes(vendor.slice_nodes),
        "extra_env": _codes(f"{key}={value}" for key, value in vendor.extra_env.items()),
        "nic_env": _codes(f"{key}={value}" for key, value in vendor.nic_env.items()),
        "pci_ids": _codes(ids.vendors),
        "pci_ids.devices": ", ".join(f"`{key}` {name}" for key, name in ids.devices.items()),
        "pci_ids.skip": ", ".join(f"`{key}` {name}" for key, name in ids.skip.items()),
        "device_nodes": _codes(vendor.device_nodes),
        "kernel_modules": _codes(vendor.kernel_modules),
        "peer_memory_modules": _codes(vendor.peer_memory_modules),
        "torch_device": _code(vendor.torch_device),
        "torch_plugin": _code(vendor.torch_plugin or ""),
        "collective_backend": _code(vendor.collective_backend),
        "visible_devices_env": _code(vendor.visible_devices_env or ""),
        "container_devices_env": _codes(vendor.container_devices_env),
        "sdk_roots": _codes(vendor.sdk_roots),
        "sdk_env": _codes(vendor.sdk_env),
        "errors": ", ".join(f'"{text}" {error}' for text, error in vendor.errors),
        "rc_errors": ", ".join(f"{rc} {error}" for rc, error in vendor.rc_errors.items()),
    }
    return [(key, value, _sure(vendor, key)) for key, value in rows.items() if value]


def _sure(vendor: Vendor, field: str) -> str:
    """Return the mark of one field; a remark after the field's name narrows what is unverified."""
    for mark in vendor.unverified:
        name, _, rest = mark.partition(" ")
        if name == field:
            return f"public, but unverified: {rest}" if rest else "unverified"
    return "public"


_CHIPS = ("chip", "memory (MiB)", "peak (TFLOP/s)", "bandwidth (TB/s)", "source", "confidence")


def _chip(chip: Chip) -> tuple[str, ...]:
    peak = "" if chip.peak_tflops is None else f"{chip.peak_tflops:g} {chip.dtype}"
    memory = "" if chip.memory_mib is None else str(chip.memory_mib)
    bandwidth = "" if chip.tb_per_s is None else f"{chip.tb_per_s:g}"
    return (chip.name, memory, peak, bandwidth, chip.source, chip.confidence.value)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _codes(texts: Iterable[str]) -> str:
    return ", ".join(_code(text) for text in texts)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines]
