"""Files of the user -> model objects, with errors that name the file and the key. What a key means is left to its reader.

YAML scalars stay text, so `022`, `on` and `12:34:56` mean what they look like; pydantic then types them by
the dataclasses of `hetrun.model`. An empty scalar and `null` are None.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from hetrun.errors import ConfigError

T = TypeVar("T")

MAX_BYTES = 4 << 20
MAX_DEPTH = 16
MAX_PROBLEMS_SHOWN = 12
MAX_VALUE_SHOWN = 60
_PLAINLY = {
    "Input should be ": "need ",
    "a valid tuple": "a list",
    "a valid dictionary": "a mapping",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
}


class _Composer(yaml.SafeLoader):
    """Builds nodes only; nothing in a file can name a type, and no node can stand in two places."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose one node, after a look at the event that begins it."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _refused(event, "anchors and aliases are not read here; use defaults or vars")
        if getattr(event, "tag", None) is not None:
            raise _refused(event, f"tag {event.tag!r} is not read here; leave it out")
        if self.depth >= MAX_DEPTH:
            raise _refused(event, f"nested deeper than {MAX_DEPTH} levels")
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _refused(at: Any, problem: str) -> yaml.MarkedYAMLError:
    """Return an error that points at an event or a node."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def _plain(node: yaml.Node) -> Any:
    """Return a node as dict, list, str or None; refuse keys that are not plain text or stand there twice."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key, str) or not key:
                raise _refused(key_node, "a key must be text")
            line = key_node.start_mark.line + 1
            if key in lines:
                raise _refused(
                    key_node, f"key {key!r} stands there twice, first in line {lines[key]}"
                )
            lines[key] = line
            mapping[key] = _plain(value_node)
        return mapping
    text: str = node.value
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    return None if is_plain and text in ("", "null") else text


def read_text(path: Path, *, max_bytes: int, hint: str | None = None) -> str:
    """Return a file's text.

    Raises:
        ConfigError: it is missing, not readable, larger than `max_bytes` or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file", hint=hint) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}", hint=hint) from error
    if len(data) > max_bytes:
        raise ConfigError(f"{path}: larger than {max_bytes >> 20} MiB, which no such file needs")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}: line {line}: not UTF-8 text") from error


def read_yaml(path: Path, *, hint: str | None = None) -> dict[str, Any]:
    """Return a YAML file as dicts and lists of text.

    Raises:
        ConfigError: no such file, not YAML, not a mapping, a key twice, a tag, an anchor, too large or too deep.
    """
    text = read_text(path, max_bytes=MAX_BYTES, hint=hint)
    try:
        loader = _Composer(text)
        try:
            node = loader.get_single_node()
            content = None if node is None else _plain(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{path}: {where}{error.problem or error.context}", hint=hint) from error
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
    ) as error:  # the last two: escapes like "\\UFFFFFFFF"
        what = str(error).splitlines()[0]
        raise ConfigError(f"{path}: not a YAML text: {what}", hint=hint) from error
    if not isinstance(content, dict):
        what = "empty" if content is None else "not a mapping of keys to values"
        raise ConfigError(f"{path}: {what}", hint=hint)
    return content


# --- typed ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_noun(kind: type[T], data: object) -> T:
    """Return `data` as a `kind` of `hetrun.model`; text becomes numbers where numbers are due.

    Raises:
        BadKeysError: some keys are wrong; it knows the path of each.
    """
    key: Any = kind
    try:
        noun: T = _adapter(key).validate_python(data)
    except ValidationError as error:
        raise BadKeysError([_problem(kind, item) for item in error.errors()]) from error
    return noun


class BadKeysError(ValueError):
    """Some keys are wrong; `problems` are (path of the key, what is wrong with it)."""

    def __init__(self, problems: Sequence[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(f"{'.'.join(path)}: {what}" for path, what in problems))
        self.problems = tuple(problems)


def config_error(
    path: Path, problems: Iterable[tuple[tuple[str, ...], str]], *, hint: str | None = None
) -> ConfigError:
    """Return one error that lists all problems of one file, a line each."""
    lines = [f"{'.'.join(keys)}: {what}" if keys else what for keys, what in problems]
    lines = list(dict.fromkeys(lines))
    if len(lines) == 1:
        return ConfigError(f"{path}: {lines[0]}", hint=hint)
    shown = lines[:MAX_PROBLEMS_SHOWN]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    return ConfigError("\n  ".join([f"{path}: {len(lines)} things are wrong", *shown]), hint=hint)


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Say that a key is unknown, and the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; known are {', '.join(names)}" if names else "unknown key"


def shown(value: object) -> str:
    """Return a value as an error may show it: short, and on one line."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= MAX_VALUE_SHOWN else text[: MAX_VALUE_SHOWN - 3] + "..."


def _problem(kind: Any, error: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """Return path and words of one of pydantic's errors."""
    path = tuple(str(part) for part in error["loc"])
    match error["type"]:
        case "unexpected_keyword_argument":
            return path, unknown_key(path[-1], _known_keys(_type_at(kind, error["loc"][:-1])))
        case "missing":
            return path, "is missing"
        case "value_error":
            words = str(error["ctx"]["error"])
            return path, words.removeprefix(f"{path[-1]}: ") if path else words
        case "dataclass_type":
            known = _known_keys(_type_at(kind, error["loc"]))
            need = f"need a mapping with keys {', '.join(known)}"
        case _:
            need = str(error["msg"]).split(", unable to parse")[0]
            for words, plainly in _PLAINLY.items():
                need = need.replace(words, plainly, 1)
    hide = "env" in path and error["input"] is not None
    got = "a value that is not shown" if hide else shown(error["input"])
    return path, f"{need}, got {got}"


def _known_keys(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def _type_at(kind: Any, path: Sequence[str | int]) -> Any:
    """Return the type that stands at `path` below `kind`; None where a path leaves the dataclasses."""
    for part in path:
        kind = _dataclass_in(kind)
        if not is_dataclass(kind):
            return None
        if isinstance(part, str):
            kind = get_type_hints(kind).get(part)
    return _dataclass_in(kind)


def _dataclass_in(kind: Any) -> Any:
    """Return the first dataclass in `tuple[X, ...]`, `X | None` and the like; the type itself otherwise."""
    if get_origin(kind) is None:
        return kind
    for argument in get_args(kind):
        found = _dataclass_in(argument)
        if is_dataclass(found):
            return found
    return None
