"""A /bin/sh on another host through Fabric, hardened: every hop's key is checked, nothing is asked, nothing forwarded.

Where a host is was decided in `ssh_target.py`; Fabric's own defaults (accept any key, load any configuration,
unescaped `env=`) are never used.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from fabric import Config, Connection
from paramiko import (
    AuthenticationException,
    BadHostKeyException,
    Channel,
    ChannelException,
    PasswordRequiredException,
    SSHException,
)
from paramiko.config import SSHConfig

from hetrun.errors import AuthError, HostError, HostKeyError, LostContactError
from hetrun.transport import OPEN_SHELL
from hetrun.transport.ssh_keys import (
    RefuseUnknown,
    UnknownKeyError,
    fingerprint,
    known_name,
    load_known_hosts,
    where_known,
)
from hetrun.transport.ssh_socket import CONNECT_S, open_socket
from hetrun.transport.ssh_target import SshTarget, resolve_chain

if TYPE_CHECKING:
    from hetrun.model import HostSpec

log = logging.getLogger(__name__)

_MARKER = b"hetrun-ready\n"

BANNER_S = 8.0
AUTH_S = 10.0
SHELL_S = 10.0
WRITE_S = 30.0
_SLICE_S = 0.2
_MAX_NOISE = 1 << 16

_RETRIES = 5  # when sshd drops us at random before its banner (MaxStartups)
_CONNECTING_PER_HOP = 8  # below sshd's default MaxStartups of 10
_gates: defaultdict[tuple[str, int], threading.BoundedSemaphore] = defaultdict(
    lambda: threading.BoundedSemaphore(_CONNECTING_PER_HOP)
)


class SshChannel:
    """One remote /bin/sh. `noise` is what the login shell's start files printed before it."""

    def __init__(self, channel: Channel, host: str, noise: bytes) -> None:
        self._channel = channel
        self._host = host
        self.noise = noise

    def write(self, data: bytes) -> None:
        """Send bytes to its stdin; BrokenPipeError when it is gone, LostContactError when nothing moves."""
        view = memoryview(data)
        deadline_s = time.monotonic() + WRITE_S
        while view:
            try:
                sent = self._channel.send(bytes(view[: 1 << 15]))
            except TimeoutError as error:
                if time.monotonic() > deadline_s:
                    raise LostContactError(
                        f"took no input for {WRITE_S:g} s", host=self._host
                    ) from error
                continue
            if not sent:
                raise BrokenPipeError("channel closed")
            view = view[sent:]
            deadline_s = time.monotonic() + WRITE_S

    def close_stdin(self) -> None:
        """Let it see the end of its input."""
        with contextlib.suppress(OSError, SSHException, EOFError):
            self._channel.shutdown_write()

    def read_stdout(self, timeout_s: float) -> bytes:
        """Return the next bytes, b"" at the end; TimeoutError when none came in time."""
        return self._read(self._channel.recv, timeout_s)

    def read_stderr(self, timeout_s: float) -> bytes:
        """Return the next bytes, b"" at the end; TimeoutError when none came in time."""
        return self._read(self._channel.recv_stderr, timeout_s)

    def exit_code(self, timeout_s: float) -> int | None:
        """Return the exit code once it is known (-1: killed by a signal), None when it is not in time."""
        if not self._channel.status_event.wait(timeout_s):
            return None
        if self._lost():
            raise LostContactError("the connection broke", host=self._host)
        return self._channel.exit_status

    def close(self) -> None:
        """Drop the channel; sshd then closes the pipes of what runs there."""
        with contextlib.suppress(OSError, SSHException, EOFError):
            self._channel.close()

    def _lost(self) -> bool:
        transport = self._channel.get_transport()
        return not self._channel.eof_received and not transport.is_active()

    def _read(self, receive: object, timeout_s: float) -> bytes:
        # The channel's own timeout is one for all threads, so it stays at a slice and waits are counted here.
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                data: bytes = receive(1 << 16)  # type: ignore[operator]
            except TimeoutError:
                if time.monotonic() >= deadline_s:
                    raise
                continue
            if not data and self._lost():
                raise LostContactError("the connection broke", host=self._host)
            return data


