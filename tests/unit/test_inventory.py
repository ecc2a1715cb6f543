import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetrun.errors import ConfigError
from hetrun.inventory import load_inventory
from hetrun.model import Connection, HostSpec, Inventory, LinkKind, Source, SshHop

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "lab.yaml"
        path.write_text(text)
        return path

    return write_file


def host(inventory: Inventory, name: str) -> HostSpec:
    return next(spec for spec in inventory.hosts if spec.name == name)


def error_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_inventory(path)
    assert caught.value.hint
    return caught.value.message


def test_later_layers_win_and_env_is_merged_by_variable(write: Write) -> None:
    inventory = load_inventory(
        write("""
defaults: {user: all, port: 1, python: /d/python, env: {A: d, B: d, C: d}}
groups:
  g:
    vars: {port: 2, user: group, env: {B: g, C: g}}
    hosts:
      a1: {port: 3, env: {C: h}}
      a2:
hosts:
  b1: {}
""")
    )
    assert [spec.name for spec in inventory.hosts] == ["a1", "a2", "b1"]
    assert [spec.group for spec in inventory.hosts] == ["g", "g", None]
    a1, a2, b1 = inventory.hosts
    assert (a1.user, a1.port, a1.python) == ("group", 3, "/d/python")
    assert a1.env == {"A": "d", "B": "g", "C": "h"}
    assert (a2.port, a2.env) == (2, {"A": "d", "B": "g", "C": "g"})
    assert (b1.user, b1.port, b1.env) == ("all", 1, {"A": "d", "B": "d", "C": "d"})


def test_empty_value_takes_a_key_back_to_its_default(write: Write) -> None:
    inventory = load_inventory(
        write("defaults: {nic: eth7, python: /x}\nhosts: {a: {nic: , python: }, b: {}}\n")
    )
    assert (host(inventory, "a").nic, host(inventory, "a").python) == (None, "python3")
    assert (host(inventory, "b").nic, host(inventory, "b").python) == ("eth7", "/x")


def test_name_is_the_files_unless_it_says_another(write: Write) -> None:
    assert load_inventory(write("hosts: {a: }")).name == "lab"
    assert load_inventory(write("name: other\nhosts: {a: }")).name == "other"


def test_key_paths_start_at_the_inventorys_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    path = write(
        "hosts:\n  a: {identity: keys/id, known_hosts: ~/hosts, "
        "jump: {addr: j, identity: keys/jump}}\n  b: {identity: /abs/id}\n"
    )
    monkeypatch.chdir(tmp_path)
    inventory = load_inventory(Path(path.name))
    a = host(inventory, "a")
    assert (a.identity, a.known_hosts) == (f"{tmp_path}/keys/id", "/home/someone/hosts")
    assert a.jump[0].identity == f"{tmp_path}/keys/jump"
    assert host(inventory, "b").identity == "/abs/id"


@pytest.mark.parametrize(
    ("text", "hops"),
    [
        ("gate", [SshHop(addr="gate")]),
        ("me@gate.example.org:2200", [SshHop(addr="gate.example.org", port=2200, user="me")]),
        ("2001:db8::1", [SshHop(addr="2001:db8::1")]),
        ('"me@[2001:db8::1]:22"', [SshHop(addr="2001:db8::1", user="me", port=22)]),
        ("{addr: gate, port: 3}", [SshHop(addr="gate", port=3)]),
        ("[gate, {addr: inner}]", [SshHop(addr="gate"), SshHop(addr="inner")]),
        ("", []),
    ],
)
def test_jump_is_text_or_mapping_or_a_list_of_them(
    write: Write, text: str, hops: list[SshHop]
) -> None:
    assert list(load_inventory(write(f"hosts: {{a: {{jump: {text}}}}}")).hosts[0].jump) == hops


