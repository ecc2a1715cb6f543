"""Reads what one rank wrote while it ran, line by line. What the events add up to is left to `gather.py`.

The files were written on other machines, so nothing in them is trusted: a torn last line and an event of
another version cost a warning, a field of the wrong type or an impossible number is an error that names its line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Tag, TypeAdapter, ValidationError

from hetrun.errors import ConfigError, StorageError
from hetrun.model import (
    CheckpointEvent,
    ComparisonEvent,
    EndEvent,
    ErrorEvent,
    EvaluationEvent,
    Event,
    StartEvent,
    StepEvent,
    TraceEvent,
    WarningEvent,
)
from hetrun.report.words import printable

MAX_LINE_BYTES = 64 << 20  # a trace of a deep pipeline has some 100,000 spans of 80 bytes

_KINDS = {
    "start": StartEvent,
    "step": StepEvent,
    "trace": TraceEvent,
    "evaluation": EvaluationEvent,
    "checkpoint": CheckpointEvent,
    "comparison": ComparisonEvent,
    "warning": WarningEvent,
    "error": ErrorEvent,
    "end": EndEvent,
}


def read_events(path: Path, warn: Callable[[str], None]) -> Iterator[Event]:
    """Yield the events of one file in order; what can be passed over is said through `warn`.

    Raises:
        ConfigError: a line is not what the format says; names file, line and key.
        StorageError: the file cannot be read.
    """
    adapter = _adapter()
    unknown: set[str] = set()
    torn: ConfigError | None = None
    where = str(path)
    for number, line in _lines(path):
        if not line.strip():
            continue
        if torn is not None:  # only the last line may be torn
            raise torn
        where = f"{path} line {number}"
        try:
            event = adapter.validate_json(line, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["type"] == "json_invalid":
                torn = _wrong(where, "", "is not JSON")
                continue
            name = _unknown_event(line) if first["type"] == "union_tag_invalid" else None
            if name is None:
                raise _wrong(where, *_what(first)) from error
            if name not in unknown and len(unknown) < 8:
                warn(f"{where}: unknown event {name}, passed over")
            unknown.add(name)
            continue
        _check(event, where)
        yield event
    if torn is not None:
        warn(f"{where}: torn, passed over; the rank was stopped while it wrote")


def _adapter() -> TypeAdapter[Event]:
    """The union of all events, told apart by their field `event`."""
    start, step, trace = Tag("start"), Tag("step"), Tag("trace")
    error, end, evaluation = Tag("error"), Tag("end"), Tag("evaluation")
    checkpoint, warning, comparison = Tag("checkpoint"), Tag("warning"), Tag("comparison")
    union: Any = Annotated[
        Annotated[StartEvent, start]
        | Annotated[StepEvent, step]
        | Annotated[TraceEvent, trace]
        | Annotated[EvaluationEvent, evaluation]
        | Annotated[CheckpointEvent, checkpoint]
        | Annotated[ComparisonEvent, comparison]
        | Annotated[WarningEvent, warning]
        | Annotated[ErrorEvent, error]
        | Annotated[EndEvent, end],
        Discriminator(_event_name),
    ]
    return TypeAdapter(union)


def _event_name(value: Any) -> str:
    name = value.get("event") if isinstance(value, dict) else None
    return name if isinstance(name, str) else "event without a name"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise _wrong(f"{path} line {number}", "", "is longer than 64 MiB")
                yield number, line
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror}", hint="check the permissions of the run folder"
        ) from error


def _unknown_event(line: bytes) -> str | None:
    """Name of an event that another version may know; None where the line is no event at all."""
    value = json.loads(line)
    name = value.get("event") if isinstance(value, dict) else None
    return repr(printable(name, max_chars=40)) if isinstance(name, str) else None


def _what(error: Any) -> tuple[str, str]:
    """(key, complaint) of a pydantic error; the key starts after the tag of the event."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location[1:] if location and location[0] in _KINDS else location)
    if error["type"] == "union_tag_invalid":
        return "", "is no event: it has no field `event` with a name"
    shown = printable(repr(error.get("input")), max_chars=60)
    if error["type"] == "missing":
        return key, "is missing"
    return key, f"is {shown}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _wrong(where: str, key: str, complaint: str) -> ConfigError:
    name = f": {printable(key, max_chars=120)}" if key else ""
    return ConfigError(
        f"{where}{name} {complaint}",
        hint="the line was damaged or written by another version; take it out of the file to report without it",
    )


def _check(event: Event, where: str) -> None:
    """Refuse numbers that no step can have; infinite ones and NaN were refused before."""
    if isinstance(event, StepEvent):
        if event.step < 0 or event.num_tokens < 0:
            key = "step" if event.step < 0 else "num_tokens"
            raise _wrong(where, key, f"is {getattr(event, key)}, need 0 or more")
        if event.step_s <= 0:
            raise _wrong(where, "step_s", f"is {event.step_s}, need more than 0")
        for key in ("busy_s", "communication_s", "idle_s"):
            seconds = getattr(event, key)
            if seconds < -1e-6 * event.step_s:  # rounding
                raise _wrong(where, key, f"is {seconds}, need 0 or more")
    if isinstance(event, EvaluationEvent) and event.step < 0:
        raise _wrong(where, "step", f"is {event.step}, need 0 or more")
    if isinstance(event, TraceEvent):
        for index, span in enumerate(event.spans):
            if not 0 <= span.start_s <= span.end_s:
                raise _wrong(
                    where,
                    f"spans.{index}",
                    f"runs from {span.start_s} to {span.end_s}, need 0 <= start_s <= end_s",
                )
