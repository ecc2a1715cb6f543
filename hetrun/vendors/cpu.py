"""The host's own processor, as `lscpu` shows it. Memory comes from /proc/meminfo, which probe reads itself."""

from __future__ import annotations

from hetrun.vendors._read import text
from hetrun.vendors._read.answer import CpuAnswer, ToolAnswer
from hetrun.vendors._read.blocks import complete_lines, pair
from hetrun.vendors._read.jsontext import documents, inside, items
from hetrun.vendors._read.run import ToolRun
from hetrun.vendors._read.vendor import ProbeCommand, Vendor


def parse(run: ToolRun) -> ToolAnswer:
    """Read `lscpu -J` (flat or nested) or its plain text."""
    fields = _json_fields(run) or _text_fields(run)
    if "architecture" not in fields and "cpu(s)" not in fields:
        return ToolAnswer()
    return ToolAnswer(
        cpu=CpuAnswer(
            model=text.name(fields.get("model name")),
            arch=text.name(fields.get("architecture")),
            sockets=text.number(fields.get("socket(s)")),
            cores_per_socket=text.number(
                fields.get("core(s) per socket") or fields.get("core(s) per cluster")
            ),
            threads_per_core=text.number(fields.get("thread(s) per core")),
            logical=text.number(fields.get("cpu(s)")),
            numa_nodes=text.number(fields.get("numa node(s)")),
            flags=frozenset((fields.get("flags") or fields.get("features") or "").split()),
        )
    )


def _json_fields(run: ToolRun) -> dict[str, str]:
    """Walk the list and all children; the first of equal names wins."""
    found: dict[str, str] = {}
    for document in documents(run):
        waiting = list(reversed(items(inside(document, "lscpu"))))
        while waiting:
            node = waiting.pop()
            key, data = node.get("field"), node.get("data")
            if isinstance(key, str) and isinstance(data, str):
                found.setdefault(key.rstrip(": ").lower(), data)
            waiting += reversed(items(node.get("children")))
    return found


# keys of a Chinese lscpu, for an answer that somebody else's locale made
_CHINESE = {
    "架构": "architecture",
    "型号名称": "model name",
    "座": "socket(s)",
    "每个座的核数": "core(s) per socket",
    "每个核的线程数": "thread(s) per core",
    "numa 节点": "numa node(s)",
    "标记": "flags",
}


def _text_fields(run: ToolRun) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in complete_lines(run):
        split = pair(line.replace("\uff1a", ":", 1))  # a full-width colon
        if split is not None:
            found.setdefault(_CHINESE.get(split[0], split[0]), split[1])
    return found


VENDOR = Vendor(
    name="cpu",
    title="CPU",
    parse=parse,
    tools=("lscpu",),
    probe_commands=(
        ProbeCommand(command="LC_ALL=C lscpu -J", paths=("/usr/bin",)),
        ProbeCommand(command="LC_ALL=C lscpu", paths=("/usr/bin",)),
    ),
    torch_device="cpu",
    torch_plugin=None,
    collective_backend="gloo",
    collective_family="gloo",
    visible_devices_env=None,
    notes=("The model name may be absent on ARM.",),
)
