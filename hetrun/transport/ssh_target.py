"""Where a host really is: the user's ssh configuration, overridden by the inventory. Connecting is left to `ssh.py`."""

from __future__ import annotations

import getpass
import logging
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetrun.errors import HostError
from hetrun.model import HostSpec, SshHop

log = logging.getLogger(__name__)

_MAX_HOPS = 5
_SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
_USER_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_USER_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")

SshConfig = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """One sshd on the way: how to get there and which keys count."""

    name: str  # as the inventory calls it
    addr: str
    port: int
    user: str
    key_alias: str | None  # name under which known_hosts lists it, if not its address
    identities: tuple[Path, ...]
    known_hosts: tuple[Path, ...]
    use_agent: bool

    @property
    def ssh_command(self) -> str:
        """The ssh call that a person would type to see the same error."""
        port = "" if self.port == 22 else f" -p {self.port}"
        return f"ssh{port} {self.user}@{self.addr}"


def parse_ssh_config(text: str) -> dict[str, list[str]]:
    """Read what `ssh -G` prints: lower-case keyword, blank, value; some keywords stand there repeatedly."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        keyword, _, value = line.strip().partition(" ")
        if value:
            found.setdefault(keyword.lower(), []).append(value)
    return found


def read_ssh_config(name: str, port: int | None, user: str | None) -> SshConfig:
    """Ask the OpenSSH client what its configuration says about a host; no connection is made.

    Raises:
        HostError: the configuration is broken or slow.
    """
    argv = ["ssh", "-G"]
    argv += ["-p", str(port)] if port else []
    argv += ["-l", user] if user else []
    try:
        done = subprocess.run(
            [*argv, "--", name], stdin=subprocess.DEVNULL, capture_output=True, timeout=10
        )
    except FileNotFoundError:
        log.warning("%s: no OpenSSH client here, so the ssh configuration is not read", name)
        return {}
    except subprocess.TimeoutExpired as error:
        raise HostError(
            "`ssh -G` did not answer within 10 s",
            hint="a `Match exec` in the ssh configuration hangs",
            host=name,
        ) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise HostError(
            f"the ssh configuration is refused: {said[-1] if said else done.returncode}",
            hint=f"try: ssh -G {name}",
            host=name,
        )
    return parse_ssh_config(done.stdout.decode(errors="replace"))


def resolve_chain(
    spec: HostSpec, read: Callable[[str, int | None, str | None], SshConfig] = read_ssh_config
) -> tuple[SshTarget, ...]:
    """Return the jump hosts, in order, and the host itself."""
    addr = spec.addr or spec.name
    config = read(addr, spec.port, spec.user)
    pins = (spec.known_hosts,) if spec.known_hosts else ()
    own = SshHop(
        addr=addr, port=spec.port or _number(config, "port"), user=spec.user, identity=spec.identity
    )
    target = _target(spec.name, own, config, pins)
    hops = list(spec.jump) or _proxy_jump(config, spec.name)
    chain: list[SshTarget] = []
    while hops:
        if len(chain) + len(hops) > _MAX_HOPS:
            raise HostError(
                f"more than {_MAX_HOPS} jump hosts",
                hint="do two Host entries of the ssh configuration jump over each other?",
                host=spec.name,
            )
        *before, last = hops  # the last hop is next to what is known already
        config = read(last.addr, None if last.port == 22 else last.port, last.user)
        if last.port == 22:
            last = SshHop(
                addr=last.addr,
                port=_number(config, "port"),
                user=last.user,
                identity=last.identity,
            )
        chain.insert(0, _target(f"jump host {last.addr}", last, config, pins))
        hops = before or _proxy_jump(config, spec.name)
    return (*chain, target)


def pin_file() -> Path:
    """Where `hetrun hosts trust` keeps the keys that a person accepted."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    folder = Path(config) if config.startswith("/") else Path.home() / ".config"
    return folder / "hetrun" / "known_hosts"


def _target(name: str, hop: SshHop, config: SshConfig, pins: tuple[str, ...]) -> SshTarget:
    proxy = _first(config, "proxycommand")
    if proxy and proxy != "none":
        raise HostError(
            "its ssh configuration uses ProxyCommand, which hetrun does not run",
            hint="use ProxyJump there, or `jump:` in the inventory",
            host=name,
        )
    if hop.identity and not Path(hop.identity).expanduser().is_file():
        raise HostError(
            f"no key file {hop.identity}", hint="correct `identity` in the inventory", host=name
        )
    keys = (hop.identity,) if hop.identity else tuple(config.get("identityfile", _USER_KEYS))
    return SshTarget(
        name=name,
        addr=_first(config, "hostname") or hop.addr,
        port=hop.port,
        user=hop.user or _first(config, "user") or getpass.getuser(),
        key_alias=_first(config, "hostkeyalias"),
        identities=tuple(path for key in keys if (path := Path(key).expanduser()).is_file()),
        known_hosts=tuple(
            Path(path).expanduser() for path in (*_known_hosts(config), str(pin_file()), *pins)
        ),
        use_agent=_first(config, "identitiesonly") != "yes",
    )


def _known_hosts(config: SshConfig) -> list[str]:
    files: list[str] = []
    for keyword, usual in (
        ("globalknownhostsfile", _SYSTEM_KNOWN_HOSTS),
        ("userknownhostsfile", _USER_KNOWN_HOSTS),
    ):
        said = _first(config, keyword)
        files += said.split() if said else usual
    return [path for path in files if path != "none"]


def _proxy_jump(config: SshConfig, host: str) -> list[SshHop]:
    """Read `[user@]host[:port],...`."""
    said = _first(config, "proxyjump")
    if not said or said == "none":
        return []
    hops = []
    for part in said.split(","):
        user, _, where = part.removeprefix("ssh://").rpartition("@")
        addr, port = where, ""
        if where.startswith("["):
            addr, _, port = where[1:].partition("]")
        elif where.count(":") == 1:
            addr, _, port = where.partition(":")
        try:
            number = int(port.strip(":") or 22)
            hops.append(SshHop(addr=addr, port=number, user=user or None))
        except ValueError as error:
            raise HostError(
                f"ProxyJump {said!r} in the ssh configuration: {error}", host=host
            ) from error
    return hops


def _first(config: SshConfig, keyword: str) -> str | None:
    values = config.get(keyword)
    return values[0] if values else None


def _number(config: SshConfig, keyword: str) -> int:
    return int(_first(config, keyword) or 22)
