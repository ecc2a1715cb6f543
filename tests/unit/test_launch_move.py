"""How hosts are reached from the one that a run is handed to, and what that one is told to do."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import hetrun
from hetrun.errors import ConfigError, PreflightError
from hetrun.launch import move
from hetrun.launch.move import Parcel, _script, from_there
from hetrun.model import Connection, Facts, HostFacts, HostSpec, Plan, SshHop
from hetrun.store import load
from hetrun.transport import CommandResult
from tests.ssh.plans import make_plan

HEAD = HostSpec(
    name="a1",
    addr="gate.example",
    port=2201,
    user="ann",
    identity="/keys/a",
    jump=(SshHop(addr="x"),),
)
HOPS = (
    SshHop(addr="x"),
    SshHop(addr="gate.example", identity="/keys/a"),
    SshHop(addr="y", identity="/k"),
)
OTHER = HostSpec(name="b1", addr="10.0.0.2", user="bob", known_hosts="/known", jump=HOPS)
PLAN = make_plan([(HEAD, 1), (OTHER, 2)])


def test_the_head_is_local_to_itself_and_others_are_reached_with_its_own_keys() -> None:
    facts = Facts(created="", inventory="lab", hosts=(HostFacts(spec=OTHER), HostFacts(spec=HEAD)))
    there = from_there(Parcel(plan=PLAN, facts=facts), "a1")
    head, other = there.plan.hosts
    assert head == HostSpec(name="a1", connection=Connection.LOCAL, data_addr="gate.example")
    assert other == HostSpec(name="b1", addr="10.0.0.2", user="bob", jump=(SshHop(addr="y"),))
    assert there.facts is not None
    assert [host.spec for host in there.facts.hosts] == [other, head]
    by_nic = make_plan([(replace(HEAD, nic="ib0"), 1)])
    assert from_there(Parcel(plan=by_nic), "a1").plan.hosts[0].data_addr is None


@pytest.mark.parametrize(
    ("rc", "stdout", "folder"),
    [
        (0, b"runs/20300101-120000-tiny\n", "runs/20300101-120000-tiny"),
        (3, b"", ""),
        (0, b"runs/..\n", None),
        (0, b"/etc/runs/a\n", None),
        (0, b"", None),
    ],
)
def test_the_answer_of_a_host_is_a_folder_of_runs_or_none(
    monkeypatch: pytest.MonkeyPatch, rc: int, stdout: bytes, folder: str | None
) -> None:
    result = CommandResult(rc=rc, stdout=stdout, stderr=b"words\n", seconds=1.0)
    monkeypatch.setattr(move, "run_script", lambda transport, script, **limits: result)
    if folder is not None:
        found = move.start_there(Parcel(plan=PLAN), "a1", hidden={}, args=[])
        assert found == (folder, "words", rc)
        return
    with pytest.raises(PreflightError, match="need the run's folder"):
        move.start_there(Parcel(plan=PLAN), "a1", hidden={}, args=[])


@pytest.mark.parametrize(
    ("plan", "host", "what"),
    [
        (PLAN, "c1", "--on c1: the plan has no such host"),
        (
            make_plan([(HEAD, 1), (HostSpec(name="me", connection=Connection.LOCAL), 1)]),
            "a1",
            "me is this machine and takes part in the run",
        ),
    ],
)
def test_a_run_stays_here_where_its_host_is_unknown_or_this_machine_takes_part(
    plan: Plan, host: str, what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_there(Parcel(plan=plan), host)
    assert caught.value.message.startswith(what)


def test_the_script_hands_over_all_byte_for_byte_and_leaves_no_file(tmp_path: Path) -> None:
    home, tools, temporary = (tmp_path / name for name in ("home", "bin", "tmp"))
    for folder in (home, tools, temporary):
        folder.mkdir()
    stub = tools / "hetrun"
    stub.write_text(
        f"#!/bin/sh\nif [ $1 = --version ]; then echo hetrun {hetrun.__version__}; exit; fi\n"
        'printf "%s\\n" "$PWD" "$TOKEN" "$HETRUN_SCRIPT" "$@" >told\n'
        'cp "$2" taken.json; echo runs/r1\nexit 5\n'
    )
    stub.chmod(0o755)
    token = "a b$(id)'\"`{x}%s"
    there = from_there(Parcel(plan=PLAN), "a1")
    script = _script(there, {"TOKEN": token}, ["--run-root", "my runs", "--skip", "clock"])
    path = f"{tools}:{os.environ['PATH']}"
    env = {"HOME": str(home), "PATH": path, "TMPDIR": str(temporary), "HETRUN_SCRIPT": "mark"}
    result = subprocess.run(
        ["/bin/sh"], input=script, text=True, capture_output=True, env=env, timeout=20
    )
    assert (result.returncode, result.stdout, result.stderr) == (5, "runs/r1\n", "")
    told = (home / "told").read_text().splitlines()
    assert told[:4] == [str(home), token, "", "launch"]
    assert told[5:] == ["--detach", "--run-root", "my runs", "--skip", "clock"]
    assert load(Plan, home / "taken.json") == there.plan
    assert list(temporary.iterdir()) == []
