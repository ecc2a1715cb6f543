"""One function over many hosts, and scripts, over transports that are played here."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable

import pytest

from hetrun.errors import HetrunError, HostError, LostContactError
from hetrun.model import HostSpec
from hetrun.transport import Transport, fanout
from hetrun.transport.script import run_script


class FakeChannel:
    """A shell that says what it is told to say."""

    def __init__(self, stdout: list[bytes], *, ends: bool = True, rc: int | None = 0) -> None:
        self.stdout, self.ends, self.rc = stdout, ends, rc
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close_stdin(self) -> None:
        pass

    def read_stdout(self, timeout_s: float) -> bytes:
        if self.stdout:
            return self.stdout.pop(0)
        if self.ends:
            return b""
        raise TimeoutError

    def read_stderr(self, timeout_s: float) -> bytes:
        return b""

    def exit_code(self, timeout_s: float) -> int | None:
        return self.rc

    def close(self) -> None:
        self.closed = True


class FakeTransport:
    def __init__(self, spec: HostSpec, channel: FakeChannel | None = None) -> None:
        self.spec = spec
        self.channel = channel or FakeChannel([b"hi"])
        self.closed = False

    def open_shell(self) -> FakeChannel:
        return self.channel

    def close(self) -> None:
        self.closed = True


SPECS = [HostSpec(name=name) for name in ("a1", "a2", "a3")]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeTransport]:
    made: list[FakeTransport] = []

    def open_transport(spec: HostSpec) -> FakeTransport:
        made.append(FakeTransport(spec))
        return made[-1]

    monkeypatch.setattr(fanout, "open_transport", open_transport)
    return made


def _but(host: str, error: Exception) -> Callable[[Transport], str]:
    def function(transport: Transport) -> str:
        if transport.spec.name == host:
            raise error
        return transport.spec.name

    return function


def test_a_dead_host_stops_nobody_and_answers_keep_their_order(opened: list[FakeTransport]) -> None:
    dead = HostError("dead", host="a2")
    seen: list[tuple[str, str | HetrunError, threading.Thread]] = []
    answers = fanout.on_all(
        SPECS,
        _but("a2", dead),
        progress=lambda host, answer: seen.append((host, answer, threading.current_thread())),
    )
    assert list(answers.items()) == [("a1", "a1"), ("a2", dead), ("a3", "a3")]
    assert {host: answer for host, answer, _ in seen} == answers
    assert {thread for _, _, thread in seen} == {threading.current_thread()}
    assert all(transport.closed for transport in opened)


def test_a_bug_on_one_host_is_raised_not_reported(opened: list[FakeTransport]) -> None:
    with pytest.raises(KeyError):
        fanout.on_all(SPECS, _but("a2", KeyError("bug")))
    assert all(transport.closed for transport in opened)


def test_a_script_is_read_whole_before_it_runs() -> None:
    channel = FakeChannel([b"o", b"ut"], rc=3)
    script = "cat\necho 'after'"
    result = run_script(FakeTransport(SPECS[0], channel), script, timeout_s=1)
    assert (result.rc, result.stdout) == (3, b"out")
    assert channel.written.startswith(b"{\n")
    assert channel.written.endswith(b"\n}\n")
    assert b"\ntext=" + shlex.quote(script).encode() + b"\n" in channel.written
    assert channel.closed


def test_output_without_end_is_cut_off() -> None:
    channel = FakeChannel([b"x" * 600, b"x" * 600], ends=False)
    with pytest.raises(HostError, match="sent more than 1000 bytes"):
        run_script(FakeTransport(SPECS[0], channel), "yes", timeout_s=1, max_bytes=1000)
    assert channel.closed


def test_a_script_past_its_deadline_is_an_error_of_its_host() -> None:
    channel = FakeChannel([], ends=False)
    with pytest.raises(HostError, match=r"did not finish within 0\.05 s") as caught:
        run_script(FakeTransport(SPECS[0], channel), "sleep 9", timeout_s=0.05)
    assert caught.value.host == "a1"


def test_an_end_without_exit_code_is_lost_contact() -> None:
    with pytest.raises(LostContactError):
        run_script(FakeTransport(SPECS[0], FakeChannel([], rc=None)), "true", timeout_s=1)
