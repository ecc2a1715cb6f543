"""A log that grows without end takes a bounded room, keeps its beginning and end, and its writer notices nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrun.transport import guard_logs
from hetrun.transport.guard_logs import Cap

KEPT = 1 << 20


def _grow(path: Path, mode: str) -> bytes:
    cap = Cap(path, KEPT)
    with path.open(mode, buffering=0) as writer:
        writer.write(b"first line\n")
        for number in range(160):
            writer.write(f"{number:07}\n".encode() * 8192)
            cap.cut(path.stat().st_size)
        writer.write(b"last line\n")
    return path.read_bytes()


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_beginning_and_end_stay_and_the_middle_takes_no_room(tmp_path: Path, mode: str) -> None:
    found = _grow(tmp_path / "log", mode)
    assert found.startswith(b"first line\n0000000\n")
    assert found.endswith(b"0000159\nlast line\n")
    assert b"of this log were dropped" in found[: KEPT // 2 + 200]
    assert (tmp_path / "log").stat().st_blocks * 512 < 2.5 * KEPT
    assert len(found) > 10 * KEPT


def test_without_holes_the_log_is_cut_and_still_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_logs, "_punch", lambda *_: False)
    found = _grow(tmp_path / "log", "wb")
    assert found.startswith(b"first line\n")
    assert found.endswith(b"last line\n")
    assert (tmp_path / "log").stat().st_blocks * 512 < 2.5 * KEPT
