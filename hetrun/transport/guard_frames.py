"""Frames between controller and guard: a magic, the call's nonce, two lengths, a JSON object, raw bytes.

Used on both sides; needs the standard library only. What frames mean is left to `guard.py` and `jobs.py`.
"""

from __future__ import annotations

import json
import struct
from typing import Any

Meta = dict[str, Any]
Frame = tuple[Meta, bytes]

MAX_META = 1 << 22
MAX_DATA = 1 << 28
MAX_NOISE = 1 << 16
_LENGTHS = struct.Struct(">II")


def pack(nonce: str, meta: Meta, data: bytes = b"") -> bytes:
    """Return one frame as bytes."""
    text = json.dumps(meta).encode()
    return _magic(nonce) + _LENGTHS.pack(len(text), len(data)) + text + data


def _magic(nonce: str) -> bytes:
    return b"\x00HR" + nonce.encode()


class FrameReader:
    """Cuts a byte stream into frames. Bytes between frames (start files, background jobs) are kept as noise."""

    def __init__(self, nonce: str) -> None:
        self.noise = b""
        self._magic = _magic(nonce)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes, return the frames that are complete now.

        Raises:
            ValueError: a frame says it is larger than any of ours.
        """
        self._buffer += data
        frames: list[Frame] = []
        while True:
            frame = self._next()
            if frame is None:
                return frames
            frames.append(frame)

    def _next(self) -> Frame | None:
        start = self._buffer.find(self._magic)
        if start < 0:
            self._skip(max(0, len(self._buffer) - len(self._magic) + 1))
            return None
        self._skip(start)
        body = len(self._magic) + _LENGTHS.size
        if len(self._buffer) < body:
            return None
        num_meta, num_data = _LENGTHS.unpack_from(self._buffer, len(self._magic))
        if num_meta > MAX_META or num_data > MAX_DATA:
            raise ValueError(f"frame of {num_meta} + {num_data} bytes")
        end = body + num_meta + num_data
        if len(self._buffer) < end:
            return None
        meta = json.loads(bytes(self._buffer[body : body + num_meta]))
        data = bytes(self._buffer[body + num_meta : end])
        del self._buffer[:end]
        return meta, data

    def _skip(self, count: int) -> None:
        if count:
            self.noise = (self.noise + bytes(self._buffer[:count]))[-MAX_NOISE:]
            del self._buffer[:count]
