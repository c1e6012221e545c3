"""Chains of JAX's transformations, as data, that can be applied to any function of flat arrays.

Each transformation makes one such function of another and knows, without running it, the types of
what the new one takes and returns. So a chain can be drawn step by step, and then applied to a
program's interpreter in JAX and to its wrapped interpreter in torch. What a transformation needs
beside the function's own arguments (tangents, cotangents) are further arguments.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .random_values import INEXACT


Function: TypeAlias = Callable[..., tuple[Any, ...]]


class Arg(NamedTuple):
    """The type of an argument or a result.

    Attributes:
        spec: for each dimension the axes of the mesh that it is sharded over; empty if none is.
        differentiable: whether derivatives may be taken by it.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[Any, ...] = ()

    @property
    def differentiable(self) -> bool:
        return self.dtype in INEXACT

    def with_axis(self, axis: int, size: int) -> "Arg":
        """The type with a new axis, over which it is not sharded."""
        axis %= len(self.shape) + 1
        shape, spec = list(self.shape), list(self.spec)
        shape.insert(axis, size)
        if spec:
            spec.insert(axis, None)
        return Arg(tuple(shape), self.dtype, tuple(spec))


class Signature(NamedTuple):
    """What a function takes and returns."""

    ins: tuple[Arg, ...]
    outs: tuple[Arg, ...]

    @property
    def active(self) -> tuple[int, ...]:
        """The arguments that can be differentiated by."""
        return tuple(i for i, x in enumerate(self.ins) if x.differentiable)

    @property
    def inexact(self) -> tuple[int, ...]:
        """The results that can be differentiated."""
        return tuple(i for i, y in enumerate(self.outs) if y.differentiable)


@dataclasses.dataclass(frozen=True)
class Jit:
    """`jax.jit`."""

    def apply(self, f: Function) -> Function:
        return jax.jit(f)

    def signature(self, of: Signature) -> Signature:
        return of


@dataclasses.dataclass(frozen=True)
class Remat:
    """`jax.checkpoint`."""

    def apply(self, f: Function) -> Function:
        return jax.checkpoint(f)

    def signature(self, of: Signature) -> Signature:
        return of


@dataclasses.dataclass(frozen=True)
class Vmap:
    """`jax.vmap`."""

    in_axes: tuple[int | None, ...]
    out_axes: tuple[int, ...]
    size: int

    def apply(self, f: Function) -> Function:
        return jax.vmap(f, self.in_axes, self.out_axes, axis_size=self.size)

    def signature(self, of: Signature) -> Signature:
        ins = zip(of.ins, self.in_axes, strict=True)
        outs = zip(of.outs, self.out_axes, strict=True)
        return Signature(
            tuple(x if axis is None else x.with_axis(axis, self.size) for x, axis in ins),
            tuple(y.with_axis(axis, self.size) for y, axis in outs),
        )


@dataclasses.dataclass(frozen=True)
class Grad:
    """`jax.value_and_grad`, or `jax.grad`, of a sum of all inexact results."""

    wrt: tuple[int, ...]
    results: tuple[int, ...]
    dtype: str
    with_value: bool

    def apply(self, f: Function) -> Function:
        def loss(*args: Any) -> Any:
            outs = f(*args)
            return sum(_weighted_sum(outs[i], self.dtype) for i in self.results)

        gradient = jax.value_and_grad if self.with_value else jax.grad

        def g(*args: Any) -> tuple[Any, ...]:
            result = gradient(loss, self.wrt)(*args)
            return (result[0], *result[1]) if self.with_value else result

        return g

    def signature(self, of: Signature) -> Signature:
        value = (Arg((), self.dtype),) if self.with_value else ()
        return Signature(of.ins, (*value, *(of.ins[i] for i in self.wrt)))


