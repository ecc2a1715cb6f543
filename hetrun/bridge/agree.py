"""How all ranks of a group make sure that they mean the same operation, and short payloads on the same way.

From members to the leader of their island, between leaders, and back: three hops, and what crosses a link is one
message per pair of islands. Nothing is given to an island's library before all agree, since libraries end the
process (or hang) where sizes differ.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence

from hetrun.bridge.failure import MismatchError
from hetrun.bridge.frames import Key
from hetrun.bridge.group import Op, Phase

_GOOD, _BAD = b"\0", b"\1"
_LENGTH = struct.Struct("!H")
_TICKET = struct.Struct("!q")
_LONGEST_TEXT = 1500

Fold = Callable[[Sequence[bytes]], bytes]


def join(parts: Sequence[bytes]) -> bytes:
    """Put payloads one behind the other."""
    return b"".join(parts)


async def converge(op: Op, payload: bytes = b"", fold: Fold = join) -> bytes:
    """Wait until all ranks have called the operation; return their payloads, folded: members first, then islands.

    All ranks get the same bytes. Gives the operation its ticket where it goes native.

    Raises:
        MismatchError: some ranks called something else; says who called what.
    """
    mine = op.layout.mine
    message = _GOOD + _LENGTH.pack(len(op.fingerprint)) + op.fingerprint + payload
    if op.layout.me != mine[0]:
        _send(op, mine[0], Phase.GATHER, message)
        return _read_reply(op, await _receive(op, mine[0], Phase.REPLY))
    waiting = [_receive(op, member, Phase.GATHER) for member in mine[1:]]
    messages = [message, *[await one for one in waiting]]
    message = _merge(op, mine, messages, fold)
    others = [leader for leader in op.layout.leaders if leader != op.layout.me]
    waiting = [_receive(op, leader, Phase.AGREE) for leader in others]
    for leader in others:
        _send(op, leader, Phase.AGREE, message)
    by_leader = dict(zip(others, [await one for one in waiting], strict=True))
    by_leader[op.layout.me] = message
    reply = _conclude(op, [by_leader[leader] for leader in op.layout.leaders], fold)
    for member in mine[1:]:
        _send(op, member, Phase.REPLY, reply)
    return _read_reply(op, reply)


def _merge(op: Op, members: Sequence[int], messages: Sequence[bytes], fold: Fold) -> bytes:
    """Return one message for the island: its payload, or who of it called what."""
    prints, payloads = zip(*map(_split, messages), strict=True)
    if len(set(prints)) == 1:
        return _GOOD + _LENGTH.pack(len(prints[0])) + prints[0] + fold(payloads)
    text = "; ".join(
        f"rank {op.layout.ranks[member]}: {said.decode(errors='replace')}"
        for member, said in zip(members, prints, strict=True)
    )
    return _BAD + text[:_LONGEST_TEXT].encode()


def _conclude(op: Op, messages: Sequence[bytes], fold: Fold) -> bytes:
    """Return what the members hear: ticket and payload, or who called what."""
    good = all(message[:1] == _GOOD for message in messages)
    if good:
        prints, payloads = zip(*map(_split, messages), strict=True)
        if len(set(prints)) == 1:
            ticket = next(op.island.tickets) if op.native else -1
            return _GOOD + _TICKET.pack(ticket) + fold(payloads)
    texts = []
    for members, message in zip(op.layout.islands, messages, strict=True):
        if message[:1] == _BAD:
            texts.append(message[1:].decode(errors="replace"))
        else:
            ranks = ", ".join(str(op.layout.ranks[member]) for member in members)
            texts.append(f"rank {ranks}: {_split(message)[0].decode(errors='replace')}")
    return _BAD + "; ".join(texts)[:_LONGEST_TEXT].encode()


def _split(message: bytes) -> tuple[bytes, bytes]:
    (length,) = _LENGTH.unpack_from(message, 1)
    start = 1 + _LENGTH.size
    return message[start : start + length], message[start + length :]


def _read_reply(op: Op, reply: bytes) -> bytes:
    if reply[:1] != _GOOD:
        raise MismatchError(
            f"ranks differ in operation {op.seq} of their group: {reply[1:].decode(errors='replace')}"
        )
    (op.ticket,) = _TICKET.unpack_from(reply, 1)
    return reply[1 + _TICKET.size :]


def _send(op: Op, member: int, slot: int, message: bytes) -> None:
    mailbox = op.group.transport.mailbox
    key = Key(op.group.number, slot, op.seq)
    mailbox.send(op.layout.ranks[member], key, memoryview(message))


def _receive(op: Op, member: int, slot: int) -> asyncio.Future[bytes]:
    key = Key(op.group.number, slot, op.seq)
    return op.group.transport.mailbox.receive_short(op.layout.ranks[member], key)
