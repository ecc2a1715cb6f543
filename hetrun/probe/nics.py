"""Network interfaces of a host from /sys, `ip` or, in bare containers, /proc/net. Choosing one is left to launch."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetrun.model import Nic
from hetrun.probe.answer import Answer, plain
from hetrun.probe.places import last_function

MAX_NICS = 256
MAX_ADDRESSES = 32
_IP_HEAD = re.compile(r"\d+: ([^:@\s]+)[:@]")
_IP_ADDRESS = re.compile(r"\s+inet6? ([0-9A-Fa-f.:]+)[/ ]")
_WORD = re.compile(r"[0-9A-F]{8}")
_TRIE_ADDRESS = re.compile(r"\s*\|-- ([0-9.]+)")


def find_nics(answer: Answer) -> tuple[Nic, ...]:
    """Return the interfaces in the order of the kernel's names, with the addresses one can reach them by."""
    addresses: dict[str, list[str]] = {}
    for name, address in _addresses(answer):
        if _is_usable(address) and address not in addresses.setdefault(name, []):
            addresses[name].append(address)
    nics = []
    for line in answer.section("nics").lines[:MAX_NICS]:
        words = line.split()
        if not 4 <= len(words) <= 5:
            continue
        name, mtu, state, speed, path = (*words, "")[:5]
        found = tuple(addresses.pop(name, [])[:MAX_ADDRESSES])
        nic = _nic(name, found, mtu=mtu, state=state, speed=speed)
        nics.append(replace(nic, bus_id=last_function(path)))
    for name, rest in list(addresses.items())[:MAX_NICS]:  # no /sys: what `ip` says is all there is
        nics.append(Nic(name=plain(name, max_chars=32) or "?", addresses=tuple(rest)))
    return tuple(nics)


def _nic(name: str, addresses: tuple[str, ...], *, mtu: str, state: str, speed: str) -> Nic:
    mbps = int(speed) if re.fullmatch(r"[0-9]{1,9}", speed) else 0
    return Nic(
        name=plain(name, max_chars=32) or "?",
        addresses=addresses,
        speed_mbps=mbps if mbps > 0 else None,  # the kernel says -1 where it does not know
        mtu=int(mtu) if re.fullmatch(r"[0-9]{1,9}", mtu) else None,
        up=state in ("up", "unknown"),  # loopback and tunnels never say up
    )


def _is_usable(address: str) -> bool:
    try:
        return not ipaddress.ip_address(address).is_link_local
    except ValueError:
        return False


def _addresses(answer: Answer) -> Iterator[tuple[str, str]]:
    """Yield (interface, address) from the first source that knows."""
    section = answer.section("addresses")
    found = list(_from_ip_json(section.text)) or list(_from_ip_text(section.lines))
    yield from found or _from_proc(answer.section("routes").lines)


def _from_ip_json(text: str) -> Iterator[tuple[str, str]]:
    try:
        interfaces = json.loads(text)
    except (ValueError, RecursionError):
        return
    for interface in _dicts(interfaces):
        for item in _dicts(interface.get("addr_info")):
            yield str(interface.get("ifname")), str(item.get("local"))


def _dicts(value: object) -> list[dict[str, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _from_ip_text(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    name = None
    for line in lines:
        if head := _IP_HEAD.match(line):
            name = head[1]
        elif name and (found := _IP_ADDRESS.match(line)):
            yield name, found[1]


def _from_proc(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Join /proc/net/route (interface and network) with the local addresses of /proc/net/fib_trie."""
    networks: list[tuple[str, int, int]] = []
    previous = ""
    for line in lines:
        words = line.split()
        if len(words) >= 8 and _WORD.fullmatch(words[1]) and _WORD.fullmatch(words[7]):
            networks.append((words[0], _reversed(words[1]), _reversed(words[7])))
        elif "/32 host LOCAL" in line and (found := _TRIE_ADDRESS.match(previous)):
            if name := _interface(found[1], networks):
                yield name, found[1]
        elif len(words) == 6 and re.fullmatch(r"[0-9a-f]{32}", words[0]):
            yield words[5], str(ipaddress.IPv6Address(int(words[0], 16)))
        previous = line


def _reversed(word: str) -> int:
    """Return a number of /proc/net/route, which stands there with its lowest byte first."""
    return int.from_bytes(bytes.fromhex(word), "little")


def _interface(address: str, networks: Sequence[tuple[str, int, int]]) -> str | None:
    """Return the interface on whose network an address is; None where only the default route holds it."""
    try:
        number = int(ipaddress.IPv4Address(address))
    except ValueError:
        return None
    if address.startswith("127."):
        return "lo"  # its route stands in another table
    fits = [(mask, name) for name, network, mask in networks if mask and number & mask == network]
    return max(fits)[1] if fits else None
