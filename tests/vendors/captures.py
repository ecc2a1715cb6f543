"""The captured tool outputs beside this file, with the answers they must give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hetrun.vendors import ToolAnswer, read_tool

ROOT = Path(__file__).parent


@dataclass(frozen=True)
class Capture:
    """One output of one tool."""

    vendor: str
    id: str
    command: str
    stream: str
    rc: int | None
    text: str
    expect: dict[str, Any]

    def read(self, text: str | None = None) -> ToolAnswer:
        """Read this capture, or another text in its place."""
        text = self.text if text is None else text
        if self.stream == "stderr":
            return read_tool(self.vendor, self.command, stderr=text, rc=self.rc)
        return read_tool(self.vendor, self.command, stdout=text, rc=self.rc)


def load_captures() -> tuple[Capture, ...]:
    """Return all captures, in order of vendor."""
    return tuple(
        Capture(
            vendor=index.parent.name,
            id=sample["id"],
            command=sample["command"],
            stream=sample["stream"],
            rc=sample["rc"],
            text=(index.parent / sample["file"]).read_text(),
            expect=sample["expect"],
        )
        for index in sorted(ROOT.glob("*/index.yaml"))
        for sample in yaml.safe_load(index.read_text())["samples"]
    )


CAPTURES = load_captures()
