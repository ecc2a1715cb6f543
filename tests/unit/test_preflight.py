"""What answers of hosts mean, hostile ones too; hosts compared with each other; what may be skipped."""

from __future__ import annotations

import re
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetrun.cli.preflight import preflight_view
from hetrun.cli.render import talk
from hetrun.errors import ConfigError
from hetrun.greeting import greet
from hetrun.launch.wants import wants_of
from hetrun.model import (
    CheckedHost,
    CheckpointSpec,
    Finding,
    HostSpec,
    PairTiming,
    PreflightReport,
    Severity,
)
from hetrun.preflight import CHECKS, check_skips, refuse
from hetrun.preflight import ask as asking
from hetrun.preflight.ask import findings, number, plain, preflight_script, text
from hetrun.preflight.compare import compare, pair_findings
from hetrun.transport import CommandResult
from tests.ssh.plans import make_plan

A, B, C = (
    CheckedHost(name=name, torch="2.9.1", addr=f"10.0.0.{n}") for n, name in enumerate("abc", 1)
)
BOOTS = {"a": "1", "b": "2", "c": "3"}


def _found(*hosts: CheckedHost) -> list[tuple[str, str, str]]:
    return [(f.host, f.check, f.severity.value) for f in compare(hosts, BOOTS)]


def test_like_hosts_give_no_findings() -> None:
    assert _found(A, B, C) == []


def test_what_differs_between_hosts_is_named() -> None:
    assert _found(A, replace(B, clock_offset_s=-11.0)) == [("b", "clock", "error")]
    assert _found(A, replace(B, clock_offset_s=2.5)) == [("b", "clock", "warning")]
    assert _found(A, replace(B, torch="2.5.1+x")) == [("b", "torch-versions", "error")]
    assert _found(replace(A, torch="2.3.0")) == [("a", "torch-versions", "error")]
    for torch in ("2.6.0", "2.13.0+cpu", "unknown"):
        assert _found(A, replace(B, torch=torch)) == [("a", "torch-versions", "note")]
    mtus = [replace(host, mtu=9000) for host in (A, B)]
    assert _found(*mtus, replace(C, mtu=1500)) == [("c", "mtu", "warning")]
    assert _found(A, replace(B, addr="127.0.1.1")) == [("b", "address", "error")]
    assert compare([replace(A, addr="127.0.0.1"), replace(B, addr="127.0.0.1")], {}) == []
    assert _found(A, replace(B, addr="9.9.9.9")) == [("b", "public", "error")]
    assert _found(A, replace(B, addr="fd00::1")) == []


def test_one_host_that_reaches_nobody_is_one_finding_and_slow_pairs_are_named() -> None:
    failed = [("a", peer, "no answer in time") for peer in "bcdefghijkl"]
    (finding,) = pair_findings(failed, [])
    assert (finding.host, finding.severity) == ("a", Severity.ERROR)
    assert finding.what.endswith(" and 3 more on the data network")
    pairs = [PairTiming(a="a", b=b, latency_s=1e-4, bytes_per_s=1e9) for b in "bcdef"]
    slow = PairTiming(a="a", b="z", latency_s=1e-4, bytes_per_s=1e8)
    (note,) = pair_findings([], [*pairs, slow])
    assert note.severity is Severity.NOTE
    assert note.what.startswith("100 MB/s to z, most pairs have 1000")


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"findings": "x"},
        {"findings": [1, None, [], {"check": "nonsense", "severity": "error"}]},
        {"findings": [{"check": "clock", "severity": "worst"}]},
    ],
)
def test_words_of_a_host_that_are_not_ours_are_dropped(told: dict[str, Any]) -> None:
    assert findings("a", told) == []


def test_text_of_a_host_can_neither_drive_a_terminal_nor_flood_it() -> None:
    told = {"findings": [{"check": "busy", "severity": "warning", "what": "\x1b[31m\r\nx" * 9000}]}
    (finding,) = findings("a", told)
    assert "\x1b" not in finding.what
    assert "\n" not in finding.what
    assert len(finding.what) <= 400
    assert plain(None) == ""
    assert number({"n": "7"}, "n") is None
    assert number({"n": True}, "n") is None
    assert number({"n": float("inf")}, "n") is None
    assert text({"t": ["x"]}, "t") is None
    many = {"findings": [{"check": "busy", "severity": "note", "what": "x"}] * 5000}
    assert len(findings("a", many)) == 200


def test_checks_that_are_skipped_must_exist_and_be_ones_that_can_be() -> None:
    assert check_skips(["clock", "public", "clock"]) == ("clock", "public")
    with pytest.raises(ConfigError, match="no check 'clocks'; did you mean clock"):
        check_skips(["clocks"])
    with pytest.raises(ConfigError, match="'hostkey' cannot be skipped"):
        check_skips(["hostkey"])


