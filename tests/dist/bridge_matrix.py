"""Every operation on given data, against what one process computes in fp64."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hetrun.bridge.memory import byte_view

# torch 2.13 renamed them, and warns of the old names
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
FOLDS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NUMBERS = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)
MOVED = (*NUMBERS, torch.float8_e4m3fn)
_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


def values(rank: int, shape: Sequence[int], dtype: torch.dtype, *, salt: int = 0) -> Tensor:
    """What a rank brings: small numbers, different everywhere."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    whole = torch.randint(1, 4, tuple(shape), generator=generator)
    if not dtype.is_floating_point and not dtype.is_complex:
        return whole.to(dtype)
    part = torch.rand(tuple(shape), generator=generator)
    if dtype.is_complex:
        return torch.complex(whole.float(), part).to(dtype)
    return (whole + part).to(torch.float32).to(dtype)


def is_same(got: Tensor, want: Tensor) -> bool:
    """Whether all bits are those that were brought."""
    if got.shape != want.shape or got.dtype is not want.dtype:
        return False
    return torch.equal(
        got.contiguous().view(-1).view(torch.uint8), want.contiguous().view(-1).view(torch.uint8)
    )


def is_near(got: Tensor, want: Tensor) -> bool:
    """Whether a result is the fp64 one, as far as its dtype can tell."""
    if got.dtype in _TOLERANCE:
        limit = _TOLERANCE[got.dtype]
        wide = want.dtype
        return bool(torch.allclose(got.to(wide), want, rtol=limit, atol=limit))
    return bool(torch.equal(got, want.to(got.dtype)))


def allowed(fold: str, dtype: torch.dtype) -> bool:
    """Whether such a reduction exists."""
    if fold == "AVG":
        return dtype.is_floating_point or dtype.is_complex
    if dtype.is_complex:
        return fold == "SUM"
    return not (fold.startswith("B") and dtype.is_floating_point)


