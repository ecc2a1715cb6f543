"""Targets from the user's ssh configuration and the inventory."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrun.errors import HostError
from hetrun.model import HostSpec, SshHop
from hetrun.transport.ssh_target import SshConfig, parse_ssh_config, resolve_chain

DEFAULT = "user me\nhostname {name}\nport 22\n"


def _reader(**hosts: str) -> tuple[object, list[tuple[str, int | None, str | None]]]:
    asked: list[tuple[str, int | None, str | None]] = []

    def read(name: str, port: int | None, user: str | None) -> SshConfig:
        asked.append((name, port, user))
        text = hosts.get(name, DEFAULT.format(name=name))
        config = parse_ssh_config(text)
        if port:
            config["port"] = [str(port)]
        if user:
            config["user"] = [user]
        return config

    return read, asked


def _chain(spec: HostSpec, **hosts: str) -> list[tuple[str, str, int, str]]:
    read, _ = _reader(**hosts)
    chain = resolve_chain(spec, read)  # type: ignore[arg-type]
    return [(target.name, target.addr, target.port, target.user) for target in chain]


def test_the_ssh_configuration_says_where_a_bare_name_is() -> None:
    text = "user ann\nhostname 10.0.0.7\nport 2201\nhostkeyalias seven\n"
    read, asked = _reader(a1=text)
    (target,) = resolve_chain(HostSpec(name="a1"), read)  # type: ignore[arg-type]
    assert (target.addr, target.port, target.user) == ("10.0.0.7", 2201, "ann")
    assert target.key_alias == "seven"
    assert asked == [("a1", None, None)]


def test_the_inventory_overrides_the_ssh_configuration() -> None:
    spec = HostSpec(name="a1", addr="10.1.1.1", port=2222, user="bob")
    assert _chain(spec) == [("a1", "10.1.1.1", 2222, "bob")]


def test_jump_hosts_of_the_inventory_come_first_and_in_order() -> None:
    hops = (SshHop(addr="j1", port=2022, user="x"), SshHop(addr="j2"))
    assert _chain(HostSpec(name="a1", jump=hops)) == [
        ("jump host j1", "j1", 2022, "x"),
        ("jump host j2", "j2", 22, "me"),
        ("a1", "a1", 22, "me"),
    ]


def test_proxy_jumps_of_the_ssh_configuration_are_followed_to_their_own() -> None:
    chain = _chain(
        HostSpec(name="a1"),
        a1="hostname 10.0.0.7\nport 22\nuser me\nproxyjump eve@j2:2022\n",
        j2="hostname 10.0.0.2\nport 22\nuser me\nproxyjump [fd00::1]:2023\n",
    )
    assert chain == [
        ("jump host fd00::1", "fd00::1", 2023, "me"),
        ("jump host j2", "10.0.0.2", 2022, "eve"),
        ("a1", "10.0.0.7", 22, "me"),
    ]


def test_hosts_that_jump_over_each_other_are_refused() -> None:
    with pytest.raises(HostError, match="more than 5 jump hosts"):
        _chain(HostSpec(name="a1"), a1="proxyjump a2\n", a2="proxyjump a1\n")


def test_a_proxy_command_is_refused_with_another_way() -> None:
    with pytest.raises(HostError, match="ProxyCommand") as caught:
        _chain(HostSpec(name="a1"), a1="hostname a1\nproxycommand nc %h %p\n")
    assert "ProxyJump" in (caught.value.hint or "")


def test_a_missing_key_file_is_named() -> None:
    with pytest.raises(HostError, match="no key file /nowhere/id"):
        _chain(HostSpec(name="a1", identity="/nowhere/id"))


def test_known_hosts_of_system_user_hetrun_and_inventory_all_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/own")
    read, _ = _reader(a1="hostname a1\nuserknownhostsfile /u1 /u2\nglobalknownhostsfile none\n")
    (target,) = resolve_chain(HostSpec(name="a1", known_hosts="/pins"), read)  # type: ignore[arg-type]
    assert target.known_hosts == tuple(
        map(Path, ("/u1", "/u2", "/own/hetrun/known_hosts", "/pins"))
    )


def test_the_command_to_try_names_port_and_user() -> None:
    read, _ = _reader()
    spec = HostSpec(name="a1", port=2201, user="ann")
    (target,) = resolve_chain(spec, read)  # type: ignore[arg-type]
    assert target.ssh_command == "ssh -p 2201 ann@a1"
