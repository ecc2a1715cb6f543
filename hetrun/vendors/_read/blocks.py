"""`key : value` text with indented or titled blocks, as `-q` options print it, and XML of the same content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from xml.etree import ElementTree

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import FoundDevice, Partition, ToolAnswer, ToolError
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


def complete_lines(run: ToolRun) -> tuple[str, ...]:
    """Return the lines without a last one that has no end: its value may be cut short."""
    return run.lines[:-1] if run.open_end else run.lines


def read_blocks(lines: Sequence[str], start: str) -> tuple[Block, list[Block]]:
    """Cut text into a head and one block per line of `start` and a number, such as 'DEV ID 0'."""
    head = Block(title="")
    blocks: list[Block] = []
    section = ""
    for line in lines:
        stripped = line.strip()
        block = blocks[-1] if blocks else head
        if stripped.startswith(start) and stripped[len(start) :].lstrip()[:1].isdigit():
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


def read_smi_text(run: ToolRun, start: str) -> ToolAnswer | None:
    """Read the log that nvidia-smi and its look-alikes write with `-q`: one block per 'GPU <address>'."""
    head, blocks = read_blocks(complete_lines(run), start)
    blocks = [block for block in blocks if text.bdf(block.title)]
    if not blocks:
        return None
    told = text.number(head.get(f"attached {start.strip().lower()}s"))
    driver = text.version((head.get("kmd version", "driver version") or "").partition(" ")[0])
    warnings: list[str] = []
    devices: list[FoundDevice] = []
    are_named = any(block.get("product name") for block in blocks)  # not with -d MEMORY
    for at, block in enumerate(blocks):
        minor = text.index(block.get("minor number"))
        memory = text.memory(block.get("fb memory usage/total", "memory usage/total"))
        name = text.name(block.get("product name"))
        if (name is None and (are_named or memory is None)) or (
            memory is None and at == len(blocks) - 1 and not _tells_memory(block)
        ):
            continue  # the text stops inside this block
        warnings += [] if memory else ["memory_unknown"]
        device = FoundDevice(
            index=at if told == len(blocks) or minor is None else minor,
            model=name,
            memory_bytes=memory,
            driver=driver,
            bus_id=text.bdf(block.title),
            uuid=text.value(block.get("gpu uuid", "xpu uuid", "uuid")),
        )
        devices.append(device)
    return _counted(devices, told if told != len(blocks) else None, len(blocks), warnings)


def _tells_memory(block: Block) -> bool:
    return block.get("fb memory usage/total", "memory usage/total") is not None


def _counted(
    devices: Sequence[FoundDevice], told: int | None, num_blocks: int, warnings: Sequence[str]
) -> ToolAnswer:
    """Add an error if blocks were cut, or fewer stand there than the tool says (unless one was asked for)."""
    missing = len(devices) < num_blocks or (told is not None and 1 < num_blocks < told)
    return ToolAnswer(
        devices=tuple(devices),
        error=ToolError.PARTIAL_DEVICE_ERROR if missing else None,
        warnings=tuple(warnings),
    )


def read_smi_xml(run: ToolRun) -> ToolAnswer | None:
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
    nodes = root.findall("gpu") or root.findall("xpu")
    told = text.number(root.findtext("attached_gpus") or root.findtext("attached_xpus"))
    version = root.findtext("kmd_version") or root.findtext("driver_version") or ""
    driver = text.version(version.strip().partition(" ")[0])
    warnings: list[str] = []
    devices = []
    for at, node in enumerate(nodes):
        device = replace(_xml_device(node, at), driver=driver)
        warnings += ["memory_unknown"] if device.memory_bytes is None else []
        warnings += ["mig_enabled"] if device.sliced else []
        devices.append(device)
    if not devices and told is None:
        return None
    if not devices:
        return ToolAnswer(error=ToolError.NO_DEVICES)
    return _counted(devices, None, told or len(devices), warnings)


def _xml_device(node: ElementTree.Element, number: int) -> FoundDevice:
    ill = any(text.is_broken(leaf.text or "") for leaf in node.iter())
    total = node.findtext("fb_memory_usage/total") or node.findtext("memory_usage/total")
    parts = [
        (ordinal, part)
        for part in node.findall("mig_devices/mig_device")
        if (ordinal := text.index(part.findtext("index"))) is not None
    ]
    return FoundDevice(
        index=number,
        model=text.name(node.findtext("product_name")),
        memory_bytes=text.memory(total),
        bus_id=text.bdf(node.get("id") or node.findtext("pci/pci_bus_id")),
        uuid=text.value(node.findtext("uuid")),
        health="err" if ill else None,
        partitions=tuple(
            Partition(profile=None, ordinal=ordinal, uuid=text.value(part.findtext("uuid")))
            for ordinal, part in parts
        ),
        partition_bytes=tuple(
            (ordinal, size)
            for ordinal, part in parts
            if (size := text.memory(part.findtext("fb_memory_usage/total")))
        ),
        sliced=(node.findtext("mig_mode/current_mig") or "").strip() == "Enabled",
    )
