"""Whole launches over real sshds with real torchruns; ranks are played by a fake worker."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from shutil import which

import pytest

from hetrun import store
from hetrun.errors import HetrunError, HostError, PreflightError, StorageError
from hetrun.launch import launch, runs
from hetrun.model import (
    CheckpointSpec,
    EndEvent,
    Event,
    HostSpec,
    Plan,
    RunOutcome,
    SshHop,
    StartEvent,
    StepEvent,
)
from tests.ssh.lab import Lab, call
from tests.ssh.launches import (
    GONE_S,
    Hosts,
    job_folders,
    lab_plan,
    launch_fake,
    run_dir,
)
from tests.ssh.plans import Recorder, fake_env, make_plan

pytestmark = pytest.mark.ssh
NASTY = {
    "A": "two words",
    "B": "$(touch /tmp/x) `id` ;exit !! %s",
    "C": "line\nbreak\r\ttab",
    "D": '{"json": "\\" \'"}',
    "E": "*?[a]{b,c}~ 64(x2) \\\\ ^ # äöü 漢",
    "F": "",
}


def test_uneven_hosts_run_to_the_end_with_ranks_where_the_plan_has_them(
    hosts: Hosts, tmp_path: Path
) -> None:
    recorder = Recorder()
    outcome = launch_fake(lab_plan(hosts, tmp_path / "meet", "env:0:0,env:3:0"), tmp_path, recorder)
    assert (outcome.exit_code, outcome.status, outcome.failures) == (0, "done", ())
    run = run_dir(tmp_path)
    assert store.load(RunOutcome, run / "launch.json") == outcome
    steps = [event for event in recorder.events if isinstance(event, StepEvent)]
    ends = [event for event in recorder.events if isinstance(event, EndEvent)]
    assert (len(steps), sorted(event.rank for event in ends)) == (20, [0, 1, 2, 3])
    for rank, name in enumerate([*["h1"] * 3, "h2"]):
        assert f"rank {rank} on {name} is up" in (run / f"logs/rank-{rank:04}.log").read_text()
        events = (run / f"events/rank-{rank:04}.jsonl").read_text().splitlines()
        assert [json.loads(line)["event"] for line in events] == ["start", *["step"] * 5, "end"]
    assert "h2/3 rank 3 on h2 is up" in (run / "all.log").read_text()
    env = {
        rank: json.loads(line.removeprefix("ENV "))
        for _, rank, line in recorder.lines
        if line.startswith("ENV ")
    }
    assert [env[0][name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")] == [
        *("4", "3"),
        hosts[0].addr,
    ]
    assert env[3]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert env[3]["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert env[3]["HETRUN_HOST"] == "h2"
    for host in hosts[:2]:
        host.wait_empty(0.5)
        assert not (job_folders(host)[-1] / "env").exists()


@pytest.mark.timeout(150)  # eight imports of torch, which take their time on two cores
def test_real_ranks_train_over_two_hosts_and_go_on_where_ctrl_c_stopped_them(
    hosts: Hosts, tmp_path: Path
) -> None:
    checkpoint = CheckpointSpec(dir=str(tmp_path / "saved"), every_steps=10_000, shared=True)
    counts = [(host.spec(), 1) for host in hosts[:2]]
    plan = make_plan(counts, checkpoint=checkpoint, start_timeout_s=120.0)
    train = replace(plan.recipe.train, steps=60)
    plan = replace(plan, recipe=replace(plan.recipe, train=train))
    losses: list[dict[int, set[float]]] = []
    codes: list[int] = []
    for presses in (True, False):
        recorder = _CtrlC(at_step=2) if presses else Recorder()
        outcome = launch(plan, run_root=tmp_path / "runs", observer=recorder, environ=os.environ)
        assert (outcome.failures, outcome.not_clean) == ((), ())
        codes.append(outcome.exit_code)
        losses.append({})
        for event in recorder.events:
            if isinstance(event, StepEvent):
                losses[-1].setdefault(event.step, set()).add(event.loss)
        assert all(len(of_step) == 1 for of_step in losses[-1].values())
        for host in hosts:
            host.wait_empty(0.5)
    (stopped_at,) = {len(losses[0]), min(losses[1])}
    assert (codes, stopped_at < 60) == ([130, 0], True)
    assert [*losses[0], *losses[1]] == list(range(60))


class _CtrlC(Recorder):
    """Presses it once, when a step was done."""

    def __init__(self, at_step: int) -> None:
        super().__init__()
        self.at_step: int | None = at_step

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        if isinstance(event, StepEvent) and event.step == self.at_step:
            self.at_step = None
            os.kill(os.getpid(), signal.SIGINT)


def test_three_hosts_meet_over_ipv6_and_odd_ports_and_a_jump_host(
    lab: Lab, hosts: Hosts, tmp_path: Path
) -> None:
    for number, host in enumerate(hosts, 1):
        host.inside("ip", "addr", "add", f"fd00::{number}/64", "dev", "eth0", "nodad")
    hosts[1].start_file(".bashrc", 'echo "  /\\_/\\  {\\"t\\": 1}"; echo oops >&2')
    hop = SshHop(addr=hosts[0].addr, user="root", identity=str(lab.folder / "id"))
    specs = [
        hosts[0].spec(data_addr="fd00::1"),
        hosts[1].spec(data_addr="fd00::2"),
        hosts[2].spec(data_addr="fd00::3", jump=(hop,)),
    ]
    recorder = Recorder()
    env = fake_env(tmp_path / "meet", "env:3:0")
    try:
        plan = make_plan(list(zip(specs, (2, 1, 1), strict=True)), env=env)
        outcome = launch_fake(plan, tmp_path, recorder)
    finally:
        hosts[1].start_file(".bashrc", "")
    assert (outcome.status, outcome.failures) == ("done", ())
    assert _hosts_of_ranks(recorder) == ["h1", "h1", "h2", "h3"]
    (line,) = [line for _, _, line in recorder.lines if line.startswith("ENV ")]
    assert json.loads(line.removeprefix("ENV "))["MASTER_ADDR"] == "fd00::1"


def _hosts_of_ranks(recorder: Recorder) -> list[str]:
    """Where each rank says that it is, in order of rank."""
    starts = {event.rank: event.host for event in recorder.events if isinstance(event, StartEvent)}
    return [starts[rank] for rank in sorted(starts)]


def test_each_host_keeps_its_own_interface_port_and_user_from_preflight_to_clean(
    lab: Lab, tmp_path: Path
) -> None:
    first = lab.host(9, nic="ens3", port=2201, sshd="AllowUsers ann")
    second = lab.host(10, nic="enp1s0", port=2202, sshd="AllowUsers bob")
    specs = first.spec(user="ann"), second.spec(user="bob")
    second.inside("ip", "link", "add", "docker0", "type", "bridge")
    second.inside("ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
    second.inside("ip", "link", "set", "docker0", "up")
    try:
        recorder = Recorder()
        env = fake_env(tmp_path / "meet", "env:0:0,env:1:0")
        plan = make_plan(list(zip(specs, (1, 3), strict=True)), env=env)
        outcome = launch_fake(plan, tmp_path, recorder)
        (run_dir(tmp_path) / runs.RECORD).unlink()  # it is of this very process
        left = runs.clean(run_dir(tmp_path), done=lambda host, words: None)
    finally:
        lab.drop(first)
        lab.drop(second)
    assert outcome.status == "done"
    assert [found.error for found in left] == [None, None]
    assert _hosts_of_ranks(recorder) == ["h9", "h10", "h10", "h10"]
    names = {
        rank: json.loads(line.removeprefix("ENV "))["GLOO_SOCKET_IFNAME"]
        for _, rank, line in recorder.lines
        if line.startswith("ENV ")
    }
    assert names == {0: "ens3", 1: "enp1s0"}


def test_a_rank_that_raises_is_the_root_cause_and_nothing_is_left(
    hosts: Hosts, tmp_path: Path
) -> None:
    outcome = launch_fake(lab_plan(hosts, tmp_path / "meet", "raise:3:2,daemon:0:1"), tmp_path)
    for host in hosts:
        host.wait_empty(0.5)
    assert (outcome.exit_code, outcome.status) == (1, "failed")
    root, *others = outcome.failures
    assert (root.host, root.rank, root.what) == ("h2", 3, "raised ValueError: bad row in batch 2")
    assert "about to raise" in root.last_lines
    assert "ValueError: bad row in batch 2" in root.last_lines
    assert all("ConnectionError" in other.what for other in others)
    assert outcome.not_clean == ()


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("kill:1:2", "was killed by signal 9"),
        ("exit3:1:2", "ended with exit code 3"),
        ("exit0:1:2", "ended with exit code 0 before its last step"),
    ],
)
def test_a_rank_that_dies_silently_is_named_before_those_that_lost_it(
    hosts: Hosts, tmp_path: Path, fault: str, what: str
) -> None:
    outcome = launch_fake(lab_plan(hosts, tmp_path / "meet", fault), tmp_path)
    for host in hosts:
        host.wait_empty(0.5)
    root = outcome.failures[0]
    assert (outcome.exit_code, root.host, root.rank, root.what) == (1, "h1", 1, what)


def test_a_hanging_rank_is_named_with_its_last_step(hosts: Hosts, tmp_path: Path) -> None:
    plan = lab_plan(hosts, tmp_path / "meet", "hang:2:3", step_timeout_s=3.0)
    outcome = launch_fake(plan, tmp_path)
    for host in hosts:
        host.wait_empty(0.5)
    (root,) = outcome.failures
    assert (outcome.exit_code, outcome.status) == (6, "hang")
    assert (root.host, root.rank) == ("h1", 2)
    assert root.what.startswith("hangs after step 2: nothing for 3 s, at hetrun_fake_worker.py:")
    assert root.what.endswith("in do_hang")


def test_a_stopped_rank_is_told_from_those_that_wait_for_it(hosts: Hosts, tmp_path: Path) -> None:
    plan = lab_plan(hosts, tmp_path / "meet", "stop:3:0", step_timeout_s=3.0)
    (root,) = launch_fake(plan, tmp_path).failures
    assert (root.host, root.rank) == ("h2", 3)
    assert root.what == "is stopped (SIGSTOP) in its first step: nothing for 3 s"


def test_a_secret_reaches_the_rank_and_nothing_else(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECRET", 'tok"en-äö-51')
    recorder = Recorder()
    seen: list[str] = []
    plan = lab_plan(hosts, tmp_path / "meet", "secret:3:1", secrets=("FAKE_SECRET",))
    recorder.on_status = lambda host, text: seen.extend(hosts[1].processes().values())  # type: ignore[method-assign]
    outcome = launch_fake(plan, tmp_path, recorder)
    assert outcome.failures[0].what == "raised ValueError: secret ***"
    assert "the secret is *** !" in [line for _, rank, line in recorder.lines if rank == 3]
    assert any("torch.distributed.run" in line for line in seen)
    files = [path.read_text() for path in run_dir(tmp_path).rglob("*") if path.is_file()]
    assert not [text for text in (*seen, *files) if "en-äö-51" in text or "en-\\u00e4" in text]
    assert not (job_folders(hosts[1])[-1] / "env").exists()


def test_values_of_variables_arrive_byte_for_byte(hosts: Hosts, tmp_path: Path) -> None:
    recorder = Recorder()
    outcome = launch_fake(
        lab_plan(hosts, tmp_path / "meet", "env:3:0", env=NASTY), tmp_path, recorder
    )
    assert outcome.status == "done"
    (line,) = [line for _, _, line in recorder.lines if line.startswith("ENV ")]
    env = json.loads(line.removeprefix("ENV "))
    assert {name: env[name] for name in NASTY} == NASTY


@pytest.mark.skipif(not (which("tcsh") and which("fish")), reason="needs tcsh and fish")
def test_login_shells_of_other_kinds_change_nothing(lab: Lab, tmp_path: Path) -> None:
    first, second = (
        lab.host(21, shell=which("tcsh") or ""),
        lab.host(22, shell=which("fish") or ""),
    )
    first.start_file(".cshrc", 'echo hi {"ok":1}')
    (second.folder / "home/.config/fish").mkdir(parents=True)
    second.start_file(".config/fish/config.fish", "echo noise")
    recorder = Recorder()
    env = fake_env(tmp_path / "meet", "env:0:0,env:1:0", **NASTY)
    try:
        plan = make_plan([(first.spec(), 1), (second.spec(), 1)], env=env)
        assert launch_fake(plan, tmp_path, recorder).status == "done"
    finally:
        lab.drop(first)
        lab.drop(second)
    said = [json.loads(line[4:]) for _, _, line in recorder.lines if line.startswith("ENV ")]
    assert [{name: env[name] for name in NASTY} for env in said] == [NASTY, NASTY]


def test_a_flood_of_output_neither_stalls_nor_fills_the_run(hosts: Hosts, tmp_path: Path) -> None:
    outcome = launch_fake(lab_plan(hosts, tmp_path / "meet", "flood:3:1"), tmp_path)
    assert outcome.status == "done"
    log = (run_dir(tmp_path) / "logs/rank-0003.log").read_text()
    assert "bytes skipped here" in log or log.count("\n") > 200_000
    assert log.splitlines()[-1].startswith("line 199999 ")


def test_a_full_disk_ends_the_run_with_its_outcome_written(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    call("mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path / "runs"))
    try:
        with pytest.raises(StorageError, match="No space left") as caught:
            launch_fake(lab_plan(hosts, tmp_path / "meet", "flood:3:1"), tmp_path)
        for host in hosts:
            host.wait_empty(0.5)
        outcome = store.load(RunOutcome, run_dir(tmp_path) / "launch.json")
    finally:
        call("umount", str(tmp_path / "runs"))
    assert "--run-root" in (caught.value.hint or "")
    assert (outcome.status, outcome.exit_code) == ("failed", 1)


def _refused(plan: Plan, folder: Path) -> HetrunError:
    with pytest.raises(HetrunError) as caught:
        launch_fake(plan, folder)
    outcome = store.load(RunOutcome, run_dir(folder) / "launch.json")
    assert outcome.exit_code == caught.value.exit_code
    return caught.value


def test_wrong_interpreters_are_refused_before_anything_starts(
    hosts: Hosts, tmp_path: Path
) -> None:
    cases: list[tuple[HostSpec, str]] = [
        (hosts[1].spec(python="/nowhere/python"), "no interpreter '/nowhere/python' there"),
        (hosts[1].spec(python="/bin/true"), "interpreter '/bin/true' does not run"),
        (hosts[1].spec(python="/usr/bin/python3"), "no torch under /usr/bin/python3"),
        (hosts[1].spec(activate="/nowhere/set_env.sh"), "no readable file '/nowhere/set_env.sh'"),
        (hosts[1].spec(data_addr="10.77.9.9"), "10.77.9.9 is not an address of this host"),
        (hosts[1].spec(work_dir="/proc/x"), "cannot write to /proc/x"),
    ]
    old = tmp_path / "python2"
    old.write_text("#!/bin/sh\necho 'hetrun-python 3.8.1 /opt/old/python'\ncat >/dev/null\n")
    old.chmod(0o755)
    cases.append((hosts[1].spec(python=str(old)), "python at /opt/old/python is 3.8.1, need 3.10"))
    for number, (spec, message) in enumerate(cases):
        folder = tmp_path / str(number)
        plan = make_plan([(hosts[0].spec(), 1), (spec, 1)], env=fake_env(tmp_path / "meet"))
        error = _refused(plan, folder)
        assert isinstance(error, PreflightError)
        assert (error.host, error.exit_code) == ("h2", 3)
        assert message in error.message
        assert error.hint
    for host in hosts:
        host.wait_empty(GONE_S)


def test_an_activation_script_is_sourced_and_its_noise_does_no_harm(
    hosts: Hosts, tmp_path: Path
) -> None:
    script = tmp_path / "set_env.sh"
    script.write_text("echo hetrun-python 2.7.0 fake; export A=(1 2); export FROM_SCRIPT=yes\n")
    recorder = Recorder()
    env = fake_env(tmp_path / "meet", "env:0:0")
    plan = make_plan([(hosts[0].spec(activate=str(script)), 1)], env=env)
    assert launch_fake(plan, tmp_path, recorder).status == "done"
    (line,) = [line for _, _, line in recorder.lines if line.startswith("ENV ")]
    assert json.loads(line.removeprefix("ENV "))["FROM_SCRIPT"] == "yes"


def test_an_unreachable_host_ends_the_launch_and_leaves_nothing(
    hosts: Hosts, tmp_path: Path
) -> None:
    dead = hosts[1].spec(name="dead", addr="10.77.0.99")
    plan = make_plan([(hosts[0].spec(), 1), (dead, 1)], env=fake_env(tmp_path / "meet"))
    error = _refused(plan, tmp_path)
    assert isinstance(error, HostError)
    assert (error.host, error.exit_code) == ("dead", 4)
    hosts[0].wait_empty(GONE_S)
