"""Which address carries training traffic."""

from __future__ import annotations

import pytest

from hetrun.errors import PreflightError
from hetrun.model import Connection, HostSpec
from hetrun.preflight.addresses import choose_addresses

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
