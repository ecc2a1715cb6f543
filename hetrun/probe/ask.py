"""Ask every host at once, each in one round trip. What to ask and what the answer means is decided beside this file."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from functools import partial

from hetrun.errors import ExitCode, HetrunError
from hetrun.model import Connection, Facts, HostFacts, HostSpec, Inventory
from hetrun.probe.host import parse_host
from hetrun.probe.peers import compared, names_to_look_up
from hetrun.probe.script import MAX_OUTPUT, SCRIPT_TIMEOUT_S, probe_script
from hetrun.transport import Transport
from hetrun.transport.fanout import on_all
from hetrun.transport.script import run_script
from hetrun.vendors import all_vendors

log = logging.getLogger(__name__)


class Answered(str, Enum):
    """How many of the hosts answered."""

    ALL = "all"
    SOME = "some"
    NONE = "none"

    @property
    def exit_code(self) -> ExitCode:
        """What `hetrun probe` returns."""
        return {
            Answered.ALL: ExitCode.DONE,
            Answered.SOME: ExitCode.SOME_UNREACHABLE,
            Answered.NONE: ExitCode.UNREACHABLE,
        }[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """What one machine said, and when that was in."""

    output: bytes
    nonce: str
    received_s: float


def probe(
    inventory: Inventory, *, progress: Callable[[str, HostFacts], None] | None = None
) -> Facts:
    """Return what is there on all hosts; a host that does not answer is there with its `error`.

    `progress(host, facts)` is called as each host is through.
    """
    groups = _same_machine(inventory.hosts)
    facts: dict[str, HostFacts] = {}

    def note(host: str, reply: _Reply | HetrunError) -> None:
        for spec in groups[host]:
            facts[spec.name] = _facts(spec, reply)
            if progress:
                progress(spec.name, facts[spec.name])

    peers = names_to_look_up(inventory.hosts)
    on_all([specs[0] for specs in groups.values()], partial(_ask, peers=peers), progress=note)
    return Facts(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        inventory=inventory.name,
        hosts=compared([facts[spec.name] for spec in inventory.hosts]),
        links=inventory.links,
    )


def answered(facts: Facts) -> Answered:
    """Return whether all, some or none of the hosts answered."""
    num_silent = sum(host.error is not None for host in facts.hosts)
    if num_silent == 0:
        return Answered.ALL
    return Answered.NONE if num_silent == len(facts.hosts) else Answered.SOME


def _ask(transport: Transport, *, peers: Sequence[str]) -> _Reply:
    nonce = secrets.token_hex(16)
    script = probe_script(transport.spec, all_vendors(), nonce=nonce, peers=peers)
    result = run_script(transport, script, timeout_s=SCRIPT_TIMEOUT_S, max_bytes=MAX_OUTPUT)
    received_s = time.time()
    if result.stderr:
        log.debug("%s: the probe script says: %r", transport.spec.name, result.stderr[-500:])
    return _Reply(output=result.stdout, nonce=nonce, received_s=received_s)


def _facts(spec: HostSpec, reply: _Reply | HetrunError) -> HostFacts:
    if isinstance(reply, HetrunError):
        hint = f"; {reply.hint}" if reply.hint else ""
        return HostFacts(spec=spec, error=f"{reply.message}{hint}")
    return parse_host(spec, reply.output, nonce=reply.nonce, received_s=reply.received_s)


def _same_machine(specs: tuple[HostSpec, ...]) -> dict[str, list[HostSpec]]:
    """Return hosts that one answer serves, by the name of the first: local hosts that differ in what they play only."""
    groups: dict[str, list[HostSpec]] = {}
    first: dict[object, str] = {}
    for spec in specs:
        key: object = spec.name
        if spec.connection is Connection.LOCAL:
            asks = (spec.python, spec.activate, spec.work_dir, bool(spec.emulate))
            key = (asks, tuple(sorted(spec.env.items())))
        groups.setdefault(first.setdefault(key, spec.name), []).append(spec)
    return groups
