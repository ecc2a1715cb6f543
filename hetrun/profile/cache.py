"""Figures of devices, kept on the controller from one profile to the next. Links are measured anew each time.

A kept figure counts only for the same device model, driver, torch, number of threads, shape of the recipe and
hetrun (its version and the very code that measures), measured with the same haste.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hetrun
from hetrun import store
from hetrun.errors import HetrunError
from hetrun.model import Device, DeviceProfile, HostFacts
from hetrun.profile.samples import kind_of

log = logging.getLogger(__name__)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return where the user's figures are kept: below XDG_CACHE_HOME or ~/.cache."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "hetrun" / "figures"


@dataclass(frozen=True, slots=True)
class Cache:
    """Files of one folder; `code` is the hash of the code that measures."""

    folder: Path
    code: str

    def key(self, host: HostFacts, device: Device, shape: Mapping[str, Any]) -> str:
        """Return the file name for a device and what is asked of it."""
        what = {
            "kind": kind_of(device),
            "driver": device.driver,
            "torch": host.torch_version,
            "python": host.python_version,
            "num_cores": host.num_cores,
            "num_threads": device.num_threads,
            "shape": dict(shape),
            "hetrun": hetrun.__version__,
            "code": self.code,
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]

    def get(self, key: str) -> DeviceProfile | None:
        """Return what is kept, None where nothing is or it cannot be read."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            return store.load(DeviceProfile, path)
        except HetrunError as error:
            log.warning("measured anew, since the kept figures are damaged: %s", error)
            return None

    def put(self, key: str, figures: DeviceProfile) -> None:
        """Keep figures; where that cannot be, the next profile measures again."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            store.save(figures, self._path(key))
        except (HetrunError, OSError) as error:
            log.warning("the figures of %s are not kept: %s", figures.model, error)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
