"""`key : value` text with indented or titled blocks, as `-q` options print it, and XML of the same content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, ToolAnswer, ToolError
from hetrun.vendors._read.run import ToolRun


@dataclass(slots=True)
class Block:
    """Pairs under one heading: `pairs` by 'section/key' and by 'key' (the first one wins), all lower case."""

    title: str
    pairs: dict[str, str] = field(default_factory=dict)

    def get(self, *keys: str) -> str | None:
        """Return the value under the first of these keys that is there."""
        return next((self.pairs[key] for key in keys if key in self.pairs), None)


def pair(line: str) -> tuple[str, str] | None:
    """Split 'key : value'; None if the line is no pair."""
    key, colon, rest = line.partition(":")
    return (key.strip().lower(), rest.strip()) if colon and key.strip() and rest.strip() else None


def complete_lines(run: ToolRun) -> list[str]:
    """Return the lines without a last one that has no end: its value may be cut short."""
    return run.lines[:-1] if run.open_end else run.lines


def read_blocks(lines: Sequence[str], starts: tuple[str, ...]) -> tuple[Block, list[Block]]:
    """Cut text into a head and one block per line that begins with one of `starts`."""
    head = Block(title="")
    blocks: list[Block] = []
    section = ""
    for line in lines:
        stripped = line.strip()
        block = blocks[-1] if blocks else head
        if stripped.startswith(starts):
            blocks.append(Block(title=stripped))
            section = ""
            continue
        found = pair(line)
        if found is not None:
            block.pairs.setdefault(f"{section}/{found[0]}", found[1])
            block.pairs.setdefault(*found)
        elif stripped:
            section = stripped.rstrip(":").strip().lower()
    return head, blocks


def read_smi_xml(run: ToolRun, tag: str = "gpu") -> ToolAnswer | None:
    """Read the log that nvidia-smi and its look-alikes write with `-q -x`; None if there is none whole.

    Devices stand in order of their index, which the log does not give.
    """
    start = run.stdout.find("<?xml")
    if start < 0 or "<!ENTITY" in run.stdout:
        return None
    try:
        root = ElementTree.fromstring(run.stdout[start:])
    except (ElementTree.ParseError, ValueError):
        return None
    driver = text.version(root.findtext("driver_version"))
    nodes = root.findall(tag)
    told = text.number(root.findtext(f"attached_{tag}s"))
    warnings: list[str] = []
    devices = []
    for at, node in enumerate(nodes):
        total = node.findtext("fb_memory_usage/total")
        memory = text.memory(total)
        if memory is None:
            warnings.append("memory_unknown")
        if (node.findtext("mig_mode/current_mig") or "").strip() == "Enabled":
            warnings.append("mig_enabled")
        device = FoundDevice(
            index=at,
            model=text.name(node.findtext("product_name")),
            memory_bytes=memory,
            driver=driver,
            bus_id=text.bdf(node.get("id") or node.findtext("pci/pci_bus_id")),
            uuid=text.value(node.findtext("uuid")),
            health="err" if any(text.is_broken(leaf.text or "") for leaf in node.iter()) else None,
        )
        devices.append(device)
    complete = told is None or told == len(devices)
    return ToolAnswer(
        devices=tuple(devices),
        error=None if complete else ToolError.PARTIAL_DEVICE_ERROR,
        warnings=tuple(warnings),
    )
