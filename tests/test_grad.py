"""Reverse mode."""

import jax
import pytest

from .helpers import assert_trees_equal
from .twins import every_twin, scalar


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
