"""Runs on each host before anything is started there: looks, changes nothing that it does not take away again.

Standard library only; sent as source after `guard_host.py`, under the job's own interpreter. What hosts say about
each other is compared on the controller, in `compare.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hetrun.preflight.onhost_tools import (
    IMPORT,
    addresses_of,
    command_of,
    in_time,
    name_of,
    open_paths,
)
from hetrun.transport.guard_host import (
    HostFaultError,
    boot_and_net,
    bundle_path,
    data_address,
    find_torch,
    free_port,
    has_bundle,
    is_held,
    need_readable,
    open_base,
)

MIN_OPEN_FILES = 4096
MIN_INODES = 10_000
SLOW_LOOKUP_S = 1.0
_LOOKUP_S = 4.0
_IMPORT_S = 45.0
_MOST_HOLDERS = 16
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000


class Examination:
    """One host: findings, and what the controller compares between hosts."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.findings: list[dict[str, str]] = []
        self.told: dict[str, Any] = {"python": sys.executable, "boot": boot_and_net()}
        self.base: Path | None = None

    def say(self, check: str, severity: str, what: str, fix: str = "") -> None:
        """Note one finding."""
        self.findings.append({"check": check, "severity": severity, "what": what, "fix": fix})

    def run(self) -> dict[str, Any]:
        """Do all checks; one that breaks is a warning of its own and stops no other."""
        slow = [
            threading.Thread(target=self._guarded, args=pair, daemon=True)
            for pair in (
                ("names", self.names),
                ("reverse-dns", self.reverse_dns),
                ("torch", self.torch),
            )
        ]
        for thread in slow:
            thread.start()
        for check, look in (
            ("folder", self.folder),
            ("readable", self.readable),
            ("open-files", self.open_files),
            ("path", self.path),
            ("address", self.address),
            ("port", self.port),
            ("namespace", self.namespace),
            ("busy", self.busy),
            ("sshd", self.sshd),
            ("checkpoint", self.checkpoint),
        ):
            self._guarded(check, look)
        for thread in slow:
            thread.join(_IMPORT_S + 5.0)
        return {"findings": list(self.findings), **self.told}

    def _guarded(self, check: str, look: Callable[[], None]) -> None:
        try:
            look()
        except HostFaultError as fault:
            self.say(check, "error", str(fault), fault.hint)
        except Exception as error:  # noqa: BLE001  a check of ours that breaks must not end the others
            self.say(check, "warning", f"could not be checked: {type(error).__name__}: {error}")

    def folder(self) -> None:
        """A private folder, room in it, worker code that lies there, other runs."""
        self.base = open_base(self.config["work_dir"], dict(os.environ))
        self._room("disk", self.base, self.config["log_bytes"], "logs of ranks")
        sha256 = self.config["bundle_sha"]
        if bundle_path(self.base, sha256).exists() and not has_bundle(self.base, sha256):
            self.say("bundle", "note", "worker code there is damaged and will be sent again")
        jobs = self.base / "jobs"
        alive = [path for path in jobs.iterdir() if is_held(path)] if jobs.is_dir() else []
        if alive:
            names = ", ".join(sorted(path.name for path in alive)[:5])
            self.say(
                "leftovers",
                "warning",
                f"{len(alive)} other run(s) of this user still hold their folders: {names}",
                "wait for them, or end them where they were started; they share this host's devices",
            )

    def _room(self, check: str, folder: Path, wanted: int, what: str) -> None:
        found = os.statvfs(folder)
        free = found.f_bavail * found.f_frsize
        if check == "disk":
            self.told["free_bytes"] = free
        if free < wanted:
            self.say(
                "disk",
                "error",
                f"{free >> 20} MiB free at {folder}, {what} may take {wanted >> 20} MiB",
                "free some space, or set work_dir (logs) or checkpoint.dir to a larger disk",
            )
        if found.f_files and found.f_favail < MIN_INODES:
            self.say(
                "inodes",
                "warning",
                f"the file system at {folder} can take {found.f_favail} more files",
                "remove small files there",
            )

    def readable(self) -> None:
        """Texts and weights."""
        for path in self.config["readable"]:
            need_readable(path)

    def open_files(self) -> None:
        """Soft limit of open files; every rank has sockets to many others."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
            self.say(
                "open-files",
                "warning",
                f"a process may open {soft} files (hard limit {hard}), large jobs need {MIN_OPEN_FILES}",
                "raise nofile in /etc/security/limits.conf, and log in anew",
            )

    def path(self) -> None:
        """Folders on PATH where others could put a program that we would run."""
        for entry in os.environ.get("PATH", os.defpath).split(os.pathsep):
            if not entry.startswith("/"):
                self.say(
                    "path",
                    "warning",
                    f"PATH holds {entry or '(nothing)'!r}: programs of the current folder are run",
                    "take it out of PATH in the start files of the login shell",
                )
                continue
            with contextlib.suppress(OSError):
                found = Path(entry).stat()
                if found.st_mode & stat.S_IWOTH or found.st_uid not in (0, os.getuid()):
                    self.say(
                        "path",
                        "warning",
                        f"others may put programs into {entry}, which is on PATH",
                        f"chmod o-w {entry}, or take it out of PATH",
                    )

    def address(self) -> None:
        """The data address is ours, its interface is up."""
        config = self.config
        if not (config["data_addr"] or config["nic"]):
            return
        addr, nic = data_address(config["data_addr"], config["nic"], config["data_name"])
        self.told.update(addr=addr, nic=nic)
        folder = Path("/sys/class/net") / nic
        with contextlib.suppress(OSError, ValueError):
            self.told["mtu"] = int((folder / "mtu").read_text())
        with contextlib.suppress(OSError):
            state = (folder / "operstate").read_text().strip()
            if state in ("down", "lowerlayerdown", "notpresent"):
                self.say("address", "error", f"interface {nic} is {state}", f"ip link set {nic} up")

    def port(self) -> None:
        """A port to meet at; asked of the first host only."""
        if self.config["meet_ports"]:
            free_port(self.config["data_addr"] or "0.0.0.0", self.config["meet_ports"])

    def names(self) -> None:
        """Names of data addresses mean the same here as on the controller."""
        for name, wanted in self.config["names"].items():
            started_s = time.monotonic()
            found = in_time(partial(addresses_of, name), _LOOKUP_S)
            took_s = time.monotonic() - started_s
            if found is None:
                self._slow("names", f"looking up {name}", took_s)
            elif found and wanted not in found:
                self.say(
                    "names",
                    "error",
                    f"{name} is {', '.join(found)} here and {wanted} for the controller",
                    "set `data_addr` to a number, or mend /etc/hosts or DNS",
                )
            elif took_s > SLOW_LOOKUP_S:
                self._slow("names", f"looking up {name}", took_s)

    def reverse_dns(self) -> None:
        """Torch asks for the name behind each connection, one after the other."""
        addr = self.config["data_addr"]
        if not addr:
            return
        started_s = time.monotonic()
        in_time(partial(name_of, addr), _LOOKUP_S)
        took_s = time.monotonic() - started_s
        if took_s > SLOW_LOOKUP_S:
            self._slow("reverse-dns", f"the name behind {addr}", took_s)

    def _slow(self, check: str, what: str, took_s: float) -> None:
        self.say(
            check,
            "warning",
            f"{what} takes {took_s:.1f} s or more",
            "put the hosts into /etc/hosts, or mend resolv.conf; each connection waits so long",
        )

    def torch(self) -> None:
        """Which torch; where a device wants more than that, torch and its plug-in are imported."""
        config = self.config
        version = find_torch(dict(os.environ), Path("/"))
        if not version:
            self.say(
                "torch",
                "error",
                f"no torch under {sys.executable}",
                config["torch_fix"],
            )
            return
        self.told["torch"] = version
        if not config["import"]:
            return
        argv = [sys.executable, "-c", IMPORT, config["device"] or "", *config["plugins"]]
        try:
            done = subprocess.run(
                argv,
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_IMPORT_S,
            )
        except subprocess.TimeoutExpired:
            self.say(
                "plugin",
                "error",
                f"torch and {', '.join(config['plugins']) or 'no plug-in'} were not imported within {_IMPORT_S:g} s",
                "try it there by hand; a wedged driver or a dead file system does that",
            )
            return
        words = next(
            (line.split() for line in done.stdout.splitlines() if line.startswith("hetrun-import")),
            None,
        )
        if words is None:
            said = done.stderr.strip().splitlines()
            self.say(
                "plugin",
                "error",
                f"cannot import: {said[-1] if said else f'exit code {done.returncode}'}",
                "check `activate` and `python` of the host; the vendor's set_env script may be missing",
            )
            return
        self.told["torch"] = words[1]
        count, wanted = int(words[2]), int(config["num_devices"])
        if 0 <= count < wanted:
            self.say(
                "devices",
                "error",
                f"torch sees {count} {config['device']} devices, the plan uses number {wanted - 1}",
                "probe and plan again; a device may have dropped off the bus",
            )

    def namespace(self) -> None:
        """Whether one kill can end a whole job."""
        flags = _CLONE_NEWPID | _CLONE_NEWNS
        if os.geteuid() != 0:
            flags |= _CLONE_NEWUSER
        pid = os.fork()
        if pid == 0:
            os._exit(0 if ctypes.CDLL(None).unshare(flags) == 0 else 1)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            self.say(
                "namespace",
                "note",
                "no PID namespace here: ends of jobs are found by searching their processes instead",
                "kernel.unprivileged_userns_clone=1, or a container with SYS_ADMIN, allows one",
            )

    def busy(self) -> None:
        """Processes that hold a device; those of other users are seen by root only."""
        nodes = {
            str(path)
            for pattern in self.config["nodes"]
            for path in Path("/").glob(pattern.lstrip("/"))
        }
        if not nodes:
            return
        holders: list[str] = []
        for pid in (entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            held = sorted(nodes & open_paths(pid))
            if held:
                holders.append(f"{command_of(pid)} (pid {pid}) holds {held[0]}")
        if holders:
            more = f", and {len(holders) - _MOST_HOLDERS} more" if holders[_MOST_HOLDERS:] else ""
            self.say(
                "busy",
                "warning",
                "; ".join(holders[:_MOST_HOLDERS]) + more,
                "end it if it is yours; hetrun ends nothing that it did not start",
            )

    def sshd(self) -> None:
        """What the configuration says, where we may read it."""
        with contextlib.suppress(OSError):
            for line in Path("/etc/ssh/sshd_config").read_text(errors="replace").splitlines():
                words = line.split()
                if len(words) == 2 and words[0].lower() == "maxsessions" and words[1] in "012":
                    self.say(
                        "sshd",
                        "warning",
                        f"MaxSessions {words[1]}: hetrun opens two channels at once",
                        "set MaxSessions 10 in sshd_config",
                    )

    def checkpoint(self) -> None:
        """The folder can be written and has room; leaves a mark where it is to be one for all hosts."""
        wanted = self.config["checkpoint"]
        if wanted is None:
            return
        folder = Path(wanted["dir"])
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            self.say(
                "checkpoint",
                "error",
                f"cannot write to {folder} ({there} is not ours to write)",
                "correct checkpoint.dir in the recipe, or its owner on the host",
            )
            return
        self._room("checkpoint", there, wanted["bytes"], "checkpoints")
        if wanted["mark"]:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / wanted["mark"]).write_bytes(b"")
