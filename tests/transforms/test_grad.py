"""Reverse mode."""

import jax
import pytest
import torch

from eqx_torch import torch2jax

from ..helpers import assert_trees_equal
from ..helpers.twins import Cube, every_twin, random_array, scalar


def _nth_grad(f, order, argnums):
    f = scalar(f)
    for _ in range(order):
        f = scalar(jax.grad(f, argnums)) if _ < order - 1 else jax.grad(f, argnums)
    return f


@every_twin
@pytest.mark.parametrize("order", [1, 2, 3])
def test_gradients_are_the_twins(getkey, twin, order):
    args = twin.args(getkey)
    actual, expected = (_nth_grad(f, order, twin.smooth) for f in (twin.wrapped, twin.jax))
    expected = jax.jit(expected)(*args)
    assert_trees_equal(jax.jit(actual)(*args), expected, rtol=1e-4, atol=1e-4)
    if order == 1:
        assert_trees_equal(actual(*args), expected, rtol=1e-4, atol=1e-4)


def test_a_backward_outside_of_autograd_has_no_derivative(getkey):
    class CubeByNumPy(Cube):
        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return torch.from_numpy(3 * x.detach().numpy() ** 2 * g.detach().numpy())

    x = random_array(getkey, (3,))
    f = torch2jax(lambda x: CubeByNumPy.apply(x))
    assert_trees_equal(jax.grad(lambda x: f(x).sum())(x), 3 * x**2)
    second = jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())
    with pytest.raises(Exception, match="cannot be differentiated again: its backward is computed"):
        jax.block_until_ready(second(x))
