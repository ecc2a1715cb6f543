"""What the guard must know of its host: a private folder, its addresses, its torch. Needs the standard library only."""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import ipaddress
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

_SIOCGIFCONF = 0x8912
_KEPT_JOBS = 10

# Run by the job's interpreter: which torch would it import? Importing it would cost seconds.
_FIND_TORCH = """
import importlib.util, pathlib, re
spec = importlib.util.find_spec("torch")
if spec is None or not spec.origin:
    print("")
else:
    text = pathlib.Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^__version__.*?=\\s*['\\"]([^'\\"]+)", text, re.M)
    print(found.group(1) if found else "unknown")
"""


class HostFaultError(Exception):
    """Something on the host that its owner can mend."""

    def __init__(self, message: str, hint: str = "", kind: str = "preflight") -> None:
        super().__init__(message)
        self.hint = hint
        self.kind = kind


def open_base(work_dir: str | None, environ: dict[str, str]) -> Path:
    """Return our private folder: below work_dir, else the user's cache, else the temporary folder.

    Raises:
        HostFaultError: nowhere to write, or somebody else could change what we write there.
    """
    own = f"hetrun-{os.getuid()}"
    if work_dir:
        return _private(Path(work_dir) / own)
    caches = [environ.get("XDG_CACHE_HOME"), environ.get("HOME") and f"{environ['HOME']}/.cache"]
    faults = []
    for folder in (*(Path(path) / "hetrun" for path in caches if path),):
        try:
            return _private(folder)
        except HostFaultError as fault:
            faults.append(str(fault))
    try:
        return _private(Path(environ.get("TMPDIR") or "/tmp") / own)
    except HostFaultError as fault:
        raise HostFaultError("; ".join([*faults, str(fault)]), fault.hint) from fault


def _private(folder: Path) -> Path:
    hint = "set work_dir of the host to an absolute path that its user owns"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (folder, *folder.parents):
            _check_owner(path, path == folder, hint)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise HostFaultError(f"cannot write to {folder}: {error.strerror}", hint) from error
    return folder


def _check_owner(path: Path, ours: bool, hint: str) -> None:
    """Refuse a folder of ours that others may write to, and parents where others could swap it."""
    found = path.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if ours and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or mode & 0o022):
        raise HostFaultError(
            f"{path} is not a private folder of this user (owner {found.st_uid}, mode {mode:o})",
            hint,
        )
    if not ours and mode & stat.S_IWOTH and not mode & stat.S_ISVTX and stat.S_ISDIR(found.st_mode):
        raise HostFaultError(f"everybody may write to {path} (mode {mode:o})", hint)


def new_job_folder(base: Path, run_id: str) -> tuple[Path, int]:
    """Return a fresh private folder and the file descriptor of its lock, which ends with the job.

    What dead jobs left is tidied: env files (they may hold secrets) of all, and all but the newest few.
    """
    jobs = base / "jobs"
    jobs.mkdir(mode=0o700, exist_ok=True)
    old = sorted((path for path in jobs.iterdir() if path.is_dir()), key=_modified_s)
    for number, path in enumerate(reversed(old)):
        lock = _try_lock(path / "lock")
        if lock is not None:
            shutil.rmtree(path if number >= _KEPT_JOBS else path / "env", ignore_errors=True)
            os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=f"{run_id}-", dir=jobs))
    lock = _try_lock(folder / "lock")
    if lock is None:
        raise HostFaultError(f"cannot lock {folder}", "does its file system know flock?")
    return folder, lock


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _try_lock(path: Path) -> int | None:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def is_held(folder: Path) -> bool:
    """Say whether a guard, or its job's first process, holds the lock of its folder. Makes no file."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def bundle_path(base: Path, sha256: str) -> Path:
    """Where the bundle with this hash lies or will lie."""
    return base / "bundles" / f"hetrun-worker-{sha256[:16]}.zip"


def has_bundle(base: Path, sha256: str) -> bool:
    """Say whether it lies there unharmed."""
    try:
        data = bundle_path(base, sha256).read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data).hexdigest() == sha256


def keep_bundle(base: Path, sha256: str, data: bytes) -> None:
    """Store it and read it back.

    Raises:
        HostFaultError: what is there now is not what was sent.
    """
    path = bundle_path(base, sha256)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    if not has_bundle(base, sha256):
        raise HostFaultError(f"{path} does not read back as it was sent", "is the disk healthy?")


def need_readable(path: str) -> None:
    """Open a file, or look into a folder, that the job will read.

    Raises:
        HostFaultError: it is not there, or is not for this user.
    """
    try:
        if Path(path).is_dir():
            os.scandir(path).close()
            return
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        raise HostFaultError(
            f"cannot read {path}: {error.strerror}",
            "every host needs it, at this path: copy it there or put it on a shared folder",
        ) from error


def addresses() -> list[tuple[str, str]]:
    """(interface, address) of all that are up on this host, IPv4 first."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        names = array.array("B", bytes(1 << 16))
        request = struct.pack("iL", len(names), names.buffer_info()[0])
        num_bytes = struct.unpack("iL", fcntl.ioctl(sock, _SIOCGIFCONF, request))[0]
        size = 40  # of struct ifreq on 64-bit Linux: 16 bytes name, then struct sockaddr_in
        for start in range(0, num_bytes, size):
            entry = names[start : start + size].tobytes()
            name = entry[:16].split(b"\0")[0].decode().partition(":")[0]
            found.append((name, socket.inet_ntoa(entry[20:24])))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            text, _, _, scope, _, name = line.split()
            if scope != "20":  # link-local
                found.append((name, str(ipaddress.ip_address(bytes.fromhex(text)))))
    return found


