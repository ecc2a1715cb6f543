"""inventories/*.yaml -> Inventory: defaults, group vars and host keys merged. Who answers is left to `probe/`.

Paths on the controller (keys, lists of known hosts) are made absolute here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hetrun.errors import ConfigError
from hetrun.model import EmulatedChip, HostSpec, Inventory, Link, Source
from hetrun.strictyaml import BadKeysError, config_error, read_yaml, shown, to_noun, unknown_key

_HINT = "inventories/localhost.yaml and inventories/lab-example.yaml show every key"
_TOP_KEYS = ("name", "defaults", "groups", "hosts", "links")
_HOST_KEYS = frozenset(item.name for item in fields(HostSpec)) - {"name", "group"}
_CONTROLLER_PATHS = ("identity", "known_hosts")
_SECRETS = frozenset({"password", "passwd", "pass", "ssh_pass", "passphrase", "sudo_password"})
_NO_SECRETS = (
    "an inventory holds no secrets; use a key file (identity:) or an ssh agent, "
    "and `ssh-copy-id` to put the key on the host"
)
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}iB": 1 << 10 * (n + 1) for n, letter in enumerate("KMGT")}
_UNITS |= {f"{letter}B": 10 ** (3 * (n + 1)) for n, letter in enumerate("kMGT")}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
Keys = tuple[str, ...]


@dataclass(slots=True)
class _Reader:
    """One file being read: collects what is wrong, so that the user hears it all at once."""

    folder: Path
    problems: list[tuple[Keys, str]] = field(default_factory=list)

    def refuse(self, path: Keys, what: str) -> None:
        """Note one thing that is wrong."""
        self.problems.append((path, what))

    def mapping(self, value: object, path: Keys) -> Mapping[str, Any]:
        """Return a mapping; an empty value is an empty one."""
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        self.refuse(path, f"need a mapping, got {shown(value)}")
        return {}

    def items(self, value: object, path: Keys) -> list[tuple[Any, Keys]]:
        """Return the items of a list with their paths; a mapping or a text alone is a list of one."""
        if value is None:
            return []
        if not isinstance(value, list):
            return [(value, path)]
        return [(item, (*path, str(index))) for index, item in enumerate(value)]


def load_inventory(path: Path) -> Inventory:
    """Return the hosts of an inventory file.

    Raises:
        ConfigError: the file is missing or wrong; lists every wrong key with its path.
    """
    content = read_yaml(path, hint=_HINT)
    reader = _Reader(folder=path.absolute().parent)
    for key in content:
        if key not in _TOP_KEYS:
            reader.refuse((key,), unknown_key(key, _TOP_KEYS))
    name = content.get("name") or path.stem
    if not isinstance(name, str):
        reader.refuse(("name",), f"need text, got {shown(name)}")
    hosts = _hosts(content, reader)
    links = _links(content, reader, hosts)
    if not reader.problems:
        _check_same_chips(hosts, reader)
    if reader.problems:
        raise config_error(path, reader.problems, hint=_HINT)
    try:
        return Inventory(name=name, hosts=tuple(hosts), links=tuple(links))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", hint=_HINT) from error


# --- hosts ------------------------------------------------------------------------------------------------


def _hosts(content: Mapping[str, Any], reader: _Reader) -> list[HostSpec]:
    defaults = _layer(content.get("defaults"), ("defaults",), reader)
    places: dict[str, Keys] = {}
    hosts: list[HostSpec] = []

    def add(members: object, layers: list[_Layer], group: str | None, path: Keys) -> None:
        for name, value in reader.mapping(members, path).items():
            here = (*path, name)
            if name in places:
                reader.refuse(here, f"host {name} stands in {'.'.join(places[name])} already")
                continue
            places[name] = here
            layer = _layer(value, here, reader)
            spec = _host(name, group=group, layers=[*layers, layer], path=here, reader=reader)
            if spec is not None:
                hosts.append(spec)

    for name, value in reader.mapping(content.get("groups"), ("groups",)).items():
        path = ("groups", name)
        group = reader.mapping(value, path)
        for key in group:
            if key not in ("vars", "hosts"):
                reader.refuse((*path, key), unknown_key(key, ("vars", "hosts")))
        group_vars = _layer(group.get("vars"), (*path, "vars"), reader)
        add(group.get("hosts"), [defaults, group_vars], name, (*path, "hosts"))
    add(content.get("hosts"), [defaults], None, ("hosts",))
    return hosts


_Layer = dict[str, tuple[Any, Keys]]  # key -> (value, where it stands in the file)


def _layer(value: object, path: Keys, reader: _Reader) -> _Layer:
    """Return one level of host keys, each with its place in the file."""
    layer: _Layer = {}
    for key, item in reader.mapping(value, path).items():
        here = (*path, key)
        if key in _SECRETS:
            reader.refuse(here, _NO_SECRETS)
        elif key not in _HOST_KEYS:
            reader.refuse(here, unknown_key(key, _HOST_KEYS))
        elif key == "emulate":
            layer[key] = ([_chip(*each, reader) for each in reader.items(item, here)], here)
        elif key == "jump":
            layer[key] = ([_hop(*each, reader) for each in reader.items(item, here)], here)
        elif key in _CONTROLLER_PATHS and isinstance(item, str):
            layer[key] = (_controller_path(item, here, reader), here)
        else:
            layer[key] = (item, here)
    return layer


def _host(
    name: str, *, group: str | None, layers: list[_Layer], path: Keys, reader: _Reader
) -> HostSpec | None:
    """Return one host, later layers over earlier ones; `env` is merged variable by variable."""
    merged: _Layer = {}
    for layer in layers:
        for key, (value, place) in layer.items():
            below = merged[key][0] if key in merged else None
            if key == "env" and isinstance(value, dict) and isinstance(below, dict):
                value = {**below, **value}
            merged[key] = (value, place)
    spec = {key: value for key, (value, _) in merged.items() if value is not None}
    try:
        return _with_identities(to_noun(HostSpec, {"name": name, "group": group, **spec}))
    except BadKeysError as error:
        for keys, what in error.problems:
            place = merged[keys[0]][1] if keys and keys[0] in merged else path
            reader.refuse((*place, *keys[1:]), what)
    return None


def _with_identities(spec: HostSpec) -> HostSpec:
    """Let a jump host without a key of its own try the host's key, as one `identity:` for a lab suggests."""
    hops = tuple(
        replace(hop, identity=spec.identity) if hop.identity is None else hop for hop in spec.jump
    )
    return replace(spec, jump=hops)


