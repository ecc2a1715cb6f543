"""One run of a tool as text: decoded, cut to a sane length, split into lines. Meaning is left to the parsers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CHARS = 2_000_000  # no tool prints as much, nor as many lines:
MAX_LINES = 20_000  # beyond that the output is cut, and the answer says so
MAX_LINE = 4096  # longer lines are no table, csv or key-value line

_ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_WORDS = re.compile(r"[^\s;&|()<>\"'`]+")
_FIELD_OPTIONS = ("--query-gpu", "--query", "-Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRun:
    """What was run and what came back."""

    words: tuple[str, ...]  # from the tool's name on, without its directory
    stdout: str
    stderr: str
    rc: int | None
    lines: tuple[str, ...]  # of stdout; those too long to be one are left out
    cut: bool = False

    @property
    def open_end(self) -> bool:
        """True where stdout stops inside a line: its last number may be cut short."""
        return bool(self.stdout) and not self.stdout.endswith("\n")

    def has(self, *flags: str) -> bool:
        """True if any of the flags stands on the command line, alone or as `--flag=value`."""
        return any(word.split("=", 1)[0] in flags for word in self.words)

    def option(self, *flags: str) -> str | None:
        """Return the value of the first of these flags, written `--flag value` or `--flag=value`."""
        for at, word in enumerate(self.words):
            flag, equals, value = word.partition("=")
            if flag in flags:
                if equals:
                    return value
                return self.words[at + 1] if at + 1 < len(self.words) else None
        return None

    @property
    def fields(self) -> tuple[str, ...]:
        """Field names of a csv query, in lower case."""
        asked = self.option(*_FIELD_OPTIONS) or ""
        return tuple(part.strip().lower() for part in asked.split(",") if part.strip())


def clean(data: str | bytes) -> tuple[str, bool]:
    """Decode, drop colours, carriage returns and NULs; return the text and whether it was cut."""
    text = data.decode("utf-8", errors="replace") if isinstance(data, bytes) else data
    cut = len(text) > MAX_CHARS
    if cut:
        text = text[:MAX_CHARS]
        text = text[: text.rfind("\n") + 1] or text
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "").lstrip("\ufeff")
    if text.count("\n") > MAX_LINES:
        rest = text.split("\n", MAX_LINES)[-1]
        text, cut = text[: len(text) - len(rest)], True
    return (_ANSI.sub("", text) if "\x1b" in text else text), cut


def tool_run(
    tools: Sequence[str], command: str, *, stdout: str | bytes, stderr: str | bytes, rc: int | None
) -> ToolRun:
    """Find the tool in the command's text and clean its output."""
    words = [word for word in _WORDS.findall(command[:MAX_LINE]) if word]
    names = [word.rsplit("/", 1)[-1] for word in words]
    start = next((at for at, name in enumerate(names) if name in tools), None)
    out, out_cut = clean(stdout)
    err, err_cut = clean(stderr)
    found = () if start is None else (names[start], *words[start + 1 :])
    lines = tuple(line for line in out.split("\n") if len(line) <= MAX_LINE)
    return ToolRun(words=found, stdout=out, stderr=err, rc=rc, lines=lines, cut=out_cut or err_cut)