class SshTransport:
    """One host behind zero or more jump hosts: one connection, one channel per shell."""

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self._lock = threading.Lock()
        self.last_target: SshTarget | None = None
        self._connections: list[Connection] = []  # first hop first; the last one is the host

    def open_shell(self) -> SshChannel:
        """Connect if needed, start /bin/sh and return once it answers."""
        with self._lock:
            if not self._connections or not self._connections[-1].is_connected:
                self._connect()
            connection = self._connections[-1]
        try:
            channel = connection.transport.open_session(timeout=AUTH_S)
            channel.settimeout(_SLICE_S)
            channel.exec_command(OPEN_SHELL)
        except (SSHException, OSError, EOFError) as error:
            raise LostContactError(
                f"no new channel on the open connection: {str(error) or type(error).__name__}",
                host=self.spec.name,
            ) from error
        return SshChannel(channel, self.spec.name, _await_marker(channel, self.spec.name))

    def close(self) -> None:
        """End all channels and the connections, the host's first."""
        connections, self._connections = self._connections, []
        for connection in reversed(connections):
            connection.client.close()

    def _connect(self) -> None:
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # it logs tracebacks we explain
        self.close()
        chain = resolve_chain(self.spec)
        with _gates[chain[0].addr, chain[0].port]:
            for attempt in range(_RETRIES + 1):
                try:
                    for target in chain:
                        self._connections.append(self._hop(target))
                    return
                except _DroppedError as error:
                    self.close()
                    if attempt == _RETRIES:
                        raise HostError(
                            f"{error.target.addr}:{error.target.port} closes the connection before "
                            f"its banner ({_RETRIES + 1} attempts)",
                            hint="sshd is over its MaxStartups limit or refuses this address",
                            host=self.spec.name,
                        ) from error
                    # Jitter, so that all who were dropped together do not come back together.
                    time.sleep(0.1 * 2**attempt * random.uniform(1.0, 2.0))
                except BaseException:
                    self.close()
                    raise

    def connect(self) -> None:
        """Connect, hop by hop; `last_target` is where it stopped."""
        with self._lock:
            self._connect()

    def _hop(self, target: SshTarget) -> Connection:
        """Connect to one sshd, through the hop before it if there is one."""
        self.last_target = target
        sock = self._socket(target)
        connection = Connection(
            host=target.key_alias or target.addr,
            user=target.user,
            port=22 if target.key_alias else target.port,  # only names the known_hosts entry
            # lazy and an empty SSHConfig: no fabric.yml, no FABRIC_ variables, no ssh_config of its own
            config=Config(lazy=True, ssh_config=SSHConfig()),
            forward_agent=False,
            connect_kwargs={
                "sock": sock,
                "timeout": BANNER_S + CONNECT_S,  # banner and key exchange
                "banner_timeout": BANNER_S,
                "auth_timeout": AUTH_S,
                "allow_agent": target.use_agent,
                "look_for_keys": False,
                "key_filename": [str(path) for path in target.identities],
            },
        )
        revoked = load_known_hosts(connection.client, target)
        connection.client.set_missing_host_key_policy(RefuseUnknown(revoked))
        started_s = time.monotonic()
        try:
            connection.open()
        except (SSHException, OSError, EOFError) as error:
            connection.client.close()
            sock.close()
            raise self._explain(error, target, time.monotonic() - started_s) from error
        connection.transport.set_keepalive(3)
        return connection

    def _socket(self, target: SshTarget) -> socket.socket | Channel:
        if not self._connections:
            return open_socket(target, self.spec.name)
        before = self._connections[-1]
        try:
            channel: Channel = before.transport.open_channel(
                "direct-tcpip", (target.addr, target.port), ("", 0), timeout=AUTH_S
            )
        except (SSHException, OSError, EOFError) as error:
            text = error.text if isinstance(error, ChannelException) else str(error)
            raise HostError(
                f"{before.host} (jump host) cannot reach {target.addr}:{target.port}: {text}",
                hint=f"from there try: {target.ssh_command}",
                host=self.spec.name,
            ) from error
        return channel

    def _explain(self, error: Exception, target: SshTarget, seconds: float) -> Exception:
        """Turn what paramiko raised into what the user should know."""
        who = "" if target.name == self.spec.name else f"{target.name}: "
        where = f"{target.addr}:{target.port}"
        kind: type[HostError] = HostError
        if isinstance(error, UnknownKeyError) and (error.known or error.is_revoked):
            kind = HostKeyError
            known = ", ".join(map(fingerprint, error.known))
            what = "is REVOKED:" if error.is_revoked else f"has CHANGED: known is {known}, got"
            message = (
                f"host key of {where} {what} {fingerprint(error.key)}; someone may be in between"
            )
            hint = (
                "only if the host was set up anew: "
                f"ssh-keygen -R '{known_name(target)}'{where_known(target)}"
            )
        elif isinstance(error, UnknownKeyError):
            kind = HostKeyError
            message = f"host key of {where} is not known: {fingerprint(error.key)}"
            hint = (
                "compare it with `ssh-keygen -lf` on the host's own /etc/ssh/ssh_host_*_key.pub, "
                "then pin it with: hetrun hosts trust INVENTORY"
            )
        elif isinstance(error, BadHostKeyException):
            kind = HostKeyError
            message = (
                f"host key of {where} has CHANGED: known is {fingerprint(error.expected_key)}, "
                f"got {fingerprint(error.key)}; someone may be in between"
            )
            hint = (
                "only if the host was set up anew: "
                f"ssh-keygen -R '{known_name(target)}'{where_known(target)}"
            )
        elif isinstance(error, PasswordRequiredException):
            kind = AuthError
            message = f"a key file for {target.user}@{where} needs its passphrase"
            hint = f"ssh-add {target.identities[0] if target.identities else ''}".strip()
        elif "timeout" in str(error).lower() and isinstance(error, AuthenticationException):
            kind = AuthError
            message = f"{where} did not decide on the key within {AUTH_S:g} s"
            hint = "its login is slow (directory service, home on a dead share)"
        elif isinstance(error, AuthenticationException) or "No authentication" in str(error):
            kind = AuthError
            message = f"{where} refused the key of {target.user}"
            hint = f"try: {target.ssh_command.replace('ssh', 'ssh -o BatchMode=yes', 1)} true"
        elif seconds >= BANNER_S - 0.5:
            message = f"{where} accepts connections but sent no SSH banner within {seconds:.0f} s"
            hint = "is it sshd that listens there, and is the host overloaded?"
        elif "banner" in str(error) or isinstance(error, (EOFError, ConnectionResetError)):
            return _DroppedError(target)
        else:
            message = f"no SSH session with {where}: {str(error) or type(error).__name__}"
            hint = f"try: {target.ssh_command}"
        return kind(who + message, hint=hint, host=self.spec.name)


