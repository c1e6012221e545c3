"""Functions written twice, once in torch and once in JAX, and what tests do with them.

Every composition of JAX's transformations must give the same for both.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import torch2jax


@dataclasses.dataclass(frozen=True)
class Twin:
    """A function of arrays of these shapes and dtypes, smooth at what `args` gives."""

    torch: Callable[..., Any]
    jax: Callable[..., Any]
    specs: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def wrapped(self) -> Callable[..., Any]:
        return torch2jax(self.torch)

    @property
    def smooth(self) -> tuple[int, ...]:
        """The arguments that can be differentiated."""
        return tuple(
            i for i, (_, dtype) in enumerate(self.specs) if jnp.issubdtype(dtype, jnp.inexact)
        )

    def args(self, getkey, *batch: int) -> tuple[jax.Array, ...]:
        """Random arguments, with these leading batch axes."""
        return tuple(random_array(getkey, (*batch, *shape), dtype) for shape, dtype in self.specs)


def random_array(getkey, shape, dtype="float32") -> jax.Array:
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(getkey(), shape, 0, 3, dtype)
    if dtype == "bool":
        return jax.random.bernoulli(getkey(), 0.5, shape)
    return jax.random.normal(getkey(), shape, dtype)


def scalar(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A real number that depends on every inexact element that `f` returns."""

    def loss(*args):
        total = jnp.zeros(())
        for leaf in jax.tree.leaves(f(*args)):
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                continue
            weights = jnp.cos(jnp.arange(leaf.size, dtype="float32")).reshape(leaf.shape)
            total += (weights * leaf.real).sum()
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                total += 0.5 * (weights * leaf.imag).sum()
        return total

    return loss


class Cube(torch.autograd.Function):
    """Written the old way: no `setup_context`."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


class HiddenCube(torch.autograd.Function):
    """Keeps its input where torch does not see it."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x**3

    @staticmethod
    def backward(ctx, g):
        return Cube.apply(ctx.x) * 3 / ctx.x * g


def _writes(x, y):
    x.mul_(2)
    x[0] = y[1]
    return x * y


def _writes_in_jax(x, y):
    return (2 * x).at[0].set(y[1]) * y


def _inner_grad(x, y):
    x = x.requires_grad_() if not x.requires_grad else x
    (gradient,) = torch.autograd.grad((x**3 * y).sum(), x, create_graph=True)
    return gradient.sin()


def _inner_grad_in_jax(x, y):
    return jnp.sin(jax.grad(lambda x: (x**3 * y).sum())(x))


def _nested(x, y):
    return {"a": (x * y, None), "b": [x.exp().sum(), y.T]}


def _nested_in_jax(x, y):
    return {"a": (x * y, None), "b": [jnp.exp(x).sum(), y.T]}


def _layouts(x):
    return x.T, x[::2], x[:1].expand(4, 3), x.flip(0), x, x, x[0, 0]


def _layouts_in_jax(x):
    return x.T, x[::2], jnp.broadcast_to(x[:1], (4, 3)), x[::-1], x, x, x[0, 0]


def _embedding(ids, table):
    return torch.nn.functional.embedding(ids, table).sin()


def _top(x, y):
    values, places = torch.topk(x * y, 2)
    return values.exp(), places


def _top_in_jax(x, y):
    values, places = jax.lax.top_k(x * y, 2)
    return jnp.exp(values), places


_VECTORS = (((4,), "float32"),) * 2
_MATRICES = (((3, 3), "float32"),) * 2

TWINS = {
    "elementwise": Twin(
        lambda x, y: x.sin() * y.exp(), lambda x, y: jnp.sin(x) * jnp.exp(y), _VECTORS
    ),
    "matmul": Twin(lambda x, w: (x @ w).tanh(), lambda x, w: jnp.tanh(x @ w), _MATRICES),
    "nested": Twin(_nested, _nested_in_jax, _MATRICES),
    "scalars": Twin(lambda x: x**3, lambda x: x**3, (((), "float32"),)),
    "layouts": Twin(_layouts, _layouts_in_jax, (((4, 3), "float32"),)),
    "writes": Twin(_writes, _writes_in_jax, _VECTORS),
    "inner_grad": Twin(_inner_grad, _inner_grad_in_jax, _VECTORS),
    "old_function": Twin(
        lambda x: Cube.apply(x).sin(), lambda x: jnp.sin(x**3), (((4,), "float32"),)
    ),
    "hidden_input": Twin(lambda x: HiddenCube.apply(x), lambda x: x**3, (((4,), "float32"),)),
    "ids": Twin(
        _embedding, lambda ids, table: jnp.sin(table[ids]), (((5,), "int32"), ((3, 2), "float32"))
    ),
    "mask": Twin(
        lambda m, x: (m.logical_not(), torch.where(m, x.sin(), x)),
        lambda m, x: (~m, jnp.where(m, jnp.sin(x), x)),
        (((4,), "bool"), ((4,), "float32")),
    ),
    "top": Twin(_top, _top_in_jax, _VECTORS),
    "complex": Twin(
        lambda z, w: (z * w.conj()).exp(),
        lambda z, w: jnp.exp(z * w.conj()),
        (((3,), "complex64"),) * 2,
    ),
    "complex_to_real": Twin(
        lambda z, x: (z.abs() * x, torch.complex(x, x.sin())),
        lambda z, x: (jnp.abs(z) * x, jax.lax.complex(x, jnp.sin(x))),
        (((3,), "complex64"), ((3,), "float32")),
    ),
    "detached": Twin(
        lambda x, y: x.detach() * x * y,
        lambda x, y: jax.lax.stop_gradient(x) * x * y,
        _VECTORS,
    ),
    "unused": Twin(lambda x, y: x.sin(), lambda x, y: jnp.sin(x), _VECTORS),
    "constant": Twin(lambda x: torch.ones(3), lambda x: jnp.ones(3), (((4,), "float32"),)),
    "linear": Twin(lambda x, y: 2 * x - y, lambda x, y: 2 * x - y, _VECTORS),
    "empty": Twin(
        lambda x, y: x @ y, lambda x, y: x @ y, (((2, 0), "float32"), ((0, 3), "float32"))
    ),
}

every_twin = pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)


def twins(*names: str):
    """Parametrizes over these."""
    return pytest.mark.parametrize("twin", [TWINS[name] for name in names], ids=names)