def _controller_path(text: str, path: Keys, reader: _Reader) -> str:
    """Return an absolute path; `~` is the caller's home, other paths start at the inventory's folder."""
    try:
        return str(reader.folder / Path(text).expanduser())
    except RuntimeError as error:
        reader.refuse(path, f"{shown(text)}: {error}")
        return text


def _hop(value: object, path: Keys, reader: _Reader) -> object:
    """Return a jump host as a mapping; text is [user@]host[:port]."""
    if isinstance(value, str):
        return _split_hop(value)
    if not isinstance(value, dict):
        return value
    hop = dict(value)
    if secret := _SECRETS & hop.keys():
        reader.refuse((*path, min(secret)), _NO_SECRETS)
        hop = {key: item for key, item in hop.items() if key not in secret}
    if isinstance(hop.get("identity"), str):
        hop["identity"] = _controller_path(hop["identity"], (*path, "identity"), reader)
    return hop


def _split_hop(text: str) -> dict[str, str]:
    """Split [user@]host[:port]; an IPv6 address with a port stands in brackets."""
    user, at, rest = text.rpartition("@")
    if rest.startswith("["):
        addr, _, tail = rest[1:].partition("]")
        colon, port = tail[:1], tail[1:]
    elif rest.count(":") == 1:
        addr, colon, port = rest.partition(":")
    else:
        addr, colon, port = rest, "", ""
    return {"addr": addr} | ({"user": user} if at else {}) | ({"port": port} if colon else {})


