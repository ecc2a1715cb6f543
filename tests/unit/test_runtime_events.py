"""Events are whole lines, and what cannot be written is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetrun.errors import StorageError
from hetrun.model import EndEvent, StartEvent
from hetrun.runtime.events import EventWriter, error_event

START = StartEvent(
    rank=1, host="a", pid=3, wall_s=1.5, torch_version="2.4.0", device="emulated red r1"
)
END = EndEvent(rank=1, wall_s=2.5, steps=2, parameters_sha="ab")


def test_each_event_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-0001.jsonl"
    writer = EventWriter(path)
    writer.write(START)
    assert json.loads(path.read_text()) == {
        "event": "start", "rank": 1, "host": "a", "pid": 3, "wall_s": 1.5,
        "torch_version": "2.4.0", "device": "emulated red r1",
    }  # fmt: skip
    writer.write(END)
    writer.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["start", "end"]


def test_full_disk_is_a_storage_error_with_a_hint() -> None:
    writer = EventWriter(Path("/dev/full"))
    with pytest.raises(StorageError, match="No space left on device") as caught:
        writer.write(START)
    assert "work_dir" in str(caught.value.hint)
    with pytest.raises(StorageError):
        writer.close()


def test_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file")
    with pytest.raises(StorageError, match="cannot write events"):
        EventWriter(tmp_path / "events" / "rank-0001.jsonl")


def test_last_words_hold_class_message_step_and_traceback() -> None:
    try:
        raise KeyError("lost")
    except KeyError as error:
        event = error_event(error, error.__traceback__, rank=4, host="b", step=7)
    assert (event.kind, event.message, event.step) == ("KeyError", "'lost'", 7)
    assert (event.rank, event.host, event.event) == (4, "b", "error")
    assert "test_runtime_events.py" in event.traceback
    assert event.traceback.endswith("KeyError: 'lost'\n")
