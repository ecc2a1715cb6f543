"""How calls of torch.distributed become operations of the bridge: the part that all of them share.

Which calls there are is in `process_group.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetrun.bridge.bridge import Bridge
from hetrun.bridge.failure import BridgeError, MismatchError
from hetrun.bridge.group import Group, Op
from hetrun.bridge.memory import check_host, flat, flat_bytes, writer
from hetrun.bridge.p2p import PointToPoint, check_tag
from hetrun.bridge.spread import all_gather
from hetrun.bridge.work import BridgeWork, joined

Act = Callable[[Op], Coroutine[Any, Any, None]]
_LONGEST_PRINT = 300


class Caller(dist.ProcessGroup):
    """A group of ranks on several islands, as torch holds it."""

    def __init__(self, bridge: Bridge, group: Group, *, timeout: timedelta) -> None:
        super().__init__(group.layout.me, len(group.layout.ranks))
        self._bridge = bridge
        self._group = group
        self._timeout = timeout
        self._p2p = PointToPoint(group)
        self._size = len(group.layout.ranks)
        self._me = group.layout.me
        self._names = {"name": "", "desc": "undefined"}
        self._batch: list[BridgeWork] | None = None

    # names, as torch asks for them

    def getBackendName(self) -> str:  # noqa: N802 - torch's names, here and below
        """What `get_backend` says in C++."""
        return "het"

    def name(self) -> str:
        """As `getBackendName`."""
        return "het"

    def getGroupName(self) -> str:  # noqa: N802
        """The name torch gave the group."""
        return self._names["name"]

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name torch gives."""
        self._names["name"] = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description its user gave."""
        return self._names["desc"]

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Take a description."""
        self._names["desc"] = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    # what all operations share

    def _start(self, what: str, act: Act, results: Sequence[Any], opts: Any) -> BridgeWork:
        """Begin a collective; `what` says all that must be the same on all ranks."""
        limit = getattr(opts, "timeout", None)
        timeout = limit if limit is not None and limit > timedelta(0) else self._timeout
        work = BridgeWork(what, results, self._bridge.callbacks)
        said = what.encode()
        if len(said) > _LONGEST_PRINT:
            said = said[:_LONGEST_PRINT] + hashlib.sha256(said).hexdigest()[:16].encode()
        op = Op(self._group, what, said, work, timeout.total_seconds())
        self._soon(lambda: self._group.start(op, act))
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _soon(self, call: Callable[[], None]) -> None:
        """Call something on the bridge's loop; calls of one thread keep their order.

        Raises:
            BridgeError: the bridge has ended.
        """
        try:
            self._bridge.thread.loop.call_soon_threadsafe(call)
        except RuntimeError as error:
            raise BridgeError("the bridge has ended: its world was destroyed") from error

    def _joined(self, works: Sequence[BridgeWork]) -> BridgeWork:
        return joined(works, "several operations", self._bridge.callbacks)

    def _after(
        self, work: BridgeWork, write: Callable[[], None], results: Sequence[Any]
    ) -> BridgeWork:
        """Return a work that is over when something was written after another one."""
        whole = BridgeWork(work.what, results, self._bridge.callbacks)

        def go_on() -> None:
            if work.is_success():
                write()
            whole.finish(work.exception(), source=work.source)

        work.when_done(go_on)
        return whole

    def _all_gather(
        self,
        rows: Sequence[Tensor],
        source: Tensor,
        opts: Any,
        results: Sequence[Any],
        write: Callable[[], None] | None = None,
    ) -> BridgeWork:
        for tensor in (source, *rows):
            check_host(tensor)
        if len(rows) != self._size or rows[self._me].numel() != source.numel():
            raise MismatchError(
                f"all_gather of {source.numel()} elements into tensors of"
                f" {[row.numel() for row in rows]} on {self._size} ranks"
            )
        self._same_dtype("all_gather", [source, *rows])
        into = [flat_bytes(row) for row in rows]
        data = flat_bytes(source)

        async def act(op: Op) -> None:
            await all_gather(op, data, into)
            for row, got in zip(rows, into, strict=True):
                writer(row, got)()
            if write is not None:
                write()

        sizes = [row.numel() for row in rows]
        return self._start(f"all_gather {source.dtype} {sizes}", act, results, opts)

    def _receive(
        self,
        tensors: Sequence[Tensor],
        tag: int,
        what: str,
        post: Callable[[BridgeWork, Tensor], None],
    ) -> BridgeWork:
        (tensor,) = tensors
        check_host(tensor)
        check_tag(tag)
        into = flat(tensor)
        work = self._p2p_work(what, [tensor])
        self._soon(lambda: post(work, into))
        if into.data_ptr() == tensor.data_ptr():
            return work
        whole = self._after(work, writer(tensor, into), [tensor])
        whole.be_patient_for(self._timeout.total_seconds(), self._impatient)
        return whole

    def _p2p_work(self, what: str, results: Sequence[Any]) -> BridgeWork:
        work = BridgeWork(what, results, self._bridge.callbacks)
        work.be_patient_for(self._timeout.total_seconds(), self._impatient)
        return work

    def _impatient(self, error: BridgeError) -> None:
        self._soon(lambda: self._group.fail(error))

    def _member(self, number: int) -> int:
        if not 0 <= number < self._size:
            raise MismatchError(f"member {number} of a group of {self._size}")
        return number

    def _same_dtype(self, what: str, tensors: Sequence[Tensor]) -> None:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise MismatchError(f"{what} of tensors of {', '.join(sorted(map(str, dtypes)))}")

    def _splits(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Rows for each member.

        Raises:
            MismatchError: they do not make up the tensor.
        """
        length = tensor.shape[0] if tensor.dim() else 0
        if not splits:
            if length % self._size:
                raise MismatchError(f"all_to_all of {length} rows on {self._size} ranks")
            return [length // self._size] * self._size
        if len(splits) != self._size or sum(splits) != length:
            raise MismatchError(f"all_to_all of {length} rows split into {list(splits)}")
        return list(splits)
