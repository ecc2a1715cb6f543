"""Hands a run to one of its hosts, where hetrun is installed: from then on nothing of it depends on this machine.

What that host then does is `hetrun launch --detach`, with its own keys and its own list of known hosts. Here stays a
folder that says so; commands about the run are passed on.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import hetrun
from hetrun.errors import ConfigError, HetrunError, PreflightError, StorageError
from hetrun.model import Connection, Facts, HostSpec, Moved, Plan, Profile, SshHop
from hetrun.store import dumps, load, save
from hetrun.transport.connect import open_transport
from hetrun.transport.script import Listeners, run_script

_START_S = 120.0  # its launch waits a minute for its controller
_NO_HETRUN, _OTHER_HETRUN = 127, 126

_FOLLOW_S = 30 * 86400.0
_MAX_WORDS = 1 << 20
_FOLDER = re.compile(r"runs/[A-Za-z0-9][A-Za-z0-9._-]{0,120}")
RECORD = "moved.json"

# Finds hetrun there. What is called with $clear set outlives the script, which ends all that has its mark.
_CALL = """
umask 077
cd || exit
clear=
call() {{
  if command -v hetrun >/dev/null 2>&1; then $clear hetrun "$@"; else $clear {python} -m hetrun "$@"; fi
}}
"""
# The files lie in $folder, which goes as soon as the controller there has read them.
_LAUNCH = """
said=$(call --version 2>&1) || {{ printf '%s\\n' "$said" | tail -n 1 >&2; exit {no_hetrun}; }}
[ "$said" = {version} ] || {{ printf '%s\\n' "$said" >&2; exit {other_hetrun}; }}
folder=$(mktemp -d) || exit
trap 'rm -rf -- "$folder"' EXIT
{files}
clear="env -u HETRUN_SCRIPT"
call launch "$folder/plan.json" --detach {arguments}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What a controller needs; facts and profile where the recipe wants lost hosts to be left out."""

    plan: Plan
    facts: Facts | None = None
    profile: Profile | None = None


def seen_from(spec: HostSpec, head: HostSpec) -> HostSpec:
    """Return how a host is reached from `head`, which is one of them: key files and lists of known hosts are its own.

    Raises:
        ConfigError: the host is this machine, which `head` cannot reach.
    """
    if spec.connection is Connection.LOCAL:
        raise ConfigError(
            f"{spec.name} is this machine and takes part in the run: it cannot be left alone",
            hint="leave out --on, or give it an address in the inventory and plan again",
        )
    if spec.name == head.name:
        where = spec.data_addr if spec.data_addr or spec.nic else spec.addr or spec.name
        return replace(
            spec, connection=Connection.LOCAL, addr=None, port=None, user=None,
            identity=None, known_hosts=None, jump=(), data_addr=where,
        )  # fmt: skip
    jump: list[SshHop] = []
    for hop in spec.jump:
        jump = [] if hop.addr == head.addr else [*jump, replace(hop, identity=None)]
    return replace(spec, identity=None, known_hosts=None, jump=tuple(jump))


def from_there(parcel: Parcel, host: str) -> Parcel:
    """Return the parcel as it is on this host of the plan.

    Raises:
        ConfigError: the plan has no such host, or has this machine.
    """
    head = _head(parcel.plan, host)
    plan = replace(parcel.plan, hosts=tuple(seen_from(spec, head) for spec in parcel.plan.hosts))
    if parcel.facts is None:
        return replace(parcel, plan=plan)
    hosts = tuple(replace(each, spec=seen_from(each.spec, head)) for each in parcel.facts.hosts)
    return replace(parcel, plan=plan, facts=replace(parcel.facts, hosts=hosts))


def _head(plan: Plan, host: str) -> HostSpec:
    for spec in plan.hosts:
        if spec.name == host:
            return spec
    names = ", ".join(spec.name for spec in plan.hosts)
    raise ConfigError(f"--on {host}: the plan has no such host", hint=f"it has {names}")


def start_there(
    parcel: Parcel, host: str, *, hidden: Mapping[str, str], args: Sequence[str]
) -> tuple[str, str, int]:
    """Start the run on a host of its plan; return its folder there ("" where it did not begin), what was said, and the exit code of `launch`.

    `hidden` are values of secrets, which travel over stdin into the environment of the controller there; `args` are
    further arguments of `launch`. Paths are those of that host, below its user's home.

    Raises:
        ConfigError: as `from_there`.
        HostError: it cannot be reached.
        PreflightError: hetrun is not installed there, or another version of it; or its answer makes no sense.
    """
    script = _script(from_there(parcel, host), hidden, args)
    transport = open_transport(_head(parcel.plan, host))
    try:
        result = run_script(transport, script, timeout_s=_START_S, max_bytes=_MAX_WORDS)
    finally:
        transport.close()
    said = result.stderr.decode(errors="replace").strip()
    if result.rc in (_NO_HETRUN, _OTHER_HETRUN):
        raise _unfit(host, result.rc, said)
    if result.rc:
        return "", said, result.rc
    folder = (result.stdout.decode(errors="replace").splitlines() or [""])[-1]
    if not _FOLDER.fullmatch(folder):
        raise PreflightError(f"it says {folder[:80]!r}, need the run's folder", host=host)
    return folder, said, 0


def _unfit(host: str, rc: int, said: str) -> HetrunError:
    last = said.splitlines()[-1] if said else "no word"
    if rc == _NO_HETRUN:
        what = f"hetrun is not there to control the run: {last}"
    else:
        what = f"it has {last}, this is hetrun {hetrun.__version__}"
    return PreflightError(
        what,
        hint="install the same hetrun there, on PATH or for its `python`; it needs keys for the other hosts, too",
        host=host,
    )


def note_moved(run_root: Path, plan: Plan, host: str, folder: str) -> Path:
    """Leave a folder of the run here, of the same name, and return it.

    Raises:
        StorageError: it cannot be written.
    """
    path = run_root / PurePosixPath(folder).name
    try:
        path.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise StorageError(f"cannot write to {path}: {error.strerror}") from error
    save(plan, path / "plan.json")
    save(Moved(host=host, folder=folder), path / RECORD)
    return path


def moved(run_dir: Path) -> Moved | None:
    """Return where a run went; None where it is controlled from here."""
    return load(Moved, run_dir / RECORD) if (run_dir / RECORD).is_file() else None


def pass_on(run_dir: Path, where: Moved, args: Sequence[str], listeners: Listeners) -> int:
    """Call hetrun about a run on the host that controls it, and return its exit code; what it prints comes line by line.

    Raises:
        HostError: the host cannot be reached.
        LostContactError: the link went down meanwhile; the run goes on.
    """
    spec = _head(load(Plan, run_dir / "plan.json"), where.host)
    verb, *rest = args
    call = shlex.join(["call", verb, where.folder, *rest])
    transport = open_transport(spec)
    try:
        script = _CALL.format(python=shlex.quote(spec.python)) + call
        return run_script(transport, script, timeout_s=_FOLLOW_S, listeners=listeners).rc
    finally:
        transport.close()


def _script(parcel: Parcel, hidden: Mapping[str, str], args: Sequence[str]) -> str:
    """Return the text that /bin/sh gets; all data is quoted once."""
    spec = next(spec for spec in parcel.plan.hosts if spec.connection is Connection.LOCAL)
    nouns = {"plan": parcel.plan, "facts": parcel.facts, "profile": parcel.profile}
    texts = {name: dumps(noun) for name, noun in nouns.items() if noun is not None}
    files = [
        f'printf %s {shlex.quote(text)} >"$folder/{name}.json"' for name, text in texts.items()
    ]
    sources = [f'--{name} "$folder/{name}.json"' for name in texts if name != "plan"]
    exports = [f"{name}={shlex.quote(value)}; export {name}" for name, value in hidden.items()]
    return _CALL.format(python=shlex.quote(spec.python)) + _LAUNCH.format(
        no_hetrun=_NO_HETRUN,
        other_hetrun=_OTHER_HETRUN,
        version=shlex.quote(f"hetrun {hetrun.__version__}"),
        files="\n".join([*files, *exports]),
        arguments=" ".join([*sources, shlex.join(args)]),
    )