@pytest.mark.parametrize(
    "jump", ["gate:x", '"[::1]:"', '""', "a b", "fe80::1", "{port: 3}", "[[x]]"]
)
def test_bad_jump_is_refused_at_its_path(write: Write, jump: str) -> None:
    assert "hosts.a.jump" in error_of(write(f"hosts: {{a: {{jump: {jump}}}}}"))


def test_friendly_units_become_exact_keys(write: Write) -> None:
    inventory = load_inventory(
        write("""
hosts:
  a: {emulate: {vendor: v, model: m, num_devices: 2, gflops: 2.5, memory: 16GiB}}
  b: {emulate: [{vendor: v, model: n, num_devices: 1, flops_per_s: 3e9, memory_bytes: 7},
                {vendor: v, model: o, num_devices: 1, gflops: 1, memory: 1.5 GB}]}
links:
  - {kind: across, latency_us: 30, gbit_per_s: 25}
  - {kind: inside_host, latency_s: 1e-6, bytes_per_s: 5e9, a: v}
""")
    )
    (chip,) = inventory.hosts[0].emulate
    assert (chip.flops_per_s, chip.memory_bytes) == (2.5e9, 16 << 30)
    assert [chip.memory_bytes for chip in inventory.hosts[1].emulate] == [7, 1_500_000_000]
    across, inside = inventory.links
    assert (across.kind, across.latency_s, across.bytes_per_s) == (LinkKind.ACROSS, 3e-5, 3.125e9)
    assert (inside.latency_s, inside.bytes_per_s, inside.a) == (1e-6, 5e9, "v")


def test_declared_links_are_modelled_only_where_every_host_is_emulated(write: Write) -> None:
    chip = "emulate: {vendor: v, model: m, num_devices: 1, gflops: 1, memory: 1GiB}"
    link = "links: [{kind: across, latency_us: 1, gbit_per_s: 1}]"
    emulated = load_inventory(write(f"hosts: {{a: {{{chip}}}}}\n{link}\n"))
    mixed = load_inventory(write(f"hosts: {{a: {{{chip}}}, b: {{}}}}\n{link}\n"))
    assert emulated.links[0].source is Source.MODELLED
    assert mixed.links[0].source is Source.ASSUMED


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hosts: {}", "no hosts"),
        ("hots: {a: }", "hots: unknown key; did you mean hosts?"),
        ("hosts: {a: {prot: 2}}", "hosts.a.prot: unknown key; did you mean port?"),
        ("hosts: {a: {name: b}}", "hosts.a.name: unknown key"),
        ("defaults: {prot: 2}\nhosts: {a: }", "defaults.prot: unknown key"),
        ("groups: {g: {var: {}}}", "groups.g.var: unknown key; did you mean vars?"),
        ("groups: {g: {vars: {port: x}, hosts: {a: , b: }}}", "groups.g.vars.port: need a whole"),
        ("hosts: {a: {port: 0}}", "hosts.a: host a: port 0, need 1 to 65535"),
        ("hosts: {a: {addr: 'fe80::1'}}", "link-local"),
        ("hosts: {a: {addr: 'a b'}}", "need a host name or an IP address"),
        ("hosts: {'a b': }", "host 'a b'"),
        ("hosts: {a: {work_dir: tmp}}", "need an absolute path"),
        ("hosts: {a: {env: {A: }}}", "hosts.a.env.A: need text, got nothing"),
        ("groups: {g: {hosts: {a: }}}\nhosts: {a: }", "host a stands in groups.g.hosts.a already"),
        ("hosts: [a, b]", "hosts: need a mapping"),
        ("hosts: {a: x}", "hosts.a: need a mapping, got 'x'"),
        ("hosts: {a: {password: s3cret}}", "hosts.a.password: an inventory holds no secrets"),
        ("hosts: {a: {jump: {addr: j, password: s3cret}}}", "hosts.a.jump.password: an inventory"),
        ("hosts: {a: {identity: ~nobody-here/x}}", "hosts.a.identity"),
        ("hosts: {a: {emulate: {vendor: v, modell: m}}}", "emulate.0.modell: unknown key"),
        ("hosts: {a: {emulate: {memory: 3XB}}}", "hosts.a.emulate.memory: need a value such as"),
        ("hosts: {a: {emulate: {memory: 1GiB, memory_bytes: 1}}}", "memory_bytes says the same"),
        ("hosts: {a: {emulate: {gflops: 9e999}}}", "flops_per_s"),
        ("hosts: {a: }\nlinks: {kind: across}", "links: need a list"),
        ("hosts: {a: }\nlinks: [{kind: acros}]", "links.0.kind: need 'inside_host'"),
        ("hosts: {a: }\nlinks: [x]", "links.0"),
        ("hosts: {a: }\nlinks: [{kind: across, latency_us: -1, gbit_per_s: 1}]", "links.0: link"),
    ],
)
def test_wrong_key_is_named_with_its_path(write: Write, text: str, says: str) -> None:
    message = error_of(write(text))
    assert says in message
    assert "s3cret" not in message