def _chip(value: object, path: Keys, reader: _Reader) -> object:
    """Return an emulated chip's keys, friendly units turned into exact ones."""
    if not isinstance(value, dict):
        return value
    chip = dict(value)
    _exact(chip, "memory", "memory_bytes", _size_bytes, path=path, reader=reader)
    _exact(chip, "gflops", "flops_per_s", _flops_per_s, path=path, reader=reader)
    return chip


def _check_same_chips(hosts: list[HostSpec], reader: _Reader) -> None:
    """One (vendor, model) has one speed: profiles know devices by these two words."""
    seen: dict[tuple[str, str], tuple[str, EmulatedChip]] = {}
    for host in hosts:
        for chip in host.emulate:
            other, first = seen.setdefault((chip.vendor, chip.model), (host.name, chip))
            if (first.flops_per_s, first.memory_bytes) != (chip.flops_per_s, chip.memory_bytes):
                what = f"{chip.vendor} {chip.model} differs between hosts {other} and {host.name}"
                reader.refuse(("emulate",), f"{what}; give unlike chips different model names")


# --- links ------------------------------------------------------------------------------------------------


def _links(content: Mapping[str, Any], reader: _Reader, hosts: list[HostSpec]) -> list[Link]:
    """Return the declared links; they count as modelled where every host is emulated."""
    value = content.get("links")
    if value is not None and not isinstance(value, list):
        reader.refuse(("links",), f"need a list, got {shown(value)}")
        return []
    all_emulated = all(host.emulate for host in hosts)
    source = Source.MODELLED if all_emulated else Source.ASSUMED
    vendors = {chip.vendor for host in hosts for chip in host.emulate}
    links: list[Link] = []
    for item, path in reader.items(value, ("links",)):
        keys: object = item
        if isinstance(item, dict):
            keys = {"source": source.value, **item}
            _exact(keys, "latency_us", "latency_s", _seconds, path=path, reader=reader)
            _exact(keys, "gbit_per_s", "bytes_per_s", _bytes_per_s, path=path, reader=reader)
        try:
            link = to_noun(Link, keys)
        except BadKeysError as error:
            for below, what in error.problems:
                reader.refuse((*path, *below), what)
            continue
        for end in ("a", "b"):
            vendor = getattr(link, end)
            if all_emulated and vendor is not None and vendor not in vendors:
                reader.refuse((*path, end), f"no host has a chip of vendor {shown(vendor)}")
        links.append(link)
    return links


# --- units ------------------------------------------------------------------------------------------------


def _exact(
    keys: dict[str, Any],
    friendly: str,
    exact: str,
    convert: Callable[[str], float],
    *,
    path: Keys,
    reader: _Reader,
) -> None:
    """Replace a friendly key by the exact one."""
    if friendly not in keys:
        return
    text = keys.pop(friendly)
    if exact in keys:
        reader.refuse((*path, friendly), f"{exact} says the same; keep one of them")
        return
    try:
        keys[exact] = convert(text)
    except (TypeError, ValueError, OverflowError):
        example = "16GiB" if exact == "memory_bytes" else "2.5"
        reader.refuse((*path, friendly), f"need a value such as {example}, got {shown(text)}")
        keys[exact] = 1  # so that the exact key is not called missing too


def _size_bytes(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is None or found[2] not in _UNITS:
        raise ValueError(text)
    return int(float(found[1]) * _UNITS[found[2]])


def _flops_per_s(gflops: str) -> float:
    return float(gflops) * 1e9


def _seconds(latency_us: str) -> float:
    return float(latency_us) / 1e6


def _bytes_per_s(gbit_per_s: str) -> float:
    return float(gbit_per_s) * 1e9 / 8
