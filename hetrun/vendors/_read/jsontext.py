"""JSON somewhere in a tool's output, behind progress bars and warnings. Its meaning is left to the parsers."""

from __future__ import annotations

import json
from collections.abc import Mapping

from hetrun.vendors._read.run import ToolRun

_MAX_TRIES = 24
_MAX_DOCUMENTS = 512
_NOISE = 32  # a failure further inside than this is a broken document, not a bracket in a sentence


def _pairs(items: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object; a key that stands there twice with different values is worth nothing."""
    found: dict[str, object] = {}
    for key, item in items:
        found[key] = None if key in found and found[key] != item else item
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=lambda _: None)


def documents(run: ToolRun) -> list[object]:
    """Return every whole JSON object or list that starts a line; none from inside a broken one."""
    text = run.stdout
    found: list[object] = []
    at = _next_start(text, 0)
    tries = 0
    while at is not None and tries < _MAX_TRIES and len(found) < _MAX_DOCUMENTS:
        try:
            document, end = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            if error.pos - at >= _NOISE or error.msg.startswith("Unterminated"):
                return found
            tries += 1
            at = _next_start(text, at + 1)
        except (RecursionError, ValueError):  # nested beyond reason, or a number of 5000 digits
            return found
        else:
            found.append(document)
            at = _next_start(text, end)
    return found


def _next_start(text: str, at: int) -> int | None:
    """Return where the next line begins with a bracket (or the first bracket after `at` on its line)."""
    places = [place for mark in "{[" if (place := text.find(mark, at)) >= 0]
    return min(places) if places else None


def items(value: object) -> list[Mapping[str, object]]:
    """Return the objects in a list; anything else is left out."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def record(value: object) -> Mapping[str, object]:
    """Return a JSON object, an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def inside(value: object, *path: str) -> object:
    """Walk into objects; None where a step is missing."""
    for step in path:
        value = record(value).get(step)
    return value
