"""First process of a job on a host: starts the agent, watches its ranks, ends everything it can see.

It is pid 1 of a PID namespace where that is allowed, else a child subreaper. Its parent talks to the controller
(`guard.py`); when that dies, this dies with all below it. Needs the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from hetrun.transport.guard_proc import descendants, oom_kills, processes, stat_fields

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.1
_STUCK_S = 5.0  # for SIGKILL to work; longer is a process that hangs in a driver
_ORPHANED_GRACE_S = 1.0  # nobody listens any more

NAMESPACE, USER_NAMESPACE, SUBREAPER = "pid namespace", "user and pid namespace", "subreaper"


def modes(euid: int, allow_user_namespace: bool) -> list[str]:
    """Ways to hold a job together, best first; user namespaces only where no device driver is involved."""
    own = [NAMESPACE] if euid == 0 else []
    return [*own, *([USER_NAMESPACE] if allow_user_namespace else []), SUBREAPER]


@dataclass(frozen=True)
class Agent:
    """What to start: torchrun, or one module. `num_ranks` children of it carry a LOCAL_RANK."""

    argv: list[str]
    env: dict[str, str]
    folder: str
    num_ranks: int = 0


class Job:
    """The parent's end: orders go down one pipe, reports come up another, one JSON object a line."""

    def __init__(self, mode: str, agent: Agent) -> None:
        self.mode = mode
        down_r, self._down = os.pipe()
        self.reports, up_w = os.pipe()
        self._rest = b""
        parent = os.getpid()
        os.set_blocking(self._down, False)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._down)
            os.close(self.reports)
            _child(mode, parent, _Init(mode, down_r, up_w), agent)
        os.close(down_r)
        os.close(up_w)

    def order(self, **what: object) -> None:
        """Send an order; one that comes too late is no error, nor is a first process that is stopped and reads none."""
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._down, json.dumps(what).encode() + b"\n")

    def read(self) -> list[dict[str, object]] | None:
        """Return the reports that are there now; None when no more can come."""
        data = os.read(self.reports, 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self, timeout_s: float) -> bool:
        """Let it end (an order that never comes means stop) and say whether it did in time."""
        with contextlib.suppress(OSError):
            os.close(self._down)
        deadline_s = time.monotonic() + timeout_s
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline_s:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return False
            time.sleep(0.01)
        return True


def _child(mode: str, parent: int, init: _Init, agent: Agent) -> None:
    """Become the namespace's founder, or the init itself; never returns."""
    try:
        os.setsid()  # who signals the guard's process group means the guard
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)  # the controller's pipes must close when the guard dies, not when we do
        os.dup2(null, 1)
        if mode == SUBREAPER:
            adopt_orphans()
        else:
            _found_namespace(mode, parent)
            pid = os.fork()
            if pid:
                init.leave()
                _, status = os.waitpid(pid, 0)
                os._exit(0 if status == 0 else 1)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _mount_proc()
        init.run(agent)
    except OSError as error:
        init.report(t="refused", why=f"{error.strerror} ({error.filename or 'unshare'})")
    finally:
        os._exit(1)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(rc: int, what: str) -> None:
    if rc:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


