"""Operators that are run otherwise than torch runs them, in the calls of this library alone.

torch's dispatcher has a key of which nothing in torch makes use (`INTERPOSED`). A thread can turn
it on for itself: then the operators that have a kernel here are run by that, and all others as
ever, at no cost. The key ranks above autograd, so that graphs and their derivatives see what the
kernel has put in the place of an argument, and it is on in whatever torch does within: batches and
derivatives of `torch.func`, checkpoints, scripted modules, backwards. Other threads, and the user's
own torch code in this one, see nothing of it.

Two kinds of operators are interposed. Those here take an index: torch's kernels for CPUs misread
one of 32 bits that is expanded (`index[:, None].expand(-1, n)`, the idiom of message passing), or
refuse one of 32 bits, if only in their backwards, and of 32 bits is every index of JAX. So they get
it in 64 bits. Those that draw random numbers are in `generators`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._compat import interpose, Operator, set_interposed
from .base import Tensors


_NARROW = frozenset([torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32])
_WIDENED = (
    torch.ops.aten.gather,
    torch.ops.aten.scatter,
    torch.ops.aten.scatter_,
    torch.ops.aten.scatter_add,
    torch.ops.aten.scatter_add_,
    torch.ops.aten.scatter_reduce,
    torch.ops.aten.scatter_reduce_,
    torch.ops.aten.index_fill,
    torch.ops.aten.index_fill_,
    torch.ops.aten.index_reduce,
    torch.ops.aten.index_reduce_,
    torch.ops.aten.take_along_dim,
)


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether these are integers of less than 64 bits."""
    return dtype in _NARROW


def with_interposed(run: Callable[[Tensors, bool], Tensors]) -> Callable[[Tensors, bool], Tensors]:
    """`run` of a program, with interposed operators."""

    def run_interposed(inputs: Tensors, functional: bool) -> Tensors:
        set_interposed(True)
        try:
            return run(inputs, functional)
        finally:
            set_interposed(False)

    return run_interposed


@contextlib.contextmanager
def interposing() -> Iterator[None]:
    """Interposes operators of the calling thread."""
    set_interposed(True)
    try:
        yield
    finally:
        set_interposed(False)


def _with_wide_index(operator: Operator) -> Callable[..., Any]:
    """The operator with its index in 64 bits."""
    names = [argument.name for argument in operator._schema.arguments]
    position = next(i for i, name in enumerate(names) if name in ("index", "indices"))

    def call(*args: Any, **kwargs: Any) -> Any:
        index = args[position]
        if index.dtype is torch.int32:
            wide = index.to(torch.int64, memory_format=torch.contiguous_format)
            args = (*args[:position], wide, *args[position + 1 :])
        return operator(*args, **kwargs)

    return call


for _packet in _WIDENED:
    for _name in _packet.overloads():
        if not _name.startswith("dimname"):  # these end up in the others
            _operator = getattr(_packet, _name)
            interpose(_operator, _with_wide_index(_operator))
