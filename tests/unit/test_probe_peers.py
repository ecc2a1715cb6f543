"""Names by which hosts meet: which are looked up everywhere, and what is said where the answers differ."""

from __future__ import annotations

import shlex

from hetrun.model import HostFacts, HostSpec
from hetrun.probe.host import parse_host
from hetrun.probe.peers import MAX_NAMES, compared, names_to_look_up
from hetrun.probe.script import probe_script
from tests.unit.probe_output import NONCE, PLAIN, output

A1 = HostSpec(name="a1", data_addr="n-a1")
B1 = HostSpec(name="b1", data_addr="n-b1")
C1 = HostSpec(name="c1", addr="192.0.2.3", data_addr="192.0.2.3")


def facts(spec: HostSpec, **names: tuple[str, ...]) -> HostFacts:
    return HostFacts(
        spec=spec, names={name.replace("_", "-"): found for name, found in names.items()}
    )


def said(*hosts: HostFacts) -> dict[str, tuple[str, ...]]:
    return {host.spec.name: host.warnings for host in compared(hosts)}


def test_names_are_looked_up_numbers_are_not() -> None:
    assert names_to_look_up([A1, B1, C1]) == ("n-a1", "n-b1")
    assert names_to_look_up([A1]) == ()  # nobody to meet
    assert names_to_look_up([HostSpec(name="x", addr="y"), C1]) == ("y",)
    many = [HostSpec(name=f"h{n}", data_addr=f"n{n}") for n in range(300)]
    assert len(names_to_look_up(many)) == MAX_NAMES


def test_names_that_are_no_names_do_not_reach_the_script() -> None:
    odd = [HostSpec(name=f"h{n}", addr=addr) for n, addr in enumerate(("fd00::1", "a_b", "n.x."))]
    assert names_to_look_up(odd) == ("a_b", "n.x.")
    script = probe_script(C1, {}, nonce="n", peers=("n-b1", "it's"))
    assert "run peer-names 20 " in script
    assert shlex.quote(shlex.quote("it's"))[1:-1] in script
    assert "peer-names" not in probe_script(C1, {}, nonce="n")


def test_answers_that_agree_say_nothing() -> None:
    a1 = facts(A1, n_a1=("127.0.1.1",), n_b1=("192.0.2.2",))
    b1 = facts(B1, n_a1=("192.0.2.1",), n_b1=("192.0.2.2", "fd00::2"))
    c1 = facts(C1, n_a1=("192.0.2.1",), n_b1=("fd00::2", "192.0.2.2"))
    assert said(a1, b1, c1) == {"a1": (), "b1": (), "c1": ()}


def test_name_that_is_a_loopback_address_on_another_host_names_both() -> None:
    a1 = facts(A1, n_a1=("192.0.2.1",), n_b1=("127.0.1.1",))
    b1 = facts(B1, n_a1=("192.0.2.1",), n_b1=("192.0.2.2",))
    warnings = said(a1, b1)
    (warning,) = warnings["a1"]
    assert warning.startswith("n-b1, the address of b1, is 127.0.1.1 there, a loopback address")
    assert warnings["b1"] == ()


def test_different_addresses_name_the_hosts_that_differ() -> None:
    a1 = facts(A1, n_b1=("198.51.100.9",))
    b1 = facts(B1, n_b1=("192.0.2.2",))
    c1 = facts(C1, n_b1=("192.0.2.2",))
    warnings = said(a1, b1, c1)
    (warning,) = warnings["a1"]
    assert "n-b1, the address of b1, is 198.51.100.9 there and 192.0.2.2 on b1, c1" in warning
    assert (warnings["b1"], warnings["c1"]) == ((), ())


def test_owner_that_knows_itself_by_loopback_leaves_the_word_to_the_others() -> None:
    b1 = facts(B1, n_b1=("127.0.1.1",))
    others = [facts(HostSpec(name=f"h{n}"), n_b1=("192.0.2.2",)) for n in range(3)]
    odd = facts(A1, n_b1=("198.51.100.9",))
    warnings = said(odd, b1, *others)
    assert "198.51.100.9 there and 192.0.2.2 on h0, h1, h2" in warnings["a1"][0]
    assert not any(warnings[f"h{n}"] for n in range(3))


def test_names_that_do_not_resolve_are_one_warning_per_host() -> None:
    a1 = facts(A1, n_a1=("192.0.2.1",), n_b1=())
    c1 = facts(C1, n_a1=(), n_b1=())
    warnings = said(a1, facts(B1, n_a1=("192.0.2.1",)), c1)
    assert "names of other hosts do not resolve there: n-b1 (b1); set" in warnings["a1"][0]
    assert "do not resolve there: n-a1 (a1), n-b1 (b1); set" in warnings["c1"][0]
    assert warnings["b1"] == ()


def test_alias_of_the_user_s_ssh_configuration_need_not_be_known_to_hosts() -> None:
    alias = HostSpec(name="a1", addr="my-alias")
    assert said(facts(alias), facts(B1, my_alias=())) == {"a1": (), "b1": ()}
    known = said(facts(alias), facts(B1, my_alias=()), facts(C1, my_alias=("192.0.2.1",)))
    assert "my-alias (a1)" in known["b1"][0]


def test_host_that_does_not_answer_accuses_nobody() -> None:
    dead = HostFacts(spec=B1, error="dead")
    a1 = facts(A1, n_a1=("192.0.2.1",), n_b1=("192.0.2.2",))
    assert said(a1, dead) == {"a1": (), "b1": ()}


def test_only_own_names_stay_in_the_facts() -> None:
    text = output(
        {
            **PLAIN,
            "names": "own a1.lan\nname a1.lan\n127.0.1.1 STREAM a1.lan\nname n-a1\n192.0.2.1 STREAM\n",
            "peer-names": "name n-b1\n192.0.2.2       STREAM n-b1\n192.0.2.2       DGRAM\nname n-c1\n\n",
        }
    )
    spec = HostSpec(name="a1", data_addr="n-a1")
    host = parse_host(spec, text, nonce=NONCE)
    assert host.names["n-b1"] == ("192.0.2.2",)
    assert host.names["n-c1"] == ()
    (kept, _) = compared([host, facts(B1)])
    assert kept.names == {"a1.lan": ("127.0.1.1",), "n-a1": ("192.0.2.1",)}