def _prctl(option: int, value: int) -> None:
    _check(_libc().prctl(option, value, 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _found_namespace(mode: str, parent: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    flags = _CLONE_NEWPID | _CLONE_NEWNS
    _check(_libc().unshare(flags | (_CLONE_NEWUSER if mode == USER_NAMESPACE else 0)), "unshare")
    if mode == USER_NAMESPACE:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _mount_proc() -> None:
    """Give the namespace its own /proc, or `/proc/<getpid()>` would be a foreign process."""
    libc = _libc()
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "make / private")
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _check(libc.mount(b"proc", b"/proc", b"proc", flags, None), "mount /proc")


class _Init:
    """The process that all others of the job descend from."""

    def __init__(self, mode: str, orders: int, reports: int) -> None:
        self._mode = mode
        self._orders = orders
        self._reports = reports
        self._rest = b""
        self._agent = 0
        self._agent_ended = False
        self._ranks: dict[int, int] = {}  # pid -> local rank, of those that are alive
        self._seen: set[int] = set()
        self._num_ranks = 0
        self._pidfds: dict[int, int] = {}  # file descriptor -> pid
        self._oom_kills = oom_kills()
        self._kill_at_s: float | None = None  # set once we are stopping
        self._stuck_at_s = 0.0
        self._deserted_at_s = float("inf")  # when a guard that says nothing counts as gone

    def leave(self) -> None:
        """Close the pipes in a process that only waits."""
        os.close(self._orders)
        os.close(self._reports)

    def report(self, **what: object) -> None:
        """Send one report; the guard may be gone."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._reports, json.dumps(what).encode() + b"\n")

    def run(self, agent: Agent) -> None:
        """Start the agent and stay until nothing is left; ends the process."""
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_w, False)
        signal.set_wakeup_fd(wake_w)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._num_ranks = agent.num_ranks
        self._agent = _start(agent)
        self.report(t="up", mode=self._mode, pid=self._agent)
        try:
            while True:
                watched = [wake_r, self._orders, *self._pidfds]
                ready, _, _ = select.select([fd for fd in watched if fd >= 0], [], [], _POLL_S)
                if wake_r in ready:
                    os.read(wake_r, 4096)
                if self._orders in ready:
                    self._obey()
                self._watch_ranks(ready)
                self._reap()
                if time.monotonic() > self._deserted_at_s and self._kill_at_s is None:
                    self._stop(_ORPHANED_GRACE_S)
                if self._kill_at_s is not None and self._sweep():
                    os._exit(0)
        finally:  # a bug here must not leave a job behind: pid 1 takes all along, a subreaper does not
            for pid in self._members():
                _kill(pid, signal.SIGKILL)

    def _obey(self) -> None:
        data = os.read(self._orders, 1 << 16)
        if not data:
            os.close(self._orders)
            self._orders = -1
            self._stop(_ORPHANED_GRACE_S)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order["t"] == "alive":
                self._deserted_at_s = time.monotonic() + order["for_s"]
            elif order["t"] == "states":
                self.report(t="states", states=self._states())
            elif order["t"] == "signal":
                for pid in list(self._ranks):
                    _kill(pid, order["number"])
            else:
                self._stop(order["grace_s"])

    def _stop(self, grace_s: float) -> None:
        """Ask everything to end; a second call may only shorten the grace."""
        kill_at_s = time.monotonic() + grace_s
        if self._kill_at_s is None:
            for pid in self._members():
                _kill(pid, signal.SIGTERM)
                _kill(pid, signal.SIGCONT)  # a stopped process does not see SIGTERM
        self._kill_at_s = min(kill_at_s, self._kill_at_s or kill_at_s)
        self._stuck_at_s = self._kill_at_s + _STUCK_S

    def _sweep(self) -> bool:
        """Say whether nothing is left; kill the rest once the grace is over."""
        left = self._members()
        now_s = time.monotonic()
        if not left and self._agent_ended:
            self.report(t="empty", left=[])
            return True
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            for pid in left:
                _kill(pid, signal.SIGKILL)
        elif left == [self._agent] and not self._ranks:
            # Its ranks are gone; torchrun itself may take seconds to say goodbye.
            self._kill_at_s = min(self._kill_at_s or now_s, now_s + 0.5)
        if now_s >= self._stuck_at_s:
            self.report(t="empty", left=left)
            return True
        return False

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._agent:
                self._watch_ranks([])
                self._agent_ended = True
                self.report(t="agent", status=status, wall_s=time.time())
                if self._kill_at_s is None:
                    self._stop(_ORPHANED_GRACE_S)

    def _watch_ranks(self, ready: list[int]) -> None:
        """Find the agent's ranks, and report at once how each ends.

        The exit status is read from the zombie, before the agent collects it.
        """
        if len(self._seen) < self._num_ranks and not self._agent_ended:
            for pid, parent, _ in processes():
                if parent == self._agent and pid not in self._seen:
                    self._adopt(pid)
        for pid in list(self._ranks):
            fd = next((fd for fd, watched in self._pidfds.items() if watched == pid), None)
            if fd is None or fd in ready:
                self._look_at(pid, fd)

    def _adopt(self, pid: int) -> None:
        try:
            items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            environ = dict(item.partition(b"=")[::2] for item in items)
            local_rank = int(environ[b"LOCAL_RANK"])
        except (OSError, KeyError, ValueError):
            return  # not a rank, or forked but not yet executing
        self._seen.add(pid)
        self._ranks[pid] = local_rank
        with contextlib.suppress(
            OSError, AttributeError
        ):  # Linux before 5.3: looked at 10 times a second
            self._pidfds[os.pidfd_open(pid)] = pid

    def _look_at(self, pid: int, fd: int | None) -> None:
        now_s = time.time()
        fields = stat_fields(pid)
        if fields is not None and fields[0] not in "ZX":
            return
        status = int(fields[49]) if fields and len(fields) > 49 else None
        local_rank = self._ranks.pop(pid)
        if fd is not None:
            os.close(fd)
            del self._pidfds[fd]
        oom = status is not None and status & 0x7F == signal.SIGKILL and self._more_oom_kills()
        self.report(t="rank", local_rank=local_rank, status=status, wall_s=now_s, oom=oom)

    def _more_oom_kills(self) -> bool:
        before, self._oom_kills = self._oom_kills, oom_kills()
        return self._oom_kills > before

    def _states(self) -> dict[str, str]:
        """Kernel's state letter of each rank: T is stopped, D hangs in a driver."""
        found = {}
        for pid, local_rank in self._ranks.items():
            fields = stat_fields(pid)
            found[str(local_rank)] = fields[0] if fields else "?"
        return found

    def _members(self) -> list[int]:
        """Processes of the job that still run."""
        own = os.getpid()
        if self._mode == SUBREAPER:
            return descendants(own)
        return [pid for pid, _, state in processes() if pid != own and state not in "ZX"]


def _start(agent: Agent) -> int:
    """Fork and execute the agent; its output goes to a file, its core dumps nowhere."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (
            signal.SIGCHLD,
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGPIPE,
        ):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        os.chdir(agent.folder)
        log = os.open("agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            os.execve(agent.argv[0], agent.argv, agent.env)
        except OSError as error:
            os.write(2, f"cannot start {agent.argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