def data_address(data_addr: str | None, nic: str | None, name: str | None) -> tuple[str, str]:
    """Return (numeric address, interface) for training traffic; `name` must mean that address here too.

    Raises:
        HostFaultError: the address is not one of this host, or the interface has none.
    """
    if name is not None and data_addr not in (found := _resolve(name)):
        raise HostFaultError(
            f"{name} is {data_addr} for the controller, but {', '.join(found)} on this host",
            "set `data_addr` to a number",
        )
    here = addresses()
    for interface, addr in here:
        if nic in (None, interface) and data_addr in (None, addr):
            return addr, interface
    shown = ", ".join(f"{addr} on {interface}" for interface, addr in here) or "none"
    if data_addr is None:
        raise HostFaultError(
            f"interface {nic} has no address; this host has: {shown}", "correct `nic`"
        )
    raise HostFaultError(
        f"{data_addr} is not an address of this host{f' on {nic}' if nic else ''}; it has: {shown}",
        "set `data_addr` of the host to the one that the other hosts reach it by",
    )


def _resolve(name: str) -> list[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError as error:
        raise HostFaultError(
            f"the name {name} does not resolve on this host: {error.strerror}",
            "set `data_addr` to a number",
        ) from error


def free_port(addr: str, ports: list[int]) -> int:
    """Return the first of these ports that nothing listens on.

    Raises:
        HostFaultError: all are taken; names who has them, as far as we may see.
    """
    family = socket.AF_INET6 if ":" in addr else socket.AF_INET
    for port in ports:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            try:
                sock.bind(("", port))  # torchrun's store listens on all interfaces
            except OSError:
                continue
            return port
    owners = ", ".join(f"{port} by {owner}" for port in ports if (owner := port_owner(port)))
    raise HostFaultError(
        f"ports {ports} are all taken{': ' if owners else ''}{owners}",
        "end it if it is an older run of yours, or start again: other ports are tried",
    )


def port_owner(port: int) -> str:
    """Name the process that listens on a port; empty where there is none, or it is another user's."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{words[9]}]")
    for entry in Path("/proc").iterdir() if inodes else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if any(str(fd.readlink()) in inodes for fd in (entry / "fd").iterdir()):
                    return f"{(entry / 'comm').read_text().strip()} (pid {entry.name})"
    return ""


def find_torch(env: dict[str, str], folder: Path) -> str:
    """Return the version of the torch that this interpreter would import, "" if there is none."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FIND_TORCH],
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostFaultError(
            f"{sys.executable} does not run: {error}", "correct `python`"
        ) from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise HostFaultError(
            f"{sys.executable} cannot look for torch: {said[-1] if said else done.returncode}",
            "correct `python` or `activate`",
        )
    return done.stdout.strip()


def boot_and_net() -> str:
    """Name the running kernel and network: two hosts that share it share their loopback."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return "unknown"
