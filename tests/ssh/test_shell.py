"""Scripts over real sshds: keys, ports, jumps, start files and dead hosts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from hetrun.errors import HetrunError, HostError
from hetrun.model import HostSpec, SshHop
from hetrun.transport import CommandResult
from hetrun.transport.connect import open_transport
from hetrun.transport.fanout import on_all
from hetrun.transport.script import run_script
from tests.ssh.lab import GATEWAY, Lab, LabHost, make_key

pytestmark = pytest.mark.ssh
Hosts = tuple[LabHost, LabHost, LabHost]


def _say(spec: HostSpec, script: str = "hostname", timeout_s: float = 20.0) -> CommandResult:
    transport = open_transport(spec)
    try:
        return run_script(transport, script, timeout_s=timeout_s)
    finally:
        transport.close()


def _refused(spec: HostSpec) -> HostError:
    with pytest.raises(HostError) as caught:
        _say(spec)
    return caught.value


def test_a_script_runs_on_two_and_three_hosts_at_once(hosts: Hosts) -> None:
    for some in (hosts[:2], hosts):
        answers = on_all(
            [host.spec() for host in some], lambda t: run_script(t, "hostname", timeout_s=20)
        )
        said = {
            name: answer.stdout if isinstance(answer, CommandResult) else answer
            for name, answer in answers.items()
        }
        assert said == {host.name: f"{host.name}\n".encode() for host in some}


def test_output_streams_and_exit_code_arrive_apart_and_whole(hosts: Hosts) -> None:
    result = _say(
        hosts[0].spec(), "printf out; printf err >&2; head -c 300000 /dev/zero; cat; exit 7"
    )
    assert (result.rc, result.stdout, result.stderr) == (7, b"out" + bytes(300000), b"err")


def test_unknown_and_changed_host_keys_are_refused_with_different_words(
    lab: Lab, hosts: Hosts
) -> None:
    host = hosts[0]
    (lab.folder / "empty").write_text("")
    unknown = _refused(host.spec(known_hosts=str(lab.folder / "empty")))
    lab.trust(host, key=lab.folder / "other_id")
    changed = _refused(host.spec())
    lab.trust(host)
    assert "is not known: ssh-ed25519 SHA256:" in unknown.message
    assert "has CHANGED" in changed.message
    assert f"ssh-keygen -R '{host.addr}' -f {lab.folder}/known_hosts" in (changed.hint or "")
    assert _say(host.spec()).rc == 0


def test_a_revoked_key_is_refused_though_it_is_listed(lab: Lab, hosts: Hosts) -> None:
    key = " ".join((hosts[0].folder / "host_key.pub").read_text().split()[:2])
    revoked = lab.folder / "revoked"
    revoked.write_text(f"@revoked * {key}\n{hosts[0].addr} {key}\n")
    assert "is REVOKED: ssh-ed25519" in _refused(hosts[0].spec(known_hosts=str(revoked))).message


def test_the_key_of_a_jump_host_is_checked_like_the_targets(lab: Lab, hosts: Hosts) -> None:
    jump, target, _ = hosts
    hop = SshHop(addr=jump.addr, user="root", identity=str(lab.folder / "id"))
    result = _say(target.spec(jump=(hop,)), 'hostname; echo "$SSH_CLIENT"')
    assert result.stdout.decode().split()[:2] == [target.name, jump.addr]
    lab.trust(jump, key=lab.folder / "other_id")
    changed = _refused(target.spec(jump=(hop,)))
    lab.trust(jump)
    assert f"jump host {jump.addr}: host key of {jump.addr}:22 has CHANGED" in changed.message


def test_a_jump_host_that_cannot_reach_the_target_says_so(lab: Lab, hosts: Hosts) -> None:
    hop = SshHop(addr=hosts[0].addr, user="root", identity=str(lab.folder / "id"))
    error = _refused(hosts[1].spec(jump=(hop,), port=2299))
    assert f"(jump host) cannot reach {hosts[1].addr}:2299" in error.message


def test_a_refused_key_is_named_with_the_command_to_try(lab: Lab, hosts: Hosts) -> None:
    error = _refused(hosts[2].spec(identity=str(lab.folder / "other_id")))
    assert f"{hosts[2].addr}:2203 refused the key of root" in error.message
    assert error.hint == f"try: ssh -o BatchMode=yes -p 2203 root@{hosts[2].addr} true"


def test_a_key_with_a_passphrase_asks_for_nothing(lab: Lab, hosts: Hosts) -> None:
    locked = lab.folder / "locked"
    if not locked.exists():
        make_key(locked, passphrase="secret words")
    error = _refused(hosts[0].spec(identity=str(locked)))
    assert "needs its passphrase" in error.message
    assert error.hint == f"ssh-add {locked}"


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A listener that accepts and says nothing."""
    with socket.create_server((GATEWAY, 0)) as server:
        swallows = threading.Thread(target=_swallow, args=(server,))
        swallows.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)  # closing it would not end accept
        swallows.join()