def folded(terms: Sequence[Tensor], fold: str) -> Tensor:
    """Reduce in fp64 (complex128, or exact integers)."""
    dtype = terms[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if dtype is torch.bool:
        stack = torch.stack(list(terms)).long()
        if fold == "BXOR":
            return stack.sum(0) % 2 == 1
        return (stack.amin(0) if fold in ("PRODUCT", "MIN", "BAND") else stack.amax(0)) == 1
    if fold.startswith("B"):
        total = terms[0].clone()
        for term in terms[1:]:
            total = {"BAND": total & term, "BOR": total | term, "BXOR": total ^ term}[fold]
        return total
    stack = torch.stack(list(terms)).to(wide if dtype in _TOLERANCE else torch.int64)
    if fold in ("SUM", "AVG"):
        return stack.sum(0) / (len(terms) if fold == "AVG" else 1)
    return {"MIN": torch.amin, "MAX": torch.amax, "PRODUCT": torch.prod}[fold](stack, 0)


class Matrix:
    """All operations of one rank in one group; keeps what was wrong."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
        """`ranks` are the members in order."""
        self.group = group
        self.ranks = ranks
        self.me = dist.get_rank(group)
        self.is_bridge = type(group or dist.group.WORLD) is not dist.ProcessGroup
        self.size = len(ranks)
        self.wrong: list[str] = []
        self.num_checks = 0
        self.bits = hashlib.sha256()  # of what has to be the same on all ranks

    def check(self, good: bool, *what: object) -> None:
        """Note a result."""
        self.num_checks += 1
        if not good:
            self.wrong.append(" ".join(map(str, what)))

    def brought(self, shape: Sequence[int], dtype: torch.dtype, *, salt: int = 0) -> list[Tensor]:
        """What each member brings."""
        return [values(member, shape, dtype, salt=salt) for member in range(self.size)]

    def all_reduce(self, count: int, dtype: torch.dtype, fold: str) -> None:
        terms = self.brought([count], dtype)
        got = terms[self.me].clone()
        dist.all_reduce(got, getattr(dist.ReduceOp, fold), group=self.group)
        self.check(is_near(got, folded(terms, fold)), "all_reduce", fold, dtype, count)
        self.bits.update(byte_view(got))

    def reduce(self, count: int, dtype: torch.dtype, fold: str, root: int) -> None:
        terms = self.brought([count], dtype)
        got = terms[self.me].clone()
        dist.reduce(got, group_dst=root, op=getattr(dist.ReduceOp, fold), group=self.group)
        if self.me == root:
            self.check(is_near(got, folded(terms, fold)), "reduce", fold, dtype, count, root)
        else:
            self.check(is_same(got, terms[self.me]), "reduce changed a copy", dtype, count, root)

    def reduce_scatter(self, count: int, dtype: torch.dtype, fold: str, *, as_list: bool) -> None:
        terms = self.brought([self.size, count], dtype)
        want = folded(terms, fold)[self.me]
        got = torch.zeros(count, dtype=dtype)
        op = getattr(dist.ReduceOp, fold)
        if as_list:
            dist.reduce_scatter(got, list(terms[self.me]), op=op, group=self.group)
        else:
            scatter_single(got, terms[self.me].view(-1), op=op, group=self.group)
        self.check(is_near(got, want), "reduce_scatter", fold, dtype, count, as_list)

    def broadcast(self, count: int, dtype: torch.dtype, root: int) -> None:
        terms = self.brought([count], dtype)
        got = terms[self.me].clone()
        dist.broadcast(got, group_src=root, group=self.group)
        self.check(is_same(got, terms[root]), "broadcast", dtype, count, root)

    def all_gather(self, count: int, dtype: torch.dtype) -> None:
        terms = self.brought([count], dtype)
        whole = torch.zeros(self.size * count, dtype=dtype)
        gather_single(whole, terms[self.me], group=self.group)
        self.check(is_same(whole, torch.cat([*terms])), "all_gather_into_tensor", dtype, count)
        uneven = [values(member, [count + member * 7], dtype) for member in range(self.size)]
        rows = [torch.zeros_like(row) for row in uneven]
        dist.all_gather(rows, uneven[self.me], group=self.group)
        self.check(all(map(is_same, rows, uneven)), "all_gather uneven", dtype, count)

    def gather_and_scatter(self, count: int, dtype: torch.dtype, root: int) -> None:
        terms = self.brought([count], dtype)
        rows = [torch.zeros_like(term) for term in terms] if self.me == root else None
        dist.gather(terms[self.me], rows, group_dst=root, group=self.group)
        self.check(rows is None or all(map(is_same, rows, terms)), "gather", dtype, count, root)
        got = torch.zeros_like(terms[0])
        dist.scatter(got, terms if self.me == root else None, group_src=root, group=self.group)
        self.check(is_same(got, terms[self.me]), "scatter", dtype, count, root)

    def all_to_all(self, count: int, dtype: torch.dtype) -> None:
        terms = self.brought([self.size, count], dtype)
        got = torch.zeros(self.size * count, dtype=dtype)
        dist.all_to_all_single(got, terms[self.me].view(-1), group=self.group)
        want = torch.cat([term[self.me] for term in terms])
        self.check(is_same(got, want), "all_to_all_single", dtype, count)
        splits = [
            [(source + 2 * sink) % 3 + count // 5 for sink in range(self.size)]
            for source in range(self.size)
        ]
        sent = [values(source, [sum(splits[source]), 2], dtype) for source in range(self.size)]
        outs = [splits[source][self.me] for source in range(self.size)]
        got = torch.zeros(sum(outs), 2, dtype=dtype)
        dist.all_to_all_single(got, sent[self.me], outs, splits[self.me], group=self.group)
        parts = [one.split(splits[source])[self.me] for source, one in enumerate(sent)]
        self.check(is_same(got, torch.cat(parts)), "all_to_all_single uneven", dtype, count)
        rows = [torch.zeros_like(part) for part in parts]
        dist.all_to_all(rows, list(sent[self.me].split(splits[self.me])), group=self.group)
        self.check(all(map(is_same, rows, parts)), "all_to_all", dtype, count)

    def send_and_receive(self, count: int, dtype: torch.dtype) -> None:
        """Around the ring in both directions, receives first and sends first; then in one batch."""
        terms = self.brought([count], dtype)
        after, before = (self.me + 1) % self.size, (self.me - 1) % self.size
        for receives_first in (True, False):
            one, two = torch.zeros_like(terms[0]), torch.zeros_like(terms[0])
            receives = [(one, before, 1), (two, after, 2)]
            sends = [(after, 1), (before, 2)]
            works = []
            for turn in (True, False):
                if turn is receives_first:
                    works += [
                        dist.irecv(room, group_src=peer, group=self.group, tag=tag)
                        for room, peer, tag in receives
                    ]
                else:
                    works += [
                        dist.isend(terms[self.me], group_dst=peer, group=self.group, tag=tag)
                        for peer, tag in sends
                    ]
            for work in works[::-1]:
                work.wait()
            good = is_same(one, terms[before]) and is_same(two, terms[after])
            self.check(good, "isend, irecv", dtype, count, receives_first)
        got = torch.zeros_like(terms[0])
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, terms[self.me], group=self.group, group_peer=after),
                dist.P2POp(dist.irecv, got, group=self.group, group_peer=before),
            ]
        ):
            work.wait()
        self.check(is_same(got, terms[before]), "batch_isend_irecv", dtype, count)

    def receive_from_any(self, count: int) -> None:
        if self.me:
            dist.send(torch.full((count,), self.me), group_dst=0, group=self.group, tag=count)
            return
        senders = []
        for _ in range(self.size - 1):
            got = torch.zeros(count, dtype=torch.int64)
            sender = dist.recv(got, group=self.group, tag=count)
            senders.append(sender)
            self.check(self.ranks[int(got[0])] == sender, "receive from any", count)
        self.check(sorted(senders) == sorted(self.ranks[1:]), "senders", senders)

    def layouts(self, count: int) -> None:
        """Memory that is not simply one block after the other."""
        plain = [values(member, [count, 6], torch.float32) for member in range(self.size)]
        total = folded(plain, "SUM")
        mine = plain[self.me]
        transposed = mine.t().contiguous().t()
        wide = torch.zeros(count, 12)
        wide[:, ::2] = mine
        shifted = torch.cat([torch.zeros(1, 6), mine])
        tensors = {"transposed": transposed, "every second": wide[:, ::2], "offset": shifted[1:]}
        for name, tensor in tensors.items():
            copy = tensor.clone(memory_format=torch.preserve_format)
            for what, got in (("all_reduce", tensor), ("parameter", copy.requires_grad_())):
                dist.all_reduce(got, group=self.group)
                self.check(is_near(got.detach(), total), what, name, count)
        self.check(float(wide[:, 1::2].abs().sum()) == 0, "wrote between the elements")
        self.check(float(shifted[0].abs().sum()) == 0, "wrote before the elements")
        block = torch.zeros(self.size, count * 6)
        block[self.me] = mine.reshape(-1)
        gather_single(block.view(-1), block[self.me], group=self.group)
        self.check(
            is_same(block, torch.stack(plain).view(self.size, -1)), "all_gather in place", count
        )
        columns = torch.zeros(count * 6, self.size).t()
        dist.all_gather(list(columns), mine.reshape(-1), group=self.group)
        self.check(is_same(columns, block), "all_gather into columns", count)
        point = torch.tensor(float(self.me + 1))
        dist.all_reduce(point, group=self.group)
        self.check(float(point) == self.size * (self.size + 1) / 2, "0-dim")
        received = torch.zeros(6, count).t()
        if self.me == 0:
            dist.send(mine.t().contiguous().t(), group_dst=1, group=self.group)
        elif self.me == 1:
            dist.recv(received, group_src=0, group=self.group)
            self.check(is_same(received, plain[0]), "receive into transposed", count)

    def objects(self) -> None:
        """What DCP and many scripts use."""
        got: list[object] = [None] * self.size
        dist.all_gather_object(
            got, {"rank": self.me, "text": "x" * (self.me * 70_000)}, group=self.group
        )
        want = [{"rank": member, "text": "x" * (member * 70_000)} for member in range(self.size)]
        self.check(got == want, "all_gather_object")
        said = [want[-1] if self.me == 0 else None]
        dist.broadcast_object_list(said, group_src=0, group=self.group)
        self.check(said == [want[-1]], "broadcast_object_list")
        dist.barrier(group=self.group)
