"""All ranks agree, or all stop with the same words, before the first collective.

Agreement goes through the key-value store, which works whatever the ranks disagree about. What has to be
equal is said in `loop.py`.
"""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta

import torch.distributed as dist

from hetrun.errors import JobError

_TELL_TIMEOUT = timedelta(seconds=10)


class DisagreementError(JobError):
    """Two ranks hold different things that must be equal."""


class Agreement:
    """Compares values between ranks: the first to come states a value, the others compare."""

    def __init__(self, store: dist.Store, *, rank: int, host: str, world_size: int) -> None:
        self._store = dist.PrefixStore("hetrun/agreement", store)
        self._rank = rank
        self._host = host
        self._world_size = world_size

    def check(self, what: str, value: str, *, hint: str) -> None:
        """Compare one value; a difference is noted for all ranks and raised by `conclude`."""
        mine = json.dumps({"value": value, "rank": self._rank, "host": self._host})
        stated = json.loads(self._store.compare_set(f"value/{what}", "", mine))
        if stated["value"] != value:
            words = (
                f"{what} differs: rank {stated['rank']} on {stated['host']} has {stated['value'][:16]},"
                f" rank {self._rank} on {self._host} has {value[:16]}"
            )
            self._store.set("difference", json.dumps({"words": words, "hint": hint}))

    def conclude(self, timeout: timedelta) -> None:
        """Wait until every rank has compared everything.

        Raises:
            DisagreementError: some ranks differ; every rank raises it.
            JobError: some rank did not come in time.
        """
        self._count("arrived")
        try:
            self._store.wait(["all arrived"], timeout)
        except RuntimeError as error:  # DistStoreError is one
            arrived = self._store.add("arrived", 0)
            raise JobError(
                f"{arrived} of {self._world_size} ranks came within {timeout.total_seconds():.0f} s",
                hint="look at the logs of the ranks that did not start",
            ) from error
        if not self._store.check(["difference"]):
            return
        difference = json.loads(self._store.get("difference"))
        self._count("told")
        if self._rank == 0:  # the store may live in this process: stay until all have read
            with contextlib.suppress(RuntimeError):  # one is gone; the difference is the news
                self._store.wait(["all told"], _TELL_TIMEOUT)
        raise DisagreementError(difference["words"], hint=difference["hint"])

    def _count(self, what: str) -> None:
        """Count this rank; the last one lets the others go on."""
        if self._store.add(what, 1) == self._world_size:
            self._store.set(f"all {what}", "1")
