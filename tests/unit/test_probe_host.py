import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrun.model import EmulatedChip, HostFacts, HostSpec, Source
from hetrun.probe.host import parse_host
from hetrun.vendors import all_vendors
from tests.unit.probe_output import END_S, NONCE, PLAIN, output

SPEC = HostSpec(name="a1", data_addr="192.0.2.2")
GIB = 1 << 30


def parse(
    sections: Mapping[str, str | bytes] | None = None,
    *,
    spec: HostSpec = SPEC,
    rc: Mapping[str, int] | None = None,
    stderr: Mapping[str, str] | None = None,
    received_s: float | None = END_S,
) -> HostFacts:
    text = output({**PLAIN, **(sections or {})}, rc=rc, stderr=stderr)
    return parse_host(spec, text, nonce=NONCE, received_s=received_s)


def python(**said: object) -> dict[str, str]:
    return {"python": "\n" + json.dumps({"path": "/p", "version": "3.11.2", **said}) + "\n"}


def test_host_without_accelerators_offers_its_processor() -> None:
    facts = parse(spec=replace(SPEC, cpu_devices=2))
    assert (facts.error, facts.warnings) == (None, ())
    assert facts.kernel == "Linux 6.1.0-18-amd64 x86_64"
    assert (facts.cpu_model, facts.num_cores) == ("Intel(R) Xeon(R) Gold 6338", 16)
    assert facts.memory_bytes == 65831044 << 10
    assert facts.disk_free_bytes == 79105820 << 10
    assert facts.shm_bytes == 32915520 << 10
    assert (facts.python_path, facts.python_version) == ("/opt/py/bin/python3", "3.11.2")
    assert (facts.torch_version, facts.torch_error) == ("2.6.0+cpu", None)
    assert [device.vendor for device in facts.devices] == ["cpu", "cpu"]
    assert facts.devices[0].memory.value == (65831044 << 10) // 2
    assert facts.devices[0].memory.source is Source.MEASURED


def test_container_limit_counts_as_memory() -> None:
    assert parse({"memory": f"MemTotal: 65831044 kB\n{8 * GIB}\n"}).memory_bytes == 8 * GIB
    unlimited = parse({"memory": "MemTotal: 65831044 kB\n9223372036854771712\n"})
    assert unlimited.memory_bytes == 65831044 << 10


def test_emulated_host_offers_what_it_plays() -> None:
    chip = EmulatedChip(vendor="v", model="m", num_devices=2, flops_per_s=1.0, memory_bytes=7)
    facts = parse(spec=replace(SPEC, emulate=(chip,)))
    assert [device.vendor for device in facts.devices] == ["v", "v"]


def test_processor_does_not_stand_in_for_accelerators_that_fail() -> None:
    facts = parse({"pci": "0000:41:00.0 0x10de 0x20b5 0x030200\n"})
    assert facts.devices == ()
    assert facts.warnings[-1].endswith("so this host offers no device")


def test_answer_that_stops_is_an_error_with_its_last_line() -> None:
    text = output({"kernel": "Linux\n"}, end=False) + b"\x1b[1mKilled\n"
    facts = parse_host(SPEC, text, nonce=NONCE)
    assert facts.error == "the answer stops in the middle; last line: Killed"
    assert facts.devices == ()


def test_full_disk_is_an_error() -> None:
    facts = parse_host(SPEC, f"\n{NONCE} full\n".encode(), nonce=NONCE)
    assert "no folder" in (facts.error or "")


def test_clock_is_compared_at_the_end_of_the_answer() -> None:
    facts = parse(received_s=END_S + 20.0)
    assert facts.clock_offset_s == -20.0
    assert facts.warnings == (
        "clock is 20 s behind this machine's; times in logs will not line up",
    )
    assert parse(received_s=None).clock_offset_s is None