def _swallow(server: socket.socket) -> None:
    kept: list[socket.socket] = []
    try:
        while True:
            kept.append(server.accept()[0])
    except OSError:
        pass
    finally:
        for connection in kept:
            connection.close()


def test_dead_hosts_are_named_and_stop_nobody(hosts: Hosts, silent_port: int) -> None:
    specs = [
        hosts[0].spec(),
        hosts[0].spec(name="nobody", addr="10.77.0.99"),
        hosts[0].spec(name="closed", port=2299),
        hosts[0].spec(name="silent", addr=GATEWAY, port=silent_port),
        hosts[1].spec(),
    ]
    answers = on_all(specs, lambda t: run_script(t, "hostname", timeout_s=20))
    words = {name: str(a) for name, a in answers.items() if isinstance(a, HetrunError)}
    assert set(words) == {"nobody", "closed", "silent"}
    assert "10.77.0.99:22" in words["nobody"]
    assert "refuses connections" in words["closed"]
    assert "sent no SSH banner" in words["silent"]


def test_noise_of_start_files_is_kept_apart_and_cannot_fake_output(hosts: Hosts) -> None:
    hosts[0].start_file(".bashrc", "cat <<'E'\n _  _\n(o)(o) {\"ok\": 1}\nE\nprintf unfinished")
    transport = open_transport(hosts[0].spec())
    try:
        assert run_script(transport, "echo clean", timeout_s=20).stdout == b"clean\n"
        channel = transport.open_shell()
        assert channel.noise.endswith(b"unfinished")  # type: ignore[attr-defined]
    finally:
        transport.close()
        hosts[0].start_file(".bashrc", "")


def test_start_files_that_leave_or_wait_are_named(hosts: Hosts) -> None:
    hosts[0].start_file(".bashrc", "echo 'This account is not available'; exit 1")
    hosts[1].start_file(".bashrc", "read answer")
    try:
        answers = on_all(
            [host.spec() for host in hosts[:2]], lambda t: run_script(t, "true", timeout_s=20)
        )
    finally:
        for host in hosts[:2]:
            host.start_file(".bashrc", "")
    assert "'This account is not available'" in str(answers[hosts[0].name])
    assert "did not start /bin/sh within 10 s" in str(answers[hosts[1].name])


def test_a_script_that_hangs_is_left_at_its_deadline(hosts: Hosts) -> None:
    with pytest.raises(HostError, match="did not finish within 1 s"):
        _say(hosts[0].spec(), "sleep 4", timeout_s=1.0)


def test_64_names_behind_one_default_sshd_all_get_through(hosts: Hosts) -> None:
    """Its MaxStartups drops connections at random from the tenth on that is not let in yet."""
    specs = [hosts[0].spec(name=f"n{number}") for number in range(64)]
    answers = on_all(specs, lambda t: run_script(t, "hostname", timeout_s=20))
    assert [str(a) for a in answers.values() if isinstance(a, HetrunError)] == []


def test_refusals_over_max_startups_are_tried_again(lab: Lab) -> None:
    host = lab.host(8, sshd="MaxStartups 2:100:2")
    try:
        specs = [host.spec(name=f"n{number}") for number in range(8)]
        answers = on_all(specs, lambda t: run_script(t, "hostname", timeout_s=20))
    finally:
        lab.drop(host)
    assert [str(a) for a in answers.values() if isinstance(a, HetrunError)] == []


def test_a_cut_link_is_noticed_by_the_connection_itself(hosts: Hosts) -> None:
    transport = open_transport(hosts[0].spec())
    channel = transport.open_shell()
    hosts[0].link(up=False)
    try:
        with pytest.raises(HetrunError, match="connection broke"):
            channel.read_stdout(45.0)  # 11 s on an idle machine
    finally:
        hosts[0].link(up=True)
        transport.close()
        hosts[0].drop_sessions()
