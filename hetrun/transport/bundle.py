"""The worker side of hetrun as one zip, the same bytes for the same code. Shipping it is left to `jobs.py`."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import hetrun

# What runs on a host: standard library and torch only. A folder means all Python files below it.
WORKER_SIDE = (
    "__init__.py",
    "errors.py",
    "greeting.py",
    "arch",
    "model",
    "schedule",
    "runtime",
    "bridge",
)
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A zip for PYTHONPATH; its name carries its hash."""

    name: str
    sha256: str
    data: bytes


def build_bundle(extra: Mapping[str, bytes] | None = None) -> Bundle:
    """Pack the worker side, and further files by path (which may not replace ours)."""
    files = dict(_worker_files())
    for path, data in (extra or {}).items():
        if path in files:
            raise ValueError(f"bundle: {path} stands there twice")
        files[path] = data
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(files):
            entry = zipfile.ZipInfo(path, date_time=_FIXED_TIME)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[path])
    data = buffer.getvalue()
    sha256 = hashlib.sha256(data).hexdigest()
    return Bundle(f"hetrun-worker-{sha256[:16]}.zip", sha256, data)


def _worker_files() -> dict[str, bytes]:
    root = Path(hetrun.__file__).parent
    files: dict[str, bytes] = {}
    for name in WORKER_SIDE:
        entry = root / name
        paths = sorted(entry.rglob("*.py")) if entry.is_dir() else [entry]
        for path in paths:
            if path.is_file():
                files[f"hetrun/{path.relative_to(root).as_posix()}"] = path.read_bytes()
    return files


def guard_sources() -> list[tuple[str, str]]:
    """(module name, source) of the guard, in the order of their imports."""
    names = (
        "guard_frames",
        "guard_host",
        "guard_proc",
        "guard_logs",
        "guard_progress",
        "guard_sweep",
        "guard_init",
        "guard",
    )
    folder = Path(__file__).parent
    return [
        (f"hetrun.transport.{name}", (folder / f"{name}.py").read_text(encoding="utf-8"))
        for name in names
    ]
