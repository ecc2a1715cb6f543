"""How numbers of several ranks become one: the reductions of torch.distributed on flat host tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from hetrun.bridge.failure import NotBridgedError


class Fold(Enum):
    """An operation that two buffers are combined with, in any order; values are torch.distributed's names."""

    SUM = "SUM"
    PRODUCT = "PRODUCT"
    MIN = "MIN"
    MAX = "MAX"
    BAND = "BAND"
    BOR = "BOR"
    BXOR = "BXOR"


_INTO = {
    Fold.SUM: torch.add,
    Fold.PRODUCT: torch.mul,
    Fold.MIN: torch.minimum,
    Fold.MAX: torch.maximum,
    Fold.BAND: torch.bitwise_and,
    Fold.BOR: torch.bitwise_or,
    Fold.BXOR: torch.bitwise_xor,
}
_NATIVE = {
    Fold.SUM: dist.ReduceOp.SUM,
    Fold.PRODUCT: dist.ReduceOp.PRODUCT,
    Fold.MIN: dist.ReduceOp.MIN,
    Fold.MAX: dist.ReduceOp.MAX,
    Fold.BAND: dist.ReduceOp.BAND,
    Fold.BOR: dist.ReduceOp.BOR,
    Fold.BXOR: dist.ReduceOp.BXOR,
}
_BITWISE = (Fold.BAND, Fold.BOR, Fold.BXOR)
_OF_BOOL = {  # of bytes that are 0 or 1
    Fold.SUM: Fold.MAX,
    Fold.BOR: Fold.MAX,
    Fold.MAX: Fold.MAX,
    Fold.PRODUCT: Fold.MIN,
    Fold.BAND: Fold.MIN,
    Fold.MIN: Fold.MIN,
    Fold.BXOR: Fold.BXOR,
}
# What every collective library adds up; the rest is left to the bridge's own sockets.
NATIVE_DTYPES = frozenset(
    (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    )
)
_NUMBERS = NATIVE_DTYPES | {torch.int16}


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is asked for: fold all, then divide."""

    fold: Fold
    divide_by: int = 1

    def finish(self, elements: Tensor) -> None:
        """Turn a sum into a mean, in place."""
        if self.divide_by != 1:
            elements.div_(self.divide_by)


def read_reduction(op: dist.ReduceOp, dtype: torch.dtype, size: int) -> Reduction:
    """Say what an operation of torch.distributed means for a dtype in a group of `size` ranks.

    Raises:
        NotBridgedError: nothing that the bridge does; names both.
    """
    name = op_name(op)
    if name == "AVG" and (dtype.is_floating_point or dtype.is_complex):
        return Reduction(read_reduction(dist.ReduceOp.SUM, dtype, size).fold, divide_by=size)
    if name not in Fold.__members__:
        raise NotBridgedError(f"the bridge has no reduction {name} of {dtype}")
    fold = Fold[name]
    fits = (
        dtype is torch.bool
        or (dtype.is_complex and fold is Fold.SUM)
        or (dtype in _NUMBERS and not (fold in _BITWISE and dtype.is_floating_point))
    )
    if not fits:
        raise NotBridgedError(f"the bridge has no reduction {name} of {dtype}")
    return Reduction(_OF_BOOL[fold] if dtype is torch.bool else fold)


def as_numbers(elements: Tensor) -> Tensor:
    """View flat elements as numbers that libraries know: bool as bytes, complex as pairs."""
    if elements.dtype is torch.bool:
        return elements.view(torch.uint8)
    return torch.view_as_real(elements).view(-1) if elements.is_complex() else elements


def fold_into(total: Tensor, other: Tensor, fold: Fold) -> None:
    """Combine `other` into `total`, in place."""
    _INTO[fold](total, other, out=total)


def native_op(fold: Fold) -> dist.ReduceOp:
    """The name a collective library has for it."""
    return _NATIVE[fold]


def op_name(op: dist.ReduceOp) -> str:
    """torch's name of a reduction, such as "SUM"."""
    names = dist.ReduceOp.RedOpType.__members__
    return next((name for name in names if op == getattr(dist.ReduceOp, name)), str(op))
