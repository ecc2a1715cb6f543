"""Who is where: each rank's island, addresses and library, told to the others as plain JSON.

Which rank sends what to whom is decided in `plan.py`.
"""

from __future__ import annotations

import ipaddress
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hetrun.errors import ConfigError

SETTINGS_ENV = (
    "HETRUN_BRIDGE"  # names the file; the secret itself is in no environment and in no argument
)
MIN_SECRET_BYTES = 16
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one rank knows of itself before it meets the others."""

    island: str  # ranks with the same name share a native collective library
    backend: str  # torch's name of that library, such as "gloo"
    addrs: tuple[str, ...]  # numeric, one for each interface that carries traffic between islands
    secret: bytes = field(repr=False)  # the same on all ranks of a run

    def __post_init__(self) -> None:
        _check_name("island", self.island)
        _check_name("backend", self.backend)
        _check_addrs(self.addrs)
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"bridge: secret is shorter than {MIN_SECRET_BYTES} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a rank tells all others."""

    rank: int
    island: str
    backend: str
    torch: str  # its version
    addrs: tuple[str, ...]
    ports: tuple[int, ...]  # one for each address

    def __post_init__(self) -> None:
        _check_name("island", self.island)
        _check_name("backend", self.backend)
        _check_name("torch", self.torch)
        _check_addrs(self.addrs)
        if self.rank < 0:
            raise ConfigError(f"bridge: rank {self.rank}")
        if len(self.ports) != len(self.addrs) or not all(0 < port < 65536 for port in self.ports):
            raise ConfigError(f"bridge: rank {self.rank} has ports {list(self.ports)}")

    def to_json(self) -> str:
        """One line, the same text for the same card."""
        return json.dumps(asdict(self), sort_keys=True)


def card_from(data: object) -> Card:
    """Build a card from parsed JSON.

    Raises:
        ConfigError: a key is missing, unknown or of the wrong type.
    """
    fields = _fields(data, {"rank", "island", "backend", "torch", "addrs", "ports"}, "card")
    ports = fields["ports"]
    rank = fields["rank"]
    if not isinstance(rank, int) or not isinstance(ports, list):
        raise ConfigError("bridge: a card has no rank or no list of ports")
    if not all(isinstance(port, int) for port in ports):
        raise ConfigError(f"bridge: ports {ports}, need numbers")
    return Card(
        rank=rank,
        island=_text(fields, "island"),
        backend=_text(fields, "backend"),
        torch=_text(fields, "torch"),
        addrs=_texts(fields, "addrs"),
        ports=tuple(ports),
    )


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Load the file that HETRUN_BRIDGE names: JSON with island, backend, addrs and secret (hex).

    Raises:
        ConfigError: no such variable or file, others may read it, or it does not say what it must.
    """
    name = environ.get(SETTINGS_ENV)
    if not name:
        raise ConfigError(
            f"{SETTINGS_ENV} is not set",
            hint="it names a JSON file with island, backend, addrs and secret of this rank",
        )
    path = Path(name)
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path} is open to others, and holds a secret", hint=f"chmod 600 {path}")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON") from error
    fields = _fields(data, {"island", "backend", "addrs", "secret"}, str(path))
    try:
        secret = bytes.fromhex(_text(fields, "secret"))
    except ValueError:
        raise ConfigError(f"{path}: secret is not hexadecimal") from None  # never show it
    return Settings(
        island=_text(fields, "island"),
        backend=_text(fields, "backend"),
        addrs=_texts(fields, "addrs"),
        secret=secret,
    )


def _fields(data: object, names: set[str], where: str) -> dict[str, object]:
    if not isinstance(data, dict) or set(data) != names:
        raise ConfigError(f"bridge: {where} needs exactly the keys {', '.join(sorted(names))}")
    return data


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise ConfigError(f"bridge: {name} is not text")
    return value


def _texts(fields: Mapping[str, object], name: str) -> tuple[str, ...]:
    value = fields[name]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"bridge: {name} is not a list of texts")
    return tuple(value)


def _check_name(what: str, name: str) -> None:
    if not name or len(name) > _LONGEST_NAME or not name.isprintable():
        raise ConfigError(f"bridge: {what} {name[:_LONGEST_NAME]!r} is no name")


def _check_addrs(addrs: tuple[str, ...]) -> None:
    if not addrs:
        raise ConfigError("bridge: no address")
    for addr in addrs:
        try:
            ipaddress.ip_address(addr)
        except ValueError as error:
            raise ConfigError(f"bridge: address {addr[:_LONGEST_NAME]!r} is not numeric") from error
