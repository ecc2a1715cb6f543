"""Communicators of an island's own library, made below torch.distributed's list of groups.

They are nobody's process group: names and numbers of the user's groups stay as they were.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetrun.bridge.failure import NotBridgedError


class Library:
    """Makes communicators of one library in this process; those of gloo share a device and its thread."""

    def __init__(self, name: str, addr: str) -> None:
        """`addr` is where gloo listens.

        Raises:
            NotBridgedError: this torch has no such backend, or one that the bridge cannot make.
        """
        self.name = name
        self._gloo_device: Any = None
        self._plugin: Any = None
        if name == "gloo":
            self._gloo_device = dist.ProcessGroupGloo.create_device(hostname=addr)
        else:
            self._plugin = dist.Backend._plugins.get(name.upper())  # noqa: SLF001 - there is no other list
            if self._plugin is None:
                raise NotBridgedError(f"torch {torch.__version__} has no backend plug-in {name!r}")

    def communicator(self, store: dist.Store, *, rank: int, size: int, timeout: timedelta) -> Any:
        """Make one among `size` processes that meet in `store`; all of them call this."""
        if self._gloo_device is not None:
            options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - gloo has no public ones
            options._devices = [self._gloo_device]  # noqa: SLF001
            options._threads = 1  # noqa: SLF001 - calls come one after the other
            options._timeout = timeout  # noqa: SLF001
            return dist.ProcessGroupGloo(store, rank, size, options)
        if not self._plugin.extended_api:
            return self._plugin.creator_fn(store, rank, size, timeout)
        settings = dist.distributed_c10d._DistributedBackendOptions()  # noqa: SLF001
        settings.store, settings.timeout = store, timeout
        settings.group_rank, settings.group_size = rank, size
        return self._plugin.creator_fn(settings, None)

    def group(
        self, store: dist.Store, *, rank: int, size: int, timeout: timedelta
    ) -> dist.ProcessGroup:
        """Make a process group that is the library's own and nothing else; all its members call this."""
        backend = self.communicator(store, rank=rank, size=size, timeout=timeout)
        if isinstance(backend, dist.ProcessGroup):
            return backend
        group = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType
        kind = kind.GLOO if self._gloo_device is not None else kind.CUSTOM
        group._set_default_backend(kind)  # noqa: SLF001
        group._register_backend(torch.device("cpu"), kind, backend)  # noqa: SLF001
        return group
