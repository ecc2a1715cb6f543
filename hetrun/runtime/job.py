"""Reads what launch wrote into the job directory, with nothing but the standard library.

The worker must not need pydantic, so this is a small strict decoder: JSON -> dataclasses of `hetrun.model`.
Acting on the result is left to `worker.py` and `loop.py`.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from hetrun.errors import ConfigError, StorageError
from hetrun.model import SCHEMA_VERSION, Plan

T = TypeVar("T")

PLAN_FILE = "plan.json"


def env_path(job_dir: Path, rank: int) -> Path:
    """Where launch puts the environment of one rank."""
    return job_dir / "env" / f"rank-{rank:04d}.json"


def events_path(job_dir: Path, rank: int) -> Path:
    """Where the worker puts the events of one rank."""
    return job_dir / "events" / f"rank-{rank:04d}.jsonl"


def progress_path(job_dir: Path, rank: int) -> Path:
    """Where the worker says how far one rank is."""
    return job_dir / "progress" / f"rank-{rank:04d}"


def data_cache(job_dir: Path) -> Path:
    """Where this host keeps prepared data: beside the folder of all jobs, so that it outlives this one."""
    jobs = job_dir.resolve().parent
    return jobs.parent / "data" if jobs.name == "jobs" else job_dir / "data"


def read_plan(job_dir: Path) -> Plan:
    """Load plan.json.

    Raises:
        ConfigError: another schema version, or a key that is missing, unknown or of the wrong type.
    """
    path = job_dir / PLAN_FILE
    data = read_json(path)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema_version {version!r}, this hetrun reads {SCHEMA_VERSION}",
            hint="write it again: hetrun plan",
        )
    return decode(Plan, data, where=str(path))


def read_env(job_dir: Path, rank: int) -> dict[str, str]:
    """Load the environment of one rank: name -> value."""
    path = env_path(job_dir, rank)
    return decode_value(dict[str, str], read_json(path), where=str(path))


def read_json(path: Path) -> Any:
    """Parse one JSON file; NaN and infinities are refused.

    Raises:
        StorageError: the file cannot be read.
        ConfigError: it is no JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error


def decode(kind: type[T], data: object, *, where: str) -> T:
    """Build one dataclass from parsed JSON; `where` names the file in messages.

    Raises:
        ConfigError: names the path of the key, what stands there and what is needed.
    """
    result: T = decode_value(kind, data, where=where)
    return result


def decode_value(kind: Any, data: object, *, where: str) -> Any:
    """Turn parsed JSON into a value of the annotated type `kind`."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _optional(kind, data, where)
    if origin is tuple:
        return _tuple(kind, data, where)
    if origin is dict:
        return _dict(kind, data, where)
    if is_dataclass(kind):
        return _dataclass(kind, data, where)
    if issubclass(kind, Enum):
        return _enum(kind, data, where)
    return _scalar(kind, data, where)


def _optional(kind: Any, data: object, where: str) -> Any:
    members = get_args(kind)
    if data is None and type(None) in members:
        return None
    (inner,) = (member for member in members if member is not type(None))
    return decode_value(inner, data, where=where)


def _tuple(kind: Any, data: object, where: str) -> tuple[Any, ...]:
    inner = get_args(kind)[0]
    if not isinstance(data, list):
        _fail(where, data, "a list")
    return tuple(
        decode_value(inner, item, where=f"{where}[{index}]") for index, item in enumerate(data)
    )


def _dict(kind: Any, data: object, where: str) -> dict[str, Any]:
    inner = get_args(kind)[1]
    if not isinstance(data, dict):
        _fail(where, data, "an object")
    return {key: decode_value(inner, item, where=f"{where}.{key}") for key, item in data.items()}


def _dataclass(kind: Any, data: object, where: str) -> Any:
    if not isinstance(data, dict):
        _fail(where, data, "an object")
    known = {field.name: field for field in fields(kind)}
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}, known are {', '.join(known)}")
    missing = [name for name, field in known.items() if _is_needed(field) and name not in data]
    if missing:
        raise ConfigError(f"{where}: key {missing[0]!r} is missing")
    hints = _hints(kind)
    values = {
        name: decode_value(hints[name], item, where=f"{where}.{name}")
        for name, item in data.items()
    }
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _enum(kind: type[Enum], data: object, where: str) -> Enum:
    members = {member.value: member for member in kind}
    if not isinstance(data, str) or data not in members:
        _fail(where, data, f"one of {', '.join(map(repr, members))}")
    return members[data]


def _scalar(kind: type, data: object, where: str) -> Any:
    wanted = (int, float) if kind is float else (kind,)
    if not isinstance(data, wanted) or (isinstance(data, bool) and kind is not bool):
        _fail(where, data, kind.__name__)
    return kind(data)


def _is_needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _fail(where: str, data: object, needed: str) -> NoReturn:
    raise ConfigError(f"{where}: got {json.dumps(data)[:80]}, need {needed}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_hints: Callable[[Any], dict[str, Any]] = lru_cache(maxsize=None)(get_type_hints)
