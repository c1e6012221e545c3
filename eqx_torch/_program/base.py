"""Torch programs: what a primitive of JAX carries as its parameter.

A program maps a flat list of tensors to a flat list of tensors. A `Leaf` is the user's function;
the others are made from a program by a transformation:

    Jvp(p, wrt, of)         the tangents of the outputs `of` for tangents of the inputs `wrt`
    Vjp(p, wrt, of)         the cotangents of the inputs `wrt` for cotangents of the outputs `of`
    Vmap(p, in_axes, ...)   one call for a whole batch

The set is closed: the derivative, the adjoint and the batched form of a program are programs, so
one JAX primitive with three rules serves every composition of transformations. `Jvp` is linear in
its tangents and `Vjp` in its cotangents, and each is the adjoint of the other. A `Vmap` is linear
where the program inside is, and its adjoint is the `Vmap` of that program's adjoint.

Programs are hashable and compare by value: equal ones share a trace and a compilation.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from .._dtypes import is_inexact


Tensors: TypeAlias = Sequence[torch.Tensor]
Indices: TypeAlias = tuple[int, ...]
Kind: TypeAlias = Literal["forward", "backward", "tangent"]


class Spec(NamedTuple):
    """Shape and JAX dtype of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def differentiable(self) -> bool:
        """Whether a tangent can exist."""
        return is_inexact(self.dtype)

    def batched(self, size: int, axis: int) -> "Spec":
        """The spec with a batch axis."""
        return Spec((*self.shape[:axis], size, *self.shape[axis:]), self.dtype)


# The name of a recorded graph; see `tape`.
TOKEN = Spec((1,), np.dtype("int32"))


class Program(abc.ABC):
    """A map from tensors to tensors; see the module's docstring."""

    @functools.cached_property
    @abc.abstractmethod
    def ins(self) -> tuple[Spec, ...]:
        """What the program takes."""

    @functools.cached_property
    @abc.abstractmethod
    def outs(self) -> tuple[Spec, ...]:
        """What it gives."""

    @property
    @abc.abstractmethod
    def leaf(self) -> Any:
        """The `Leaf` at the bottom."""

    @functools.cached_property
    @abc.abstractmethod
    def order(self) -> int:
        """How many derivatives have been taken."""

    @functools.cached_property
    def linear(self) -> frozenset[int]:
        """The inputs in which the program is, jointly, linear."""
        return frozenset()

    @functools.cached_property
    def forward(self) -> tuple["Program", ...]:
        """The programs, from the inside, that are computed in forward mode to compute this one."""
        return ()

    @functools.cached_property
    def batches(self) -> bool:
        """Whether it is, or is made of, one call for a batch."""
        return False

    @functools.cached_property
    def token(self) -> int | None:
        """The input that is the token of a graph, None if none is."""
        return None

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What jaxprs and messages call the program."""

    @property
    def kind(self) -> Kind:
        """What it computes: the outermost derivative says so."""
        return "forward"

    @abc.abstractmethod
    def run(self, inputs: Tensors, functional: bool) -> Tensors:
        """Evaluates the program.

        Args:
            inputs: one tensor for each of `ins`.
            functional: whether a transformation of `torch.func` is active around this call, so
                that only `torch.func` may be used within it.
        """

    @abc.abstractmethod
    def broadcast(self, size: int, shared: Indices) -> "Program":
        """The program on inputs with a leading batch axis, for a function that handles it.

        Args:
            size: the size of the batch.
            shared: the inputs that are the same for the batch and have an axis of size one.
        """

    def prepare(self) -> None:
        """Loads what `run` needs, in the thread that compiles rather than in those that run."""
        return

    def __repr__(self) -> str:
        return self.name

    @functools.cached_property
    def inexact_outs(self) -> Indices:
        """The outputs that have tangents."""
        return tuple(i for i, spec in enumerate(self.outs) if spec.differentiable)


class Derived(Program):
    """A program made from the program `inner`."""

    inner: Program

    @property
    def leaf(self) -> Any:
        return self.inner.leaf

    @property
    def kind(self) -> Kind:
        return self.inner.kind

    @functools.cached_property
    def forward(self) -> tuple[Program, ...]:
        return self.inner.forward

    @functools.cached_property
    def batches(self) -> bool:
        return self.inner.batches

    def prepare(self) -> None:
        self.inner.prepare()


@dataclasses.dataclass(frozen=True, repr=False)
class Derivative(Derived):
    """A derivative of `inner` by its inputs `wrt`, of its outputs `of`.

    It takes the primals, a token of a recorded graph if `taped`, and then tangents or cotangents,
    in which it is linear.
    """

    inner: Program
    wrt: Indices
    of: Indices
    taped: bool = False

    @property
    def tokens(self) -> tuple[Spec, ...]:
        """The spec of the token, if there is one."""
        return (TOKEN,) if self.taped else ()

    @functools.cached_property
    def token(self) -> int | None:
        return len(self.inner.ins) if self.taped else None

    @functools.cached_property
    def linear(self) -> frozenset[int]:
        return frozenset(range(len(self.inner.ins) + self.taped, len(self.ins)))

    @functools.cached_property
    def order(self) -> int:
        return self.inner.order + (not self.inner.linear.issuperset(self.wrt))

    def split(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """The primals, and the tangents or cotangents."""
        count = len(self.inner.ins)
        return inputs[:count], inputs[count + self.taped :]


def pick(items: Sequence[Any], indices: Sequence[int]) -> tuple[Any, ...]:
    """The items at these positions."""
    return tuple(items[i] for i in indices)


def replaced(items: Tensors, indices: Indices, values: Tensors) -> list[torch.Tensor]:
    """A copy of `items` with `values` at these positions."""
    out = list(items)
    for index, value in zip(indices, values, strict=True):
        out[index] = value
    return out