@dataclasses.dataclass(frozen=True)
class Jvp:
    """`jax.jvp`; returns the results and the tangents of the inexact ones."""

    wrt: tuple[int, ...]
    results: tuple[int, ...]
    count: int

    def apply(self, f: Function) -> Function:
        def g(*args: Any) -> tuple[Any, ...]:
            primals, tangents = args[: self.count], args[self.count :]
            active = [primals[i] for i in self.wrt]
            h = _of_some(f, self.wrt, primals)
            outs, out_tangents = jax.jvp(h, tuple(active), tuple(tangents))
            return (*outs, *(out_tangents[i] for i in self.results))

        return g

    def signature(self, of: Signature) -> Signature:
        return Signature(
            (*of.ins, *(of.ins[i] for i in self.wrt)),
            (*of.outs, *(of.outs[i] for i in self.results)),
        )


@dataclasses.dataclass(frozen=True)
class Vjp:
    """`jax.vjp`; returns the results and the cotangents of the arguments `wrt`.

    All arguments take part but those of float8, whose cotangents torch cannot add.
    """

    wrt: tuple[int, ...]
    results: tuple[int, ...]
    count: int
    twice: bool

    def apply(self, f: Function) -> Function:
        def g(*args: Any) -> tuple[Any, ...]:
            primals, given = args[: self.count], iter(args[self.count :])
            active = [primals[i] for i in self.wrt]
            outs, pull = jax.vjp(_of_some(f, self.wrt, primals), *active)
            cotangents = tuple(
                next(given)
                if i in self.results
                else np.zeros(y.shape, jax.dtypes.float0)
                if not jnp.issubdtype(y.dtype, jnp.inexact)
                else jnp.zeros_like(y)
                for i, y in enumerate(outs)
            )
            pulled = pull(cotangents)
            again = pull(cotangents) if self.twice else ()
            return (*outs, *(u for u in (*pulled, *again) if u.dtype != jax.dtypes.float0))

        return g

    def signature(self, of: Signature) -> Signature:
        cotangents = tuple(of.ins[i] for i in self.wrt if of.ins[i].differentiable)
        return Signature(
            (*of.ins, *(of.outs[i] for i in self.results)),
            (*of.outs, *cotangents * (2 if self.twice else 1)),
        )


@dataclasses.dataclass(frozen=True)
class Scan:
    """`jax.lax.scan` over some arguments, and with some results as the next arguments.

    Attributes:
        over: the arguments that have a leading axis; the others are constant or carried.
        feed: pairs of a result and the argument that it is next.
    """

    over: tuple[int, ...]
    feed: tuple[tuple[int, int], ...]
    length: int
    reverse: bool

    def apply(self, f: Function) -> Function:
        def g(*args: Any) -> tuple[Any, ...]:
            def step(carry: Any, xs: Any) -> tuple[Any, Any]:
                new = list(args)
                for (_, i), x in zip(self.feed, carry, strict=True):
                    new[i] = x
                for i, x in zip(self.over, xs, strict=True):
                    new[i] = x
                outs = f(*new)
                return tuple(outs[i] for i, _ in self.feed), outs

            carry = tuple(args[i] for _, i in self.feed)
            xs = tuple(args[i] for i in self.over)
            return jax.lax.scan(step, carry, xs, self.length, self.reverse)[1]

        return g

    def signature(self, of: Signature) -> Signature:
        stacked = lambda x: x.with_axis(0, self.length)  # noqa: E731
        return Signature(
            tuple(stacked(x) if i in self.over else x for i, x in enumerate(of.ins)),
            tuple(map(stacked, of.outs)),
        )


Transformation: TypeAlias = Any


def apply_all(chain: Sequence[Transformation], f: Function) -> Function:
    """The function, transformed by each in turn."""
    for transformation in chain:
        f = transformation.apply(f)
    return f


def _of_some(f: Function, wrt: Sequence[int], args: Sequence[Any]) -> Function:
    """The function of the arguments `wrt` alone."""

    def g(*active: Any) -> tuple[Any, ...]:
        new = list(args)
        for i, x in zip(wrt, active, strict=True):
            new[i] = x
        return f(*new)

    return g


def _weighted_sum(y: Any, dtype: str) -> Any:
    """A real number that depends on every element of `y`."""
    weights = jnp.cos(jnp.arange(y.size, dtype=dtype)).reshape(y.shape)
    if jnp.issubdtype(y.dtype, jnp.complexfloating):
        return (weights * (y.real + 0.5 * y.imag).astype(dtype)).sum()
    return (weights * y.astype(dtype)).sum()
