"""A language of small array programs, with an interpreter in torch and one in JAX.

A program is data: the types of its inputs, steps that each make one more value of earlier ones,
and which values it returns. Both interpreters give every step the same meaning, so whatever is
done to one of them by JAX's transformations must give the same as when done to the other.

Values stay within a few units, since sums and products are scaled by powers of two, and all steps
are smooth or exact: those that jump or have a kink (comparisons, `sort`, `relu`) are for inputs,
which no rounding has touched. `random_program_draws` draws such programs.

The step `residual` adds to a value what a `torch.autograd.Function` makes of it, whose backward may
leave autograd: of such programs derivatives after the first may be refused, but not wrong.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch


class Type(NamedTuple):
    """The shape and, by name, the dtype of a value."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation on earlier values, which are numbered from the inputs on."""

    op: str
    operands: tuple[int, ...]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Program:
    """Inputs of these types, steps, and the numbers of the values that are returned."""

    inputs: tuple[Type, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def in_torch(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._run(IN_TORCH, tensors)

    def in_jax(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        return self._run(IN_JAX, arrays)

    def types(self) -> list[Type]:
        """The type of every value, as torch says."""
        values = [empty(t) for t in self.inputs]
        for step in self.steps:
            values.append(apply(IN_TORCH, step, values))
        return [type_of(v) for v in values]

    def _run(self, meaning: dict[str, Callable[..., Any]], inputs: Any) -> Any:
        values = list(inputs)
        for step in self.steps:
            values.append(apply(meaning, step, values))
        return tuple(values[i] for i in self.outputs)


def apply(meaning: dict[str, Callable[..., Any]], step: Step, values: Any) -> Any:
    """The value that a step makes."""
    return meaning[step.op](*(values[i] for i in step.operands), **step.params)


def empty(t: Type) -> torch.Tensor:
    """A tensor of this type without memory."""
    return torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta")


def type_of(tensor: torch.Tensor) -> Type:
    return Type(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _write(x, *other, place, how):
    """Changes a part of `x` in place."""
    part = IN_TORCH[place["op"]](x, **place["params"])
    match how:
        case "add":
            part.add_(*other)
        case "copy":
            part.copy_(*other)
        case "fill":
            part.masked_fill_(*other, 0)
        case "mul":
            part.mul_(*other)
        case "sin":
            part.sin_()
        case "zero":
            part.zero_()
    return x


def _written(x, *other, place, how):
    """What `_write` makes of `x`: each place is a selection of elements, in some order."""
    numbers = jnp.arange(x.size).reshape(x.shape)
    where = IN_JAX[place["op"]](numbers, **place["params"])
    part = IN_JAX[place["op"]](x, **place["params"])
    match how:
        case "add":
            new = part + other[0]
        case "copy":
            new = jnp.broadcast_to(other[0], part.shape)
        case "fill":
            new = jnp.where(other[0], jnp.zeros_like(part), part)
        case "mul":
            new = part * other[0]
        case "sin":
            new = jnp.sin(part)
        case "zero":
            new = jnp.zeros_like(part)
    return x.reshape(-1).at[where.reshape(-1)].set(new.reshape(-1)).reshape(x.shape)


def _windows(x, dim, size, step):
    starts = range(0, x.shape[dim] - size + 1, step)
    parts = [jax.lax.slice_in_dim(x, i, i + size, axis=dim) for i in starts]
    return jnp.stack([jnp.moveaxis(p, dim, -1) for p in parts], dim)


def _as_real(z):
    return jnp.stack([z.real, z.imag], -1)


def _cast(x, dtype):
    return x.to(getattr(torch, dtype))


def _slice(x, dim, start, stop, step):
    return x[(slice(None),) * dim + (slice(start, stop, step),)]


def _parity(x, dtype):
    """An integer as a small number."""
    return (x & 1).to(getattr(torch, dtype))


def _take(x, index, dim):
    return x.index_select(dim, index.long() % x.shape[dim])


def _scaled_by(f):
    return lambda *xs, factor=1, **params: f(*xs, **params) * factor


def _by_numpy(x):
    """The same numbers, by way of NumPy, which has no bfloat16."""
    wide = x.detach().to(torch.float64)
    return torch.from_numpy(np.array(wide.numpy())).to(x.dtype)


def _sine(backward):
    """The sine, with this backward."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return backward(g, *ctx.saved_tensors)

    return Sine.apply


# Backwards of the sine: one that autograd sees, and some that it does not.
SEEN = "seen"
BACKWARDS = {
    SEEN: _sine(lambda g, x: g * x.cos()),
    "detached": _sine(lambda g, x: g.detach() * x.cos()),
    "detached in part": _sine(lambda g, x: 0.5 * g * x.cos() + (0.5 * g * x.cos()).detach()),
    "without gradients": _sine(torch.no_grad()(lambda g, x: g * x.cos())),
    "by NumPy": _sine(lambda g, x: _by_numpy(g * x.cos())),
    "in part by NumPy": _sine(lambda g, x: 0.25 * g * x.cos() + 0.75 * x.cos() * _by_numpy(g)),
    "saved tensors by NumPy": _sine(lambda g, x: g * _by_numpy(x).cos()),
    "products by NumPy": _sine(lambda g, x: g * _by_numpy(x.cos())),
    "two paths": _sine(lambda g, x: 0.5 * g * x.cos() + 0.5 * g * _by_numpy(x).cos()),
}


IN_TORCH: dict[str, Callable[..., Any]] = {
    # Elementwise.
    "abs": torch.abs,
    "add": lambda x, y: x + y,
    "average": lambda x, y: (x + y) * 0.5,
    "cast": _cast,
    "complex": torch.complex,
    "cos": torch.cos,
    "equal": lambda x, y: x == y,
    "exp": lambda x: (0.5 * x).exp(),
    "less": lambda x, y: x < y,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mul": _scaled_by(lambda x, y: x * y),
    "neg": lambda x: -x,
    "not": lambda x: ~x,
    "parity": _parity,
    "relu": torch.relu,
    "residual": lambda x, backward, factor: 0.5 * x + factor * BACKWARDS[backward](x),
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "sub": lambda x, y: (x - y) * 0.5,
    "tanh": torch.tanh,
    "where": torch.where,
    "xor": lambda x, y: x ^ y,
    # Sums, products and orders.
    "all": lambda x, dims: x.all(dims),
    "amax": lambda x, dims, keep: x.amax(dims, keepdim=keep),
    "argsort": lambda x, dim: torch.argsort(x, dim=dim, stable=True),
    "cumsum": _scaled_by(lambda x, dim: x.cumsum(dim, dtype=x.dtype)),
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "matmul": _scaled_by(torch.matmul),
    "prod": lambda x, dim: x.prod(dim),
    "softmax": lambda x, dim: x.softmax(dim),
    "sort": lambda x, dim: torch.sort(x, dim=dim, stable=True).values,
    "sum": _scaled_by(lambda x, dims, keep: x.sum(dims, keepdim=keep, dtype=x.dtype)),
    # Copies.
    "cat": lambda x, y, dim: torch.cat([x, y], dim),
    "clone": torch.clone,
    "flip": lambda x, dims: x.flip(dims),
    "roll": lambda x, shift, dim: x.roll(shift, dim),
    "stack": lambda x, y, dim: torch.stack([x, y], dim),
    "take": _take,
    # Views.
    "as_real": lambda z: torch.view_as_real(z.resolve_conj()),
    "conj": torch.conj,
    "detach": torch.Tensor.detach,
    "diagonal": lambda x, dims: x.diagonal(0, *dims),
    "expand": lambda x, shape: x.expand(shape),
    "imag": torch.imag,
    "permute": lambda x, dims: x.permute(dims),
    "real": torch.real,
    "reshape": lambda x, shape: x.reshape(shape),
    "select": lambda x, dim, index: x.select(dim, index),
    "slice": _slice,
    "squeeze": lambda x, dim: x.squeeze(dim),
    "unsqueeze": lambda x, dim: x.unsqueeze(dim),
    "whole": lambda x: x,
    "windows": lambda x, dim, size, step: x.unfold(dim, size, step),
    # In place.
    "write": _write,
}

IN_JAX: dict[str, Callable[..., Any]] = {
    "abs": lambda x: x * jnp.sign(x),  # whose derivative at zero is torch's; that of `jnp.abs` is 1
    "add": lambda x, y: x + y,
    "average": lambda x, y: (x + y) * 0.5,
    "cast": lambda x, dtype: x.astype(dtype),
    "complex": lambda x, y: jax.lax.complex(*jnp.broadcast_arrays(x, y)),
    "cos": jnp.cos,
    "equal": lambda x, y: x == y,
    "exp": lambda x: jnp.exp(0.5 * x),
    "less": lambda x, y: x < y,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "mul": _scaled_by(lambda x, y: x * y),
    "neg": lambda x: -x,
    "not": lambda x: ~x,
    "parity": lambda x, dtype: (x & 1).astype(dtype),
    "relu": jax.nn.relu,
    "residual": lambda x, backward, factor: 0.5 * x + factor * jnp.sin(x),
    "sigmoid": jax.nn.sigmoid,
    "sin": jnp.sin,
    "sub": lambda x, y: (x - y) * 0.5,
    "tanh": jnp.tanh,
    "where": jnp.where,
    "xor": lambda x, y: x ^ y,
    "all": lambda x, dims: x.all(dims),
    "amax": lambda x, dims, keep: x.max(dims, keepdims=keep),
    "argsort": lambda x, dim: jnp.argsort(x, dim, stable=True),
    "cumsum": _scaled_by(lambda x, dim: jnp.cumsum(x, dim, dtype=x.dtype)),
    "logsumexp": lambda x, dim: jax.nn.logsumexp(x, dim),
    "matmul": _scaled_by(jnp.matmul),
    "prod": lambda x, dim: x.prod(dim),
    "softmax": lambda x, dim: jax.nn.softmax(x, dim),
    "sort": lambda x, dim: jnp.sort(x, dim),
    "sum": _scaled_by(lambda x, dims, keep: x.sum(dims, keepdims=keep, dtype=x.dtype)),
    "cat": lambda x, y, dim: jnp.concatenate([x, y], dim),
    "clone": lambda x: x,
    "flip": lambda x, dims: jnp.flip(x, dims),
    "roll": lambda x, shift, dim: jnp.roll(x, shift, dim),
    "stack": lambda x, y, dim: jnp.stack([x, y], dim),
    "take": lambda x, index, dim: jnp.take(x, index % x.shape[dim], dim),
    "as_real": _as_real,
    "conj": jnp.conj,
    "detach": jax.lax.stop_gradient,
    "diagonal": lambda x, dims: jnp.diagonal(x, 0, *dims),
    "expand": lambda x, shape: jnp.broadcast_to(x, shape),
    "imag": jnp.imag,
    "permute": lambda x, dims: jnp.transpose(x, dims),
    "real": jnp.real,
    "reshape": lambda x, shape: jnp.reshape(x, shape),
    "select": lambda x, dim, index: jax.lax.index_in_dim(x, index, dim, keepdims=False),
    "slice": _slice,
    "squeeze": lambda x, dim: jnp.squeeze(x, dim),
    "unsqueeze": lambda x, dim: jnp.expand_dims(x, dim),
    "whole": lambda x: x,
    "windows": _windows,
    "write": _written,
}