def test_values_of_the_inventory_are_quoted_once_and_are_no_arguments() -> None:
    spec = HostSpec(name="a", env={"TOKEN": "it's $(x)\n"})
    script = preflight_script(spec, "m", {"names": {"b'; rm": "1"}}, nonce="n")
    assert script.startswith("TOKEN='it'\"'\"'s $(x)\n'; export TOKEN\n")
    command = script[script.rindex("exec ") :]
    assert "TOKEN" not in command
    assert "rm" not in command


def _report(*found: Finding) -> PreflightReport:
    return PreflightReport(created="2030", hosts=(A, B), findings=found, seconds=1.0)


def _finding(host: str, check: str, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(check=check, host=host, severity=severity, what=f"{check} is bad", fix="mend it")


def test_a_host_that_cannot_be_reached_comes_first_and_decides_the_exit_code() -> None:
    assert refuse(_report(_finding("a", "clock", Severity.SKIPPED))) is None
    error = refuse(_report(_finding("a", "disk"), _finding("b", "hostkey")))
    assert error is not None
    assert (error.host, int(error.exit_code)) == ("b", 4)
    assert error.message == "hostkey is bad\nalso a: disk is bad"
    alone = refuse(_report(_finding("a", "disk")))
    assert alone is not None
    assert (int(alone.exit_code), alone.hint) == (3, "mend it")


def test_the_view_says_the_same_words_of_several_hosts_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    talk().print(preflight_view(_report(_finding("a", "disk"), _finding("b", "disk"))))
    said = capfd.readouterr().err
    assert said.count("error: disk: a, b: disk is bad") == 1
    assert said.count("hint: mend it") == 1
    assert "0 of 2 hosts fit for a run" in said


def test_what_a_plan_wants_of_a_host() -> None:
    plan = make_plan([(HostSpec(name="a1"), 2)])
    (wants,) = wants_of(plan)
    assert (wants.import_torch, wants.device, wants.num_ranks) == (False, None, 2)
    ranks = tuple(
        replace(rank, vendor="ascend", torch_device="npu", torch_plugin="torch_npu")
        for rank in plan.split.ranks
    )
    saved = CheckpointSpec(dir="/ckpt", every_steps=5, keep=2)
    plan = replace(
        plan,
        split=replace(plan.split, ranks=ranks),
        recipe=replace(plan.recipe, checkpoint=saved),
    )
    (wants,) = wants_of(plan)
    assert (wants.import_torch, wants.device, wants.num_devices) == (True, "npu", 2)
    assert wants.plugins == ("torch_npu",)
    assert any("davinci" in node for node in wants.nodes)
    assert wants.saves is not None
    model = plan.recipe.model
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    ends = 256 * 32 + 32 + 256 * 32
    assert wants.saves.num_bytes == 3 * 12 * (model.num_layers * layer + ends)


class Slow:
    """A transport on which a host tells its clock three times; what it says takes long to come, twice."""

    spec = HostSpec(name="a", python="/usr/bin/python3")

    def __init__(self, *delays_s: float) -> None:
        self.delays_s = delays_s

    def run(self, script: str) -> CommandResult:
        found = re.search(r'"nonce": "([0-9a-f]{32})"', script)
        assert found
        nonce = found[1]
        stdout = b"\nhetrun-python 3.11.2 /usr/bin/python3\n"
        arrivals = []
        for wall_s, delay_s in zip((1000, 1001, 1002), self.delays_s, strict=True):
            stdout += f"\n{nonce}@{wall_s}.000000\n".encode()
            arrivals.append((len(stdout), wall_s - 7.5 + delay_s))
        stdout += f"\n{nonce} {{}}\n".encode()
        arrivals.append((len(stdout), 2000.0))
        return CommandResult(rc=0, stdout=stdout, stderr=b"", seconds=1.0, arrivals=tuple(arrivals))


def test_a_clock_is_measured_by_the_quickest_of_several_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asking, "run_script", lambda slow, script, **limits: slow.run(script))
    answer = asking.ask(Slow(30.0, 0.25, 4.0), "m", {}, timeout_s=1.0)  # type: ignore[arg-type]
    assert answer.clock_offset_s == 7.25


@pytest.mark.parametrize(("token", "is_met"), [(b"k" * 32, True), (b"x" * 32, False)])
def test_a_stranger_without_the_token_is_not_greeted(token: bytes, is_met: bool) -> None:
    one, two = socket.socketpair()
    said: list[bool] = []
    with one, two:
        one.settimeout(5)
        two.settimeout(5)
        server = threading.Thread(target=lambda: said.append(greet(one, b"k" * 32, is_server=True)))
        server.start()
        assert greet(two, token, is_server=False) is is_met
        server.join()
    assert said == [is_met]


def test_documentation_lists_every_check() -> None:
    words = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    assert [check for check in CHECKS if f"`{check}`" not in words] == []
