"""Messages between ranks as bytes on a stream: a fixed header, then the payload as it lies in memory."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from hetrun.bridge.failure import BridgeError

_HEADER = struct.Struct("!HBBIQQQ")
HEADER_BYTES = _HEADER.size
_MAGIC = 0x4842
LONGEST_NEWS = 4096  # bytes of a TELL


class Kind(IntEnum):
    """What a frame is for."""

    DATA = 1  # a payload
    READY = 2  # the sender of this has room for the payload of that key; no payload
    ANNOUNCE = 3  # the sender of this has a payload of that key and waits for READY; no payload
    TELL = 4  # news about a group: why it failed
    BYE = 5  # nothing comes after this; a stream that ends without it was torn


class Key(NamedTuple):
    """Names one message between two ranks; used once."""

    group: int  # 64 bits
    slot: int  # 32 bits: which part of an operation
    seq: int  # 64 bits: which operation of the group


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before a payload; `length` is in bytes, also where no payload follows."""

    kind: Kind
    key: Key
    length: int
    announced: bool = False  # an ANNOUNCE went before this DATA, maybe on another stream

    def pack(self) -> bytes:
        """The header as bytes."""
        return _HEADER.pack(
            _MAGIC,
            self.kind,
            self.announced,
            self.key.slot,
            self.key.group,
            self.key.seq,
            self.length,
        )

    @property
    def has_payload(self) -> bool:
        """Whether `length` bytes follow."""
        return self.kind in (Kind.DATA, Kind.TELL)


def unpack_header(data: bytes | bytearray | memoryview) -> Header:
    """Read a header.

    Raises:
        BridgeError: it is none.
    """
    magic, kind, announced, slot, group, seq, length = _HEADER.unpack(data)
    if magic != _MAGIC or kind not in Kind.__members__.values():
        raise BridgeError("what came is no frame of the bridge")
    header = Header(Kind(kind), Key(group, slot, seq), length, announced=bool(announced))
    if header.kind is Kind.TELL and length > LONGEST_NEWS:
        raise BridgeError(f"news of {length} bytes")
    return header
