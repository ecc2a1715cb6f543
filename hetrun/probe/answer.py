"""What came back from a host -> sections of plain text. What they mean is decided in `host.py` and `devices.py`.

Everything here was written by another machine: sizes are capped, and text loses escapes and control characters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

MAX_TEXT = 200
_HEADER = re.compile(rb"(out|err|end|full)((?: [A-Za-z0-9._:+-]+)*)")
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-9;:<=>?]{0,40}[ -/]{0,4}[@-~]|[\]PX^_][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|.)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What one command left; `rc` is None where it did not get so far, `cut` where there was more."""

    rc: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    cut: bool = False

    @property
    def text(self) -> str:
        """Standard output as text."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def lines(self) -> list[str]:
        """Lines of standard output."""
        return self.text.splitlines()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All sections of a host. `start_s` and `end_s` are the host's clock; None where it could not say."""

    sections: Mapping[str, Section]
    is_complete: bool = False
    no_space: bool = False
    start_s: float | None = None
    end_s: float | None = None

    def section(self, name: str) -> Section:
        """Return a section; an empty one where it is missing."""
        return self.sections.get(name, Section())


def read_answer(output: bytes, *, nonce: str) -> Answer:
    """Split the output of the script at the lines that carry its nonce; never raises."""
    sections: dict[str, Section] = {}
    is_complete = no_space = False
    clock: list[float | None] = [None, None]
    for part in output.split(b"\n" + nonce.encode() + b" ")[1:]:
        head, _, body = part.partition(b"\n")
        found = _HEADER.fullmatch(head)
        if found is None:
            continue
        words = found[2].decode("ascii").split()
        match found[1]:
            case b"end":
                is_complete = True
                clock = [_number(word) for word in (*words, "", "")[:2]]
            case b"full":
                no_space = True
            case b"out" if len(words) == 3:
                size = _integer(words[2]) or 0
                sections[words[0]] = Section(
                    rc=_integer(words[1]), stdout=body, cut=len(body) < size
                )
            case b"err" if words and words[0] in sections:
                before = sections[words[0]]
                sections[words[0]] = Section(
                    rc=before.rc, stdout=before.stdout, stderr=body, cut=before.cut
                )
    return Answer(
        sections=sections,
        is_complete=is_complete,
        no_space=no_space,
        start_s=clock[0],
        end_s=clock[1],
    )


def plain(text: str | bytes | None, *, max_chars: int = MAX_TEXT) -> str | None:
    """Return text of a host on one line, without escapes and control characters; None if nothing is left."""
    if text is None:
        return None
    if isinstance(text, bytes):
        text = text[: 8 * max_chars].decode("utf-8", "replace")
    text = _ESCAPE.sub("", text[: 8 * max_chars])
    kept = "".join(" " if unicodedata.category(char)[0] in "CZ" else char for char in text)
    line = " ".join(kept.split())
    if len(line) > max_chars:
        line = line[: max_chars - 3] + "..."
    return line or None


def last_line(data: bytes) -> str | None:
    """Return the last line that says something: that is where tools put the reason."""
    for line in reversed(data.decode("utf-8", "replace").splitlines()):
        if found := plain(line):
            return found
    return None


def _integer(word: str) -> int | None:
    return int(word) if re.fullmatch(r"-?[0-9]{1,15}", word) else None


def _number(word: str) -> float | None:
    return float(word) if re.fullmatch(r"[0-9]{1,12}(?:\.[0-9]{1,12})?", word) else None
