"""Frames between controller and guard."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.transport.guard_frames import FrameReader, pack

NONCE = "0123456789abcdef"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.dictionaries(st.text(), st.integers(), max_size=3), st.binary(max_size=99)),
        max_size=4,
    ),
    st.integers(1, 40),
)
def test_frames_survive_any_cut_of_the_stream(
    frames: list[tuple[dict[str, int], bytes]], size: int
) -> None:
    stream = b"".join(pack(NONCE, meta, data) for meta, data in frames)
    reader = FrameReader(NONCE)
    got = [
        frame
        for start in range(0, len(stream), size)
        for frame in reader.feed(stream[start : start + size])
    ]
    assert got == frames
    assert reader.noise == b""


def test_noise_between_frames_is_kept_apart() -> None:
    reader = FrameReader(NONCE)
    stream = b"Welcome!\n" + pack(NONCE, {"n": 1}) + b"job done\n" + pack(NONCE, {"n": 2}, b"x")
    assert reader.feed(stream) == [({"n": 1}, b""), ({"n": 2}, b"x")]
    assert reader.noise == b"Welcome!\njob done\n"


def test_frames_of_another_call_are_noise() -> None:
    reader = FrameReader(NONCE)
    assert reader.feed(pack("fedcba9876543210", {"t": "empty", "left": []}) + b" " * 30) == []


def test_a_frame_larger_than_any_of_ours_is_refused() -> None:
    header = pack(NONCE, {})[:-10]
    with pytest.raises(ValueError, match="frame of 4294967295"):
        FrameReader(NONCE).feed(header + b"\xff" * 8)
