from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from hetrun.errors import ExitCode, HetrunError, HostError
from hetrun.model import Connection, EmulatedChip, Facts, HostFacts, HostSpec, Inventory
from hetrun.probe import Answered, answered, ask, probe
from hetrun.probe.ask import _Reply
from tests.unit.probe_output import END_S, NONCE, PLAIN, output

CHIP = EmulatedChip(vendor="v", model="m", num_devices=1, flops_per_s=1.0, memory_bytes=7)
LOCAL = HostSpec(name="fast", connection=Connection.LOCAL, emulate=(CHIP,))
SLOW = replace(LOCAL, name="slow", emulate=(replace(CHIP, model="n"),))
GOOD = _Reply(output=output(PLAIN), nonce=NONCE, received_s=END_S)
Answers = dict[str, _Reply | HetrunError]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], list[str]]:
    """Make hosts answer, and return the names of those that were asked."""

    def answer_with(answers: Answers) -> list[str]:
        names: list[str] = []

        def on_all(
            specs: Sequence[HostSpec],
            function: object,
            *,
            progress: Callable[[str, _Reply | HetrunError], None],
        ) -> None:
            for spec in reversed(specs):
                names.append(spec.name)
                progress(spec.name, answers[spec.name])

        monkeypatch.setattr(ask, "on_all", on_all)
        return names

    return answer_with


def test_silent_host_is_in_the_facts_with_its_error(
    asked: Callable[[Answers], list[str]],
) -> None:
    inventory = Inventory(name="lab", hosts=(HostSpec(name="a1"), HostSpec(name="a2")))
    dead = HostError("refused the key", hint="try: ssh a2", host="a2")
    asked({"a1": GOOD, "a2": dead})
    seen: list[tuple[str, HostFacts]] = []
    facts = probe(inventory, progress=lambda host, found: seen.append((host, found)))
    assert [host.spec.name for host in facts.hosts] == ["a1", "a2"]
    assert [host.error for host in facts.hosts] == [None, "refused the key; try: ssh a2"]
    assert [name for name, _ in seen] == ["a2", "a1"]
    assert answered(facts) is Answered.SOME
    assert answered(facts).exit_code is ExitCode.SOME_UNREACHABLE


def test_this_machine_is_asked_once_for_all_hosts_that_it_plays(
    asked: Callable[[Answers], list[str]],
) -> None:
    other_python = replace(LOCAL, name="other", python="/opt/python3")
    names = asked({"fast": GOOD, "other": GOOD})
    facts = probe(Inventory(name="lab", hosts=(LOCAL, SLOW, other_python)))
    assert sorted(names) == ["fast", "other"]
    assert [host.devices[0].model for host in facts.hosts] == ["m", "n", "m"]
    assert [host.spec.name for host in facts.hosts] == ["fast", "slow", "other"]
    assert answered(facts) is Answered.ALL


def test_ssh_hosts_are_asked_one_by_one(asked: Callable[[Answers], list[str]]) -> None:
    alike = [HostSpec(name=name, addr="192.0.2.1") for name in ("a", "b")]
    names = asked({"a": GOOD, "b": HostError("gone", host="b")})
    facts = probe(Inventory(name="lab", hosts=tuple(alike)))
    assert sorted(names) == ["a", "b"]
    assert facts.created.endswith("+00:00")


def test_no_answer_at_all_is_none() -> None:
    silent = HostFacts(spec=HostSpec(name="a"), error="x")
    facts = Facts(created="", inventory="lab", hosts=(silent,))
    assert answered(facts) is Answered.NONE
    assert Answered.ALL.exit_code is ExitCode.DONE
