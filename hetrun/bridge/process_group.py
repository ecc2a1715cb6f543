"""The group that torch.distributed and everything above it talks to: its names, the bridge's operations.

torch 2.13 renamed some of its calls; both names are here. What is not carried raises an error that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from hetrun.bridge.caller import Caller
from hetrun.bridge.failure import BridgeError, MismatchError, NotBridgedError
from hetrun.bridge.fold import as_numbers, op_name, read_reduction
from hetrun.bridge.group import Op
from hetrun.bridge.memory import check_host, flat, flat_bytes, writer
from hetrun.bridge.p2p import check_tag
from hetrun.bridge.reduce import all_reduce, reduce, reduce_scatter
from hetrun.bridge.spread import all_to_all, barrier, broadcast, gather, scatter
from hetrun.bridge.work import BridgeWork


class BridgeProcessGroup(Caller):
    """A group of ranks on several islands."""

    # reductions

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> BridgeWork:
        """Reduce one tensor in place on all ranks."""
        opts = opts if opts is not None else c10d.AllreduceOptions()
        (tensor,) = tensors
        check_host(tensor)
        reduction = read_reduction(opts.reduceOp, tensor.dtype, self._size)
        elements = flat(tensor)
        numbers, write = as_numbers(elements), writer(tensor, elements)

        async def act(op: Op) -> None:
            await all_reduce(op, numbers, reduction.fold)
            reduction.finish(numbers)
            write()

        what = f"all_reduce {op_name(opts.reduceOp)} {tensor.dtype} [{tensor.numel()}]"
        return self._start(what, act, [tensor], opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> BridgeWork:
        """Reduce several tensors, each as `allreduce` does."""
        opts = opts if opts is not None else c10d.AllreduceOptions()
        return self._joined([self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> BridgeWork:
        """Reduce one tensor on the root; the others keep theirs."""
        (tensor,) = tensors
        check_host(tensor)
        reduction = read_reduction(opts.reduceOp, tensor.dtype, self._size)
        elements = flat(tensor)
        numbers, write = as_numbers(elements), writer(tensor, elements)
        root = self._member(opts.rootRank)

        async def act(op: Op) -> None:
            await reduce(op, numbers, reduction.fold, root=root)
            if root == self._me:
                reduction.finish(numbers)
                write()

        what = f"reduce to {root} {op_name(opts.reduceOp)} {tensor.dtype} [{tensor.numel()}]"
        return self._start(what, act, [tensor], opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> BridgeWork:
        """Reduce `source` [ranks * n], each rank gets its n."""
        opts = opts if opts is not None else c10d.ReduceScatterOptions()
        check_host(output)
        check_host(source)
        self._same_dtype("reduce_scatter", [output, source])
        if source.numel() != output.numel() * self._size:
            raise MismatchError(
                f"reduce_scatter of {source.numel()} elements into {output.numel()} on {self._size} ranks"
            )
        reduction = read_reduction(opts.reduceOp, source.dtype, self._size)
        elements = flat(output)
        into, write = as_numbers(elements), writer(output, elements)
        numbers = as_numbers(flat(source))

        async def act(op: Op) -> None:
            await reduce_scatter(op, numbers, into, reduction.fold)
            reduction.finish(into)
            write()

        what = f"reduce_scatter {op_name(opts.reduceOp)} {source.dtype} [{source.numel()}]"
        return self._start(what, act, [output], opts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], sources: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> BridgeWork:
        """As `reduce_scatter_single`, from a list of one tensor for each rank; all of one size."""
        (output,), (parts,) = outputs, sources
        for part in parts:
            check_host(part)
            if part.numel() != output.numel():
                raise NotBridgedError("reduce_scatter of lists whose tensors differ in size")
        self._same_dtype("reduce_scatter", [output, *parts])
        whole = torch.cat([flat(part) for part in parts])
        return self.reduce_scatter_single(output, whole, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], sources: Sequence[Tensor], opts: Any = None
    ) -> BridgeWork:
        """Several, each as `reduce_scatter_single` does."""
        pairs = zip(outputs, sources, strict=True)
        return self._joined([self.reduce_scatter_single(one, two, opts) for one, two in pairs])

    # copies

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> BridgeWork:
        """Copy the root's tensor to all."""
        (tensor,) = tensors
        check_host(tensor)
        data = flat_bytes(tensor)
        write = writer(tensor, data)
        root = self._member(opts.rootRank)

        async def act(op: Op) -> None:
            await broadcast(op, data, root=root)
            if root != self._me:
                write()

        what = f"broadcast from {root} {tensor.dtype} [{tensor.numel()}]"
        return self._start(what, act, [tensor], opts)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> BridgeWork:
        """Gather every rank's tensor on all; they may differ in size, as the outputs say."""
        (rows,), (source,) = outputs, inputs
        return self._all_gather(rows, source, opts, list(rows))

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> BridgeWork:
        """Gather into one tensor [ranks * n]."""
        check_host(output)
        self._same_dtype("all_gather", [output, source])
        if output.numel() != source.numel() * self._size:
            raise MismatchError(
                f"all_gather of {source.numel()} elements into {output.numel()} on {self._size} ranks"
            )
        elements = flat(output)
        rows = list(elements.view(self._size, -1)) if output.numel() else [elements] * self._size
        return self._all_gather(rows, source, opts, [output], writer(output, elements))

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> BridgeWork:
        """Several, each as `all_gather_single` does."""
        pairs = zip(outputs, inputs, strict=True)
        return self._joined([self.all_gather_single(one, two, opts) for one, two in pairs])

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> BridgeWork:
        """Gather every rank's tensor on the root."""
        (source,) = inputs
        root = self._member(opts.rootRank)
        rows = list(outputs[0]) if outputs else []
        if root == self._me and len(rows) != self._size:
            raise MismatchError(f"gather into {len(rows)} tensors on {self._size} ranks")
        for tensor in (source, *rows):
            check_host(tensor)
        into = [flat_bytes(row) for row in rows]
        data = flat_bytes(source)

        async def act(op: Op) -> None:
            await gather(op, data, into, root=root)
            for row, got in zip(rows, into, strict=True):
                writer(row, got)()

        return self._start(f"gather to {root} {source.dtype}", act, rows, opts)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> BridgeWork:
        """Give every rank its tensor of the root's list."""
        (output,) = outputs
        root = self._member(opts.rootRank)
        sources = list(inputs[0]) if inputs else []
        if root == self._me and len(sources) != self._size:
            raise MismatchError(f"scatter of {len(sources)} tensors on {self._size} ranks")
        for tensor in (output, *sources):
            check_host(tensor)
        data, into = [flat_bytes(source) for source in sources], flat_bytes(output)

        async def act(op: Op) -> None:
            await scatter(op, data, into, root=root)
            writer(output, into)()

        return self._start(f"scatter from {root} {output.dtype}", act, [output], opts)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> BridgeWork:
        """Give every rank its tensor of everybody's list."""
        if not len(outputs) == len(inputs) == self._size:
            raise MismatchError(f"all_to_all of {len(inputs)} tensors on {self._size} ranks")
        for tensor in (*outputs, *inputs):
            check_host(tensor)
        data = [flat_bytes(one) for one in inputs]
        into = [flat_bytes(one) for one in outputs]
        if data[self._me].numel() != into[self._me].numel():
            raise MismatchError("all_to_all: what this rank sends itself does not fit")

        async def act(op: Op) -> None:
            await all_to_all(op, data, into)
            for output, got in zip(outputs, into, strict=True):
                writer(output, got)()

        return self._start(f"all_to_all {inputs[0].dtype}", act, list(outputs), opts)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> BridgeWork:
        """As `alltoall`, rows of one tensor; no splits means equal ones."""
        check_host(output)
        check_host(source)
        ins, outs = self._splits(source, input_splits), self._splits(output, output_splits)
        whole = output.detach().contiguous()
        work = self.alltoall(list(whole.split(outs)), list(source.detach().split(ins)), opts)
        if whole.data_ptr() == output.data_ptr():
            return work
        return self._after(work, writer(output, whole), [output])

    # between two ranks

    def send(self, tensors: Sequence[Tensor], member: int, tag: int = 0) -> BridgeWork:
        """Send one tensor; complete when it may change again."""
        (tensor,) = tensors
        check_host(tensor)
        check_tag(tag)
        self._member(member)
        data = flat(tensor)
        work = self._p2p_work(f"send to member {member} of tag {tag}", [tensor])
        self._soon(lambda: self._p2p.send(work, data, member, tag=tag))
        return work

    def recv(self, tensors: Sequence[Tensor], member: int, tag: int = 0) -> BridgeWork:
        """Receive one tensor."""
        self._member(member)
        what = f"receive from member {member} of tag {tag}"
        return self._receive(
            tensors,
            tag,
            what,
            lambda work, into: self._p2p.receive(work, into, member, tag=tag),
        )

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> BridgeWork:
        """Receive one tensor from whoever sends first."""
        what = f"receive of tag {tag} from any member"
        return self._receive(
            tensors, tag, what, lambda work, into: self._p2p.receive_any(work, into, tag=tag)
        )

    # waiting and ending

    def barrier(self, opts: Any = None) -> BridgeWork:
        """Wait for all ranks."""
        return self._start("barrier", barrier, [], opts)

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        """Wait for all ranks.

        Raises:
            BridgeTimeoutError: some did not come; names them.
        """
        opts = c10d.BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts).wait()

    def set_timeout(self, timeout: timedelta) -> None:
        """Give later operations another limit."""
        self._timeout = timeout

    def shutdown(self) -> None:
        """Leave; the last group to leave is the world's, and takes the bridge with it."""
        self._soon(lambda: self._bridge.drop(self._group))

    def abort(self) -> None:
        """Fail what is under way, here and at all members."""
        error = BridgeError(f"rank {self._bridge.rank} aborted its group")
        self._soon(lambda: self._group.fail(error))

    def _start_coalescing(self, _device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, _device: torch.device) -> BridgeWork:
        works, self._batch = self._batch or [], None
        return self._joined(works)

    def _set_sequence_number_for_group(self) -> None:
        """Operations are numbered from the start."""

    # what is not carried

    def split_group(self, *_args: Any, **_named: Any) -> NoReturn:
        """Not carried: `new_group` makes subgroups."""
        raise NotBridgedError("the bridge has no split_group", hint="new_group makes subgroups")

    splitGroup = split_group  # noqa: N815

    def merge_remote_group(self, *_args: Any, **_named: Any) -> NoReturn:
        """Not carried."""
        raise NotBridgedError("the bridge has no merge_remote_group")

    def allgather_coalesced(self, *_args: Any, **_named: Any) -> NoReturn:
        """Not carried; torch itself gave it up."""
        raise NotBridgedError("the bridge has no all_gather_coalesced of lists")

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
