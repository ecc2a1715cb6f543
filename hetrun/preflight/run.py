"""All hosts, each once alone and once with the others; findings in the order of hosts. What hosts say: `ask.py`."""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from hetrun.errors import AuthError, HetrunError, HostError, HostKeyError, PreflightError
from hetrun.model import (
    CheckedHost,
    Connection,
    Finding,
    HostSpec,
    PairTiming,
    PreflightReport,
    Severity,
)
from hetrun.preflight import ask as asking
from hetrun.preflight.addresses import DataAddress, choose_address
from hetrun.preflight.checks import CHECKS, CONNECTING, check_skips
from hetrun.preflight.compare import compare, pair_findings
from hetrun.transport import Transport
from hetrun.transport.bundle import Bundle
from hetrun.transport.connect import one_connection_per_host
from hetrun.transport.fanout import MAX_AT_ONCE, on_all

ECHO_BYTES = 1 << 20
PAIRS_S = 6.0  # for all pairs of one host; most of it passes only where somebody does not answer
MOST_PEERS = 63  # of one host: above 64 hosts each calls its next 63 ones in a ring
LOG_BYTES = 128 << 20  # of one rank: what the guard keeps of its two logs
_PORTS = range(20000, 32768)  # as launch takes them
_PORT_TRIES = 5
_MODULE = "hetrun.preflight.onmeet"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """What a run writes on a host beside its logs."""

    dir: str
    num_bytes: int  # expected, all checkpoints that are kept together
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What one host must have for its part; the defaults are those of a host without a plan."""

    spec: HostSpec
    import_torch: bool = True  # else only its version is looked up, which takes no time
    device: str | None = None  # torch device that must have `num_devices`
    num_devices: int = 0
    # imported where they are installed; where `device` is set they must be
    plugins: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()  # patterns of device nodes that nobody else should hold
    readable: tuple[str, ...] = ()
    num_ranks: int = 1
    saves: SavedState | None = None


def preflight(
    wants: Sequence[Wants],
    *,
    bundle: Bundle,
    skip: Iterable[str] = (),
    progress: Callable[[str, str], None] | None = None,
    tick: Callable[[], None] | None = None,
) -> PreflightReport:
    """Check all hosts; return all that was found. Nothing is left on them.

    `progress(host, words)` is told as each host has answered. `tick` is called while waiting and may raise to leave.

    Raises:
        ConfigError: `skip` names no check.
        PreflightError: hosts of this machine and others have no address to meet at.
    """
    skipped = check_skips(skip)
    return _Flight(wants, bundle, skipped, progress=progress, tick=tick).run()


def refuse(report: PreflightReport) -> HetrunError | None:
    """Return the error that a report with errors is for a launch; None where it may start."""
    if not report.errors:
        return None
    first, *others = sorted(report.errors, key=lambda item: item.check not in CONNECTING)
    also = "".join(f"\nalso {item.host}: {item.what}" for item in others)
    what, hint = f"{first.what}{also}", first.fix or None
    kinds = {kind.check: kind for kind in (HostError, HostKeyError, AuthError)}
    if first.check not in kinds:
        return PreflightError(what, hint=hint, host=first.host)
    error = kinds[first.check](what, hint=hint, host=first.host)
    error.away = tuple(item.host for item in report.errors if item.check == HostError.check)
    return error


class _Flight:
    def __init__(
        self,
        wants: Sequence[Wants],
        bundle: Bundle,
        skipped: tuple[str, ...],
        *,
        progress: Callable[[str, str], None] | None,
        tick: Callable[[], None] | None,
    ) -> None:
        self._wants = {item.spec.name: item for item in wants}
        self._specs = [item.spec for item in wants]
        self._bundle = bundle
        self._skipped = skipped
        self._progress = progress
        self._tick = tick
        self._started_s = time.monotonic()
        self._addresses: dict[str, DataAddress] = {}
        self._found: list[Finding] = []
        self._hosts: dict[str, CheckedHost] = {}
        self._boots: dict[str, str] = {}
        self._mark = f".hetrun-{secrets.token_hex(8)}"

    def run(self) -> PreflightReport:
        with one_connection_per_host():
            self._choose()
            answers = on_all(
                [spec for spec in self._specs if spec.name in self._addresses],
                self._examine,
                progress=self._note,
                tick=self._tick,
            )
            fit = [name for name, answer in answers.items() if not isinstance(answer, HetrunError)]
            hosts = [self._hosts[name] for name in fit]
            self._found += compare(hosts, self._boots)
            pairs = self._meet([host for host in hosts if host.addr is not None])
        return PreflightReport(
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            hosts=tuple(self._hosts.get(s.name, CheckedHost(name=s.name)) for s in self._specs),
            findings=tuple(self._in_order()),
            pairs=pairs,
            echo_bytes=ECHO_BYTES if pairs else 0,
            skipped=self._skipped,
            seconds=round(time.monotonic() - self._started_s, 3),
        )

    def _choose(self) -> None:
        """Work out data addresses; a host whose own cannot be known is out."""
        all_local = all(spec.connection is Connection.LOCAL for spec in self._specs)
        for spec in self._specs:
            try:
                self._addresses[spec.name] = choose_address(spec, all_local=all_local)
            except HostError as error:
                self._fail(spec.name, error.check, error)
            except PreflightError as error:
                self._fail(spec.name, "names" if spec.data_addr else "address", error)

    def _fail(self, host: str, check: str, error: HetrunError) -> None:
        self._found.append(
            Finding(
                check=check,
                host=host,
                severity=Severity.ERROR,
                what=asking.plain(error.message),
                fix=asking.plain(error.hint or ""),
            )
        )

    # --- each host alone ------------------------------------------------------------------------------

    def _examine(self, transport: Transport) -> asking.Answer:
        config = self._config(transport.spec)
        return asking.ask(transport, _MODULE, config, timeout_s=asking.EXAMINE_S)

    def _config(self, spec: HostSpec) -> dict[str, Any]:
        wants, address = self._wants[spec.name], self._addresses[spec.name]
        names = {
            found.name: found.addr
            for found in self._addresses.values()
            if found.name is not None and found.addr is not None and not _is_number(found.name)
        }
        local = spec.connection is Connection.LOCAL
        saves = wants.saves
        return {
            "visit": "alone",
            "work_dir": spec.work_dir,
            "data_addr": address.addr,
            "data_name": address.name,
            "nic": address.nic,
            "names": names,
            "meet_ports": [secrets.choice(_PORTS) for _ in range(_PORT_TRIES)]
            if spec is self._specs[0]
            else [],
            "import": wants.import_torch,
            "device": wants.device,
            "num_devices": wants.num_devices,
            "plugins": list(wants.plugins),
            "nodes": list(wants.nodes),
            "readable": list(wants.readable),
            "log_bytes": LOG_BYTES * wants.num_ranks,
            "bundle_sha": self._bundle.sha256,
            "torch_fix": "pip install 'hetrun[local]'"
            if local
            else "set `python` of the host to the interpreter with the vendor's torch",
            "checkpoint": saves
            and {
                "dir": saves.dir,
                "bytes": saves.num_bytes,
                "mark": f"{self._mark}-{spec.name}" if self._are_marked(saves) else None,
            },
        }

    def _are_marked(self, saves: SavedState | None) -> bool:
        return saves is not None and saves.shared and len(self._specs) > 1

    def _note(self, host: str, answer: asking.Answer | HetrunError) -> None:
        seconds = round(time.monotonic() - self._started_s, 3)
        if isinstance(answer, HetrunError):
            check = answer.check if isinstance(answer, HostError) else "python"
            self._fail(host, check, answer)
            words = f"failed: {answer.message}"
        else:
            told = answer.told
            self._found += asking.findings(host, told)
            self._boots[host] = asking.text(told, "boot") or host
            mtu, free = asking.number(told, "mtu"), asking.number(told, "free_bytes")
            self._hosts[host] = CheckedHost(
                name=host,
                python=answer.python,
                torch=asking.text(told, "torch"),
                addr=_address(asking.text(told, "addr")),
                nic=asking.text(told, "nic"),
                mtu=None if mtu is None else int(mtu),
                clock_offset_s=answer.clock_offset_s,
                free_bytes=None if free is None else int(free),
                seconds=seconds,
            )
            words = f"torch {self._hosts[host].torch or 'missing'}"
        if self._progress:
            self._progress(host, asking.plain(words))

    # --- all together ---------------------------------------------------------------------------------

    def _meet(self, hosts: list[CheckedHost]) -> tuple[PairTiming, ...]:
        """Let every host call its peers on their data addresses, all at the same time."""
        saves = {name: wants.saves for name, wants in self._wants.items()}
        marked = [host.name for host in hosts if self._are_marked(saves[host.name])]
        if len(hosts) < 2 and not marked:
            return ()
        configs = _meetings(hosts, token=secrets.token_hex(32))
        for name, config in configs.items():
            where = saves[name]
            config["shared"] = (
                {
                    "dir": where.dir,
                    "own": f"{self._mark}-{name}",
                    "marks": [f"{self._mark}-{other}" for other in marked],
                }
                if name in marked and where is not None
                else None
            )
        specs = [spec for spec in self._specs if spec.name in configs]
        answers = on_all(
            specs,
            lambda transport: asking.ask(
                transport, _MODULE, configs[transport.spec.name], timeout_s=4 * PAIRS_S
            ),
            tick=self._tick,
            at_once=max(MAX_AT_ONCE, len(specs)),
        )
        timings: list[PairTiming] = []
        failed: list[tuple[str, str, str]] = []
        for name, answer in answers.items():
            if isinstance(answer, HetrunError):
                self._fail(name, "pairs", answer)
                continue
            if name in marked:
                self._check_marks(name, answer.told, marked)
            peers = [peer["name"] for peer in configs[name]["peers"]]
            _read_pairs(name, peers, answer.told, timings, failed)
        self._found += pair_findings(failed, timings)
        return tuple(timings)

    def _check_marks(self, host: str, told: Mapping[str, Any], marked: list[str]) -> None:
        said = told.get("marks")
        seen = (
            set(said) if isinstance(said, list) and all(isinstance(m, str) for m in said) else set()
        )
        missed = [name for name in marked if f"{self._mark}-{name}" not in seen]
        if missed:
            self._found.append(
                Finding(
                    check="shared",
                    host=host,
                    severity=Severity.ERROR,
                    what=f"its folder of checkpoints is not that of {', '.join(missed[:8])},"
                    " though the recipe calls it shared",
                    fix="mount one file system at checkpoint.dir on all hosts, or set checkpoint.shared: false",
                )
            )

    def _in_order(self) -> list[Finding]:
        """Findings by host and check; what was skipped is marked so; checks without a word are fine."""
        order = {spec.name: number for number, spec in enumerate(self._specs)}
        checks = {check: number for number, check in enumerate(CHECKS)}
        found = [
            replace(item, severity=Severity.SKIPPED)
            if item.check in self._skipped and item.severity is Severity.ERROR
            else item
            for item in self._found
        ]
        return sorted(found, key=lambda item: (order[item.host], checks[item.check]))


def _meetings(hosts: list[CheckedHost], *, token: str) -> dict[str, dict[str, Any]]:
    """Return what each host is told for the second visit: its own place, and its next peers in the ring."""
    ports = _distinct_ports(len(hosts))
    places = [
        {"name": host.name, "addr": host.addr, "ports": ports[number]}
        for number, host in enumerate(hosts)
    ]
    num_peers = min(len(hosts) - 1, MOST_PEERS)
    return {
        str(place["name"]): {
            "visit": "together",
            "addr": place["addr"],
            "ports": place["ports"],
            "token": token,
            "echo_bytes": ECHO_BYTES,
            "deadline_s": PAIRS_S,
            "peers": [places[(number + k) % len(places)] for k in range(1, num_peers + 1)],
        }
        for number, place in enumerate(places)
    }


def _distinct_ports(num_hosts: int) -> list[list[int]]:
    """Three ports per host that no other host of the run has: several may be one machine."""
    start = secrets.randbelow(len(_PORTS))
    return [
        [_PORTS[(start + 3 * number + k) % len(_PORTS)] for k in range(3)]
        for number in range(num_hosts)
    ]


def _read_pairs(
    host: str,
    peers: list[str],
    told: Mapping[str, Any],
    timings: list[PairTiming],
    failed: list[tuple[str, str, str]],
) -> None:
    """Sort what a host says of its peers; one of which it says nothing counts as not reached."""
    said = told.get("pairs")
    by_name = {
        item["to"]: item
        for item in (said if isinstance(said, list) else [])
        if isinstance(item, dict) and isinstance(item.get("to"), str)
    }
    listen_error = asking.text(told, "listen_error")
    for peer in peers:
        item = by_name.get(peer, {})
        latency_s, bytes_per_s = (asking.number(item, key) for key in ("latency_s", "bytes_per_s"))
        if latency_s is None or bytes_per_s is None:
            why = asking.text(item, "error") or listen_error or "no word of it"
            failed.append((host, peer, why))
        else:
            timings.append(PairTiming(a=host, b=peer, latency_s=latency_s, bytes_per_s=bytes_per_s))


def _address(text: str | None) -> str | None:
    try:
        return None if text is None else str(ipaddress.ip_address(text))
    except ValueError:
        return None


def _is_number(text: str) -> bool:
    return _address(text) is not None
