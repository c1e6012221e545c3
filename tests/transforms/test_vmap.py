"""Batches, by every method."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import torch2jax

from ..helpers import assert_trees_equal
from ..helpers.batches import batch_aware, batch_aware_in_jax, every_method, loops, METHODS
from ..helpers.twins import every_twin, random_array, TWINS, twins


@loops
@every_twin
def test_vmap(getkey, twin):
    args = twin.args(getkey, 3)
    expected = jax.jit(jax.vmap(twin.jax))(*args)
    assert_trees_equal(jax.jit(jax.vmap(twin.wrapped))(*args), expected)


@loops
@twins("nested", "writes", "ids", "top", "hidden_input", "inner_grad", "complex", "empty")
@pytest.mark.parametrize("method", ["torch", "sequential"])
def test_nested_vmap_with_axes_anywhere(getkey, twin, method):
    args = tuple(jnp.moveaxis(x, 0, -1) for x in twin.args(getkey, 2, 3))
    wrapped = torch2jax(twin.torch, vmap_method=method)

    def nested(f):
        return jax.jit(jax.vmap(jax.vmap(f), in_axes=-1, out_axes=-1))(*args)

    assert_trees_equal(nested(wrapped), nested(twin.jax))


@every_method
@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 1), (1, 0)], ids=str)
def test_one_and_two_axes_by_every_method(getkey, method, in_axes):
    def over(f):
        batched = jax.vmap(f, in_axes, out_axes=(0, 1))
        twice = jax.vmap(batched, (1, None))
        return batched(*args), jax.jit(twice)(jnp.stack([args[0]] * 3, 1), args[1])

    args = [
        random_array(getkey, (4,) if axis is None else (2, 4) if axis == 0 else (4, 2))
        for axis in in_axes
    ]
    f = torch2jax(batch_aware, vmap_method=method)
    assert_trees_equal(over(f), over(batch_aware_in_jax))


def test_what_each_method_shows_the_function(getkey):
    seen = {}

    def shapes(method):
        def f(x, y):
            if type(x) is torch.Tensor:
                seen[method] = tuple(x.shape), tuple(y.shape)
            return x + y

        return torch2jax(f, vmap_method=method, output_shapes=lambda x, y: x)

    x, y = jnp.ones((3, 4)), jnp.ones(4)
    for method in METHODS:
        result = jax.vmap(shapes(method), (0, None))(x, y)
        assert_trees_equal(result, x + y)
    assert seen == {
        "torch": ((4,), (4,)),
        "sequential": ((4,), (4,)),
        "broadcast_all": ((3, 4), (3, 4)),
        "expand_dims": ((3, 4), (1, 4)),
    }


def _branches(x):
    return x.sin() if x.sum() > 0 else x.cos()


def _branches_in_jax(x):
    return jnp.where(x.sum() > 0, jnp.sin(x), jnp.cos(x))


def test_control_flow_on_values_loops_with_one_warning(getkey):
    x = random_array(getkey, (5, 3))
    f = torch2jax(_branches, output_shapes=lambda x: x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert_trees_equal(jax.vmap(f)(x), jax.vmap(_branches_in_jax)(x))
        assert_trees_equal(
            jax.jit(jax.vmap(jax.grad(lambda x: f(x).sum())))(x),
            jax.vmap(jax.grad(lambda x: _branches_in_jax(x).sum()))(x),
        )
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith(
        "torch.func.vmap cannot batch `_branches`, so the members of the batch are computed one "
        'after another. Pass vmap_method="sequential" if this is what you want, or make the '
        "function independent of the values of its inputs. torch said: "
    )
    assert "data-dependent control flow" in message


def test_sequential_does_not_warn(getkey):
    x = random_array(getkey, (5, 3))
    f = torch2jax(_branches, output_shapes=lambda x: x, vmap_method="sequential")
    assert_trees_equal(jax.vmap(f)(x), jax.vmap(_branches_in_jax)(x))


def test_an_error_in_a_batch_is_the_error_of_the_function():
    def f(x):
        raise ValueError("no such luck")

    f = torch2jax(f, output_shapes=lambda x: x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: no such luck"):
        jax.vmap(f)(jnp.ones((2, 3)))


@every_method
def test_an_empty_batch(method):
    f = torch2jax(batch_aware, vmap_method=method)
    args = jnp.ones((0, 4)), jnp.ones((0, 4))
    assert_trees_equal(jax.vmap(f)(*args), jax.vmap(batch_aware_in_jax)(*args))
    assert_trees_equal(
        jax.vmap(jax.grad(lambda *xs: f(*xs)[0]))(*args),
        jax.vmap(jax.grad(lambda *xs: batch_aware_in_jax(*xs)[0]))(*args),
    )


def test_statics_and_keywords_are_not_batched(getkey):
    def f(x, exponent, *, scale, shift=None):
        return scale * x**exponent if shift is None else x

    x, scale = random_array(getkey, (3, 2)), random_array(getkey, (3,))
    actual = jax.vmap(lambda x, s: torch2jax(f)(x, 2, scale=s))(x, scale)
    assert_trees_equal(actual, scale[:, None] * x**2)


@pytest.mark.filterwarnings("ignore:.*draws random numbers from torch's own generator")
def test_batched_random_numbers_differ_between_members():
    f = torch2jax(lambda x: x + torch.rand(4))
    ys = jax.vmap(f)(jnp.zeros((2, 4)))
    assert not np.array_equal(ys[0], ys[1])


def test_collectives_of_the_mapped_axis(getkey):
    twin = TWINS["elementwise"]
    args = twin.args(getkey, 3)

    def normalised(f):
        def g(x, y):
            z = f(x, y)
            return z - jax.lax.pmean(z, "batch")

        return jax.vmap(g, axis_name="batch")(*args)

    assert_trees_equal(normalised(twin.wrapped), normalised(twin.jax))