def test_all_problems_are_told_at_once(write: Write) -> None:
    message = error_of(write("hosts: {a: {prot: 1, port: x}, b: {nik: c}}\nlink: []\n"))
    for path in ("link:", "hosts.a.prot:", "hosts.a.port:", "hosts.b.nik:"):
        assert path in message


def test_vendor_of_a_link_must_be_emulated_by_some_host(write: Write) -> None:
    chip = "emulate: {vendor: emu-a, model: m, num_devices: 1, gflops: 1, memory: 1GiB}"
    link = "links: [{kind: across, a: emu-a, b: emu-x, latency_us: 1, gbit_per_s: 1}]"
    assert "links.0.b: no host has" in error_of(write(f"hosts: {{h: {{{chip}}}}}\n{link}"))


def test_unlike_chips_need_unlike_names(write: Write) -> None:
    chip = "emulate: {{vendor: v, model: m, num_devices: 1, gflops: {}, memory: 1GiB}}"
    text = f"hosts:\n  a: {{{chip.format(1)}}}\n  b: {{{chip.format(2)}}}\n"
    assert "v m differs between hosts a and b" in error_of(write(text))


def test_local_hosts_need_no_address(write: Write) -> None:
    spec = load_inventory(write("hosts: {a: {connection: local}}")).hosts[0]
    assert (spec.connection, spec.addr) == (Connection.LOCAL, None)


words = st.sampled_from(
    [
        "hosts",
        "groups",
        "vars",
        "defaults",
        "links",
        "name",
        "a",
        "emulate",
        "jump",
        "env",
        "identity",
        "memory",
        "gflops",
        "kind",
        "port",
        "addr",
    ]
)
values = st.recursive(
    st.none() | st.text("ab1.:@[]~/- ", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.dictionaries(words, values, max_size=5))
def test_any_content_is_an_inventory_or_a_config_error(tmp_path: Path, content: object) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    with contextlib.suppress(ConfigError):
        load_inventory(path)


def test_jump_host_without_a_key_of_its_own_tries_that_of_the_host(write: Write) -> None:
    text = "defaults: {identity: /k}\nhosts: {a: {jump: [g1, {addr: g2, identity: /own}]}}"
    (host,) = load_inventory(write(text)).hosts
    assert [hop.identity for hop in host.jump] == ["/k", "/own"]


@pytest.mark.parametrize(
    "keys",
    [
        "cpu_devices: 99999999999999",
        "emulate: {vendor: v, model: m, num_devices: 99999999999999, gflops: 1, memory: 1GiB}",
    ],
)
def test_a_number_of_devices_that_would_run_for_ever_is_refused(write: Write, keys: str) -> None:
    path = write(f"hosts: {{a: {{connection: local, {keys}}}}}")
    assert "devices 99999999999999, need 1 to 1024" in error_of(path)
