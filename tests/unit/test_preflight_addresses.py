"""Which address carries training traffic."""

from __future__ import annotations

from typing import Any

import pytest

from hetrun.errors import PreflightError
from hetrun.model import Connection, HostSpec
from hetrun.preflight.addresses import check_together, choose_addresses
from hetrun.transport.jobs import Ready

LOCAL = HostSpec(name="me", connection=Connection.LOCAL)
SSH = HostSpec(name="a1", addr="gate.example")


def _choose(*hosts: HostSpec) -> dict[str, tuple[str | None, str | None, str | None]]:
    found = choose_addresses(
        hosts, lookup=lambda name: ["10.9.9.9"], ssh_addr=lambda spec: "10.0.0.7"
    )
    return {host: (at.addr, at.name, at.nic) for host, at in found.items()}


def test_hosts_of_this_machine_meet_on_the_loopback() -> None:
    assert _choose(LOCAL) == {"me": ("127.0.0.1", None, None)}


def test_an_ssh_host_is_reached_where_ssh_goes_unless_it_says_otherwise() -> None:
    assert _choose(SSH) == {"a1": ("10.0.0.7", None, None)}
    own = HostSpec(name="a1", data_addr="192.168.1.2")
    assert _choose(own) == {"a1": ("192.168.1.2", "192.168.1.2", None)}
    assert _choose(HostSpec(name="a1", nic="ib0")) == {"a1": (None, None, "ib0")}


def test_a_name_is_resolved_here_and_checked_there() -> None:
    own = HostSpec(name="a1", data_addr="data-a1")
    assert _choose(own) == {"a1": ("10.9.9.9", "data-a1", None)}


def test_this_machine_among_others_needs_an_address_they_can_reach() -> None:
    with pytest.raises(PreflightError, match="need an address") as caught:
        _choose(LOCAL, SSH)
    assert "`data_addr` of me" in (caught.value.hint or "")
    spec = HostSpec(name="me", connection=Connection.LOCAL, data_addr="10.0.0.1")
    assert _choose(spec, SSH)["me"][0] == "10.0.0.1"


def _ready(**changes: Any) -> Ready:
    values = {"folder": "/f", "python": "/p", "torch": "2.9.1", "addr": "10.0.0.1"}
    return Ready(**{**values, "nic": "eth0", "boot": "one", **changes})


def test_a_loopback_address_on_two_machines_is_refused() -> None:
    ready = {"a": _ready(addr="127.0.1.1"), "b": _ready(boot="two")}
    with pytest.raises(PreflightError, match="another machine on every host") as caught:
        check_together(ready)
    assert caught.value.host == "a"
    assert check_together({"a": _ready(addr="127.0.0.1"), "b": _ready(addr="127.0.0.1")}) == []


def test_torch_before_2_6_does_not_meet_a_newer_one() -> None:
    with pytest.raises(PreflightError, match=r"torch 2\.5\.1\+x cannot meet torch 2\.6\.0 on b"):
        check_together({"a": _ready(torch="2.5.1+x"), "b": _ready(torch="2.6.0")})
    assert check_together({"a": _ready(torch="2.6.0"), "b": _ready(torch="2.13.0+cpu")}) == []
    assert check_together({"a": _ready(torch="unknown"), "b": _ready(torch="2.13.0")}) == []


def test_a_public_address_is_warned_about() -> None:
    assert "public address" in check_together({"a": _ready(addr="8.8.8.8")})[0]
