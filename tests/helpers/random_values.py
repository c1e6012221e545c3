"""What is known of the values of a random program, and which of them an operation can take.

Besides its type, two things of a value decide what may be done with it:

- exact: no rounding has touched it, so both interpreters have the very same bits, and steps that
  jump or have a kink may be applied;
- writable: torch can change it in place, since no autograd graph may need what it was, and no two
  elements share memory. Writing ends the use of all that shares memory with it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

from .random_programs import Type


HALVES = ("float16", "bfloat16")
COMPLEX = ("complex64", "complex128")
EIGHTS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
REAL = (*HALVES, "float32", "float64")
INEXACT = (*REAL, *COMPLEX)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
# torch can move and cast values of these, and little else.
STORED = ("uint16", "uint32", "uint64", *EIGHTS, "float8_e8m0fnu")
EVERY = (*INEXACT, *INTEGERS, "bool", *STORED)
COMPUTED = (*INEXACT, *INTEGERS)
WIDE = ("float64", "complex128", "int64", "uint64")

Draw = Callable[[st.SearchStrategy[Any]], Any]
Operands = Iterator[tuple[int, ...]]


@dataclasses.dataclass
class Value:
    """What is known of a value.

    Attributes:
        memory: of the value that it is a view of.
        saved: the memories that an autograd graph may need as they are; shared by all values.
        overlaps: whether elements share memory.
        last: whether it can only be returned, and once: torch cannot add float8 cotangents.
        alive: whether it can still be used.
    """

    type: Type
    memory: int
    saved: set[int]
    exact: bool = True
    overlaps: bool = False
    last: bool = False
    alive: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype

    @property
    def writable(self) -> bool:
        return not self.overlaps and self.memory not in self.saved


def one(
    dtypes: Sequence[str] = EVERY,
    ndim: int = 0,
    exact: bool = False,
    when: Callable[[Value], bool] = lambda v: True,
) -> Callable[[Sequence[Value]], Operands]:
    """One value of these dtypes, with at least so many dimensions."""

    def operands(values: Sequence[Value]) -> Operands:
        for i, v in reversed(list(enumerate(values))):
            fits = v.dtype in dtypes and len(v.shape) >= ndim and (v.exact or not exact)
            if v.alive and not v.last and fits and when(v):
                yield (i,)

    return operands


def two(
    dtypes: Sequence[str],
    exact: bool = False,
    when: Callable[[Value, Value], bool] | None = None,
) -> Callable[[Sequence[Value]], Operands]:
    """Two values of one of these dtypes, of shapes that broadcast."""
    fits = when or (lambda x, y: broadcast(x.shape, y.shape) is not None)

    def operands(values: Sequence[Value]) -> Operands:
        for (i,) in one(dtypes, exact=exact)(values):
            for (j,) in one(dtypes, exact=exact)(values):
                x, y = values[i], values[j]
                if x.dtype == y.dtype and fits(x, y):
                    yield i, j

    return operands


@functools.cache
def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that these broadcast to, if they do."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        return None


def chosen_elementwise(values: Sequence[Value]) -> Operands:
    """A mask and two values to choose from."""
    for (m,) in one(("bool",))(values):
        for i, j in two((*COMPUTED, "bool"))(values):
            if broadcast(*(values[k].shape for k in (m, i, j))) is not None:
                yield m, i, j


def multiplied(x: Value, y: Value) -> bool:
    """Whether two values can be multiplied as matrices."""
    if not (x.shape and y.shape):
        return False
    inner = y.shape[-2] if len(y.shape) > 1 else y.shape[0]
    return x.shape[-1] == inner and broadcast(x.shape[:-2], y.shape[:-2]) is not None


def taken(values: Sequence[Value]) -> Operands:
    """A value and a vector of numbers in it."""
    for (i,) in one((*COMPUTED, "bool"), 1, when=lambda v: v.shape[0] > 0)(values):
        for (j,) in one(INTEGERS, 1, when=lambda v: len(v.shape) == 1)(values):
            yield i, j


def joined(x: Value, y: Value) -> bool:
    """Whether two values can be concatenated along their first axis."""
    return bool(x.shape) and len(x.shape) == len(y.shape) and x.shape[1:] == y.shape[1:]


def written(values: Sequence[Value]) -> Operands:
    """A value to change and, at times, one to change it by."""
    for (i,) in one((*COMPUTED, "bool"), when=lambda v: v.writable)(values):
        yield (i,)
        for (j,) in one((values[i].dtype, "bool"))(values):
            if values[j].memory != values[i].memory:
                yield i, j


def available(dtype: str) -> bool:
    """Whether JAX has the dtype now."""
    return dtype not in WIDE or jax.config.jax_enable_x64


def casts(v: Value) -> tuple[str, ...]:
    """The dtypes in which a value means the same in both interpreters."""
    if v.dtype in COMPLEX:
        return COMPLEX
    if v.dtype in REAL:
        return (*INEXACT, *(("bool", "int8", "int32", *EIGHTS) if v.exact else ()))
    if v.dtype == "bool":
        return (*INEXACT, *INTEGERS)
    if v.dtype.startswith("float8"):
        return ("float32",)
    return (*INTEGERS, "uint16", "uint32", "bool")


def nonempty(v: Value) -> bool:
    return 0 not in v.shape


def some_size(v: Value) -> bool:
    return any(v.shape)
