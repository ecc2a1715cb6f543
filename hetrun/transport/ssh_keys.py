"""Keys of hosts: which are known, where they stand, how a new one is pinned. Checking one is left to paramiko, in `ssh.py`.

Besides the user's and the system's known_hosts there is a file of hetrun's own, which `hetrun hosts trust` writes.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NoReturn

from paramiko import MissingHostKeyPolicy, PKey, SSHClient, SSHException
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

from hetrun.errors import StorageError
from hetrun.transport.ssh_target import SshTarget

log = logging.getLogger(__name__)


class UnknownKeyError(SSHException):
    """A host shows a key that is not known; `known` are those that are, of other kinds."""

    def __init__(self, key: PKey, known: Sequence[PKey] = (), *, is_revoked: bool = False) -> None:
        super().__init__("unknown host key")
        self.key = key
        self.known = tuple(known)
        self.is_revoked = is_revoked


class RefuseUnknown(MissingHostKeyPolicy):
    """Like paramiko's RejectPolicy, but keeps the key so that the message can show its fingerprint."""

    def __init__(self, revoked: Set[str]) -> None:
        self._revoked = revoked

    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> NoReturn:
        """Refuse."""
        # paramiko asks for a known kind first, so a host that shows another one does not have the known key
        found = client.get_host_keys().lookup(hostname)
        known: list[PKey] = [] if found is None else list(found.values())
        raise UnknownKeyError(key, known, is_revoked=key.get_base64() in self._revoked)


def pin(target: SshTarget, key: PKey, path: Path) -> None:
    """Add a key to a file of known hosts, whole or not at all; the file is the user's alone.

    Raises:
        StorageError: it cannot be written.
    """
    line = f"{known_name(target)} {key.get_name()} {key.get_base64()}\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old and not old.endswith("\n"):
            old += "\n"
        descriptor, name = tempfile.mkstemp(prefix=".known_hosts.", dir=path.parent)  # mode 0600
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(old + line)
        Path(name).replace(path)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror}", hint="set XDG_CONFIG_HOME, or its owner"
        ) from error


def load_known_hosts(client: SSHClient, target: SshTarget) -> frozenset[str]:
    """Load all files, later ones first in rank; return keys marked @revoked, which are left out wherever they stand."""
    lines: list[str] = []
    for path in target.known_hosts:
        try:
            lines += path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("%s: cannot read %s: %s", target.name, path, error.strerror)
    revoked = {word for line in lines if line.startswith("@revoked") for word in line.split()[2:4]}
    keys = client.get_host_keys()
    for line in lines:
        entry = _entry(line)
        if entry is not None and entry.key.get_base64() not in revoked:
            for name in entry.hostnames or []:
                keys.add(name, entry.key.get_name(), entry.key)
    return frozenset(revoked)


def _entry(line: str) -> HostKeyEntry | None:
    if not line.strip() or line.startswith(("#", "@")):
        return None
    try:
        return HostKeyEntry.from_line(line)
    except (InvalidHostKey, SSHException):
        log.warning("not a host key: %s", line[:60])
        return None


def known_name(target: SshTarget) -> str:
    """Return the name under which known_hosts lists a host."""
    if target.key_alias:
        return target.key_alias
    return target.addr if target.port == 22 else f"[{target.addr}]:{target.port}"


def where_known(target: SshTarget) -> str:
    """Say in which file the old key stands, as an argument of ssh-keygen."""
    name = known_name(target)
    for path in reversed(target.known_hosts):
        with contextlib.suppress(OSError):
            if name in path.read_text(errors="replace"):
                return f" -f {path}"
    return ""


def fingerprint(key: PKey) -> str:
    """Return kind and SHA256 fingerprint of a key, as ssh-keygen -l shows them."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name()} SHA256:{digest}"