class _DroppedError(Exception):
    """The sshd closed the connection before its banner, as it does above MaxStartups."""

    def __init__(self, target: SshTarget) -> None:
        super().__init__("dropped")
        self.target = target


def _await_marker(channel: Channel, host: str) -> bytes:
    """Wait until /bin/sh is there; return what start files printed before."""
    noise = b""
    deadline_s = time.monotonic() + SHELL_S
    while _MARKER not in noise:
        try:
            part = channel.recv(1)  # one byte, or output that belongs to the caller would be lost
        except TimeoutError as error:
            if time.monotonic() < deadline_s:
                continue
            channel.close()
            raise HostError(
                f"the login shell did not start /bin/sh within {SHELL_S:g} s{_said(noise)}",
                hint="a start file (.bashrc, .cshrc, ...) waits for input or for a dead file system",
                host=host,
            ) from error
        noise += part
        if not part or len(noise) > _MAX_NOISE:
            channel.close()
            raise HostError(
                f"the login shell ended before it started /bin/sh{_said(noise)}",
                hint="the account may not be allowed to run commands; look at its shell in passwd",
                host=host,
            )
    noise = noise[: -len(_MARKER)]
    if noise:
        log.info("%s: start files of the login shell print %d bytes", host, len(noise))
    return noise


def _said(noise: bytes) -> str:
    lines = noise.decode(errors="replace").strip().splitlines()
    return f"; it said {lines[-1][:200]!r}" if lines else ""