@pytest.mark.parametrize(
    ("sections", "rc", "stderr", "error"),
    [
        (python(torch_error="ImportError: libx.so"), 0, "", "ImportError: libx.so"),
        ({"python": ""}, 127, "sh: 1: python3: not found\n", "sh: 1: python3: not found"),
        ({"python": ""}, 124, "", "no answer within 60 s"),
        ({"python": "{broken\n"}, 1, "Fatal Python error\n", "ended with 1: Fatal Python error"),
        ({"python": '{"a": 1}\n'}, 0, "", 'ended with 0: {"a": 1}'),
    ],
)
def test_interpreter_that_cannot_serve_says_why(
    sections: dict[str, str], rc: int, stderr: str, error: str
) -> None:
    facts = parse(sections, rc={"python": rc}, stderr={"python": stderr})
    assert (facts.torch_version, facts.torch_error) == (None, error)
    assert error in facts.warnings[0]


def test_torch_may_print_before_the_answer() -> None:
    said = {"python": "{'warning'}\n{1}\n" + python(torch="2.6.0")["python"]}
    assert parse(said).torch_version == "2.6.0"


def test_old_python_is_a_warning() -> None:
    assert parse(python(version="3.8.10", torch="2.4")).warnings == (
        "python3 is Python 3.8.10, need 3.10 or newer",
    )


def test_plugin_is_missed_only_where_a_device_needs_it() -> None:
    vendors = dict(all_vendors())
    vendors["nvidia"] = replace(vendors["nvidia"], torch_plugin="torch_x")
    card = {
        "pci": "0000:41:00.0 0x10de 0x20b5 0x030200\n",
        "nodes": "open crw-rw-rw- 1 root root 195, 0 Nov 21 00:15 /dev/nvidia0\n",
        "tool-nvidia-0": "0, NVIDIA A100 80GB PCIe, GPU-11111111-2222-3333-4444-555555555555, "
        "00000000:41:00.0, 81920, 550.54.15, Disabled\n",
    }

    def warnings(plugins: list[str], sections: dict[str, str]) -> tuple[str, ...]:
        said = {**PLAIN, **sections, **python(torch="2.6", plugins=plugins)}
        return parse_host(SPEC, output(said), nonce=NONCE, vendors=vendors).warnings

    assert warnings([], card) == ("NVIDIA needs torch_x, which python3 does not have",)
    assert warnings(["torch_x"], card) == ()
    assert warnings([], {}) == ()


def test_small_room_is_a_warning() -> None:
    full = PLAIN["disk"].replace("79105820", "2048")
    assert parse({"disk": full}).warnings == ("2 MiB free for the cache folder, need 1024 MiB",)
    small = PLAIN["shm"].replace("32915520", "65536")
    assert "/dev/shm has 64 MiB" in parse({"shm": small}).warnings[0]


def test_inventory_that_does_not_fit_the_interfaces_is_a_warning() -> None:
    assert parse(spec=replace(SPEC, nic="ib0")).warnings == (
        "no interface ib0; there are eth0, eth1, lo",
    )
    assert parse(spec=replace(SPEC, nic="eth1")).warnings == ("interface eth1 is down",)
    assert parse(spec=replace(SPEC, data_addr="192.0.2.9")).warnings == (
        "data_addr 192.0.2.9 is on none of its interfaces",
    )
    assert parse(spec=replace(SPEC, data_addr="a1.example.org")).warnings == ()


names = st.sampled_from([*PLAIN, "tool-nvidia-0", "tool-amd-0", "tool-ascend-0"])


@given(
    sections=st.dictionaries(names, st.binary(max_size=120) | st.text(max_size=120), max_size=4),
    codes=st.dictionaries(names, st.integers(-5, 300), max_size=3),
)
def test_any_bytes_in_any_section_give_facts(
    sections: dict[str, str | bytes], codes: dict[str, int]
) -> None:
    facts = parse(sections, rc=codes)
    assert all(warning.isprintable() for warning in facts.warnings)
