"""Batches of derivatives and derivatives of batches."""

import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import from_torch, j2t, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.batches import batch_aware, batch_aware_in_jax, every_method, loops
from ..helpers.twins import random_array, scalar, twins


pytestmark = loops


@twins("nested", "writes", "ids", "top", "hidden_input", "inner_grad", "complex", "empty")
@pytest.mark.parametrize("method", ["torch", "sequential"])
@pytest.mark.covering(4)
def test_vmap_of_grad_and_grad_of_vmap(getkey, twin, method):
    args = twin.args(getkey, 3)
    wrapped = torch2jax(twin.torch, vmap_method=method)

    def both(f):
        inner = jax.vmap(jax.grad(scalar(f), twin.smooth))
        outer = jax.grad(scalar(jax.vmap(f)), twin.smooth)
        return jax.jit(lambda *xs: (inner(*xs), outer(*xs)))(*args)

    assert_trees_equal(both(wrapped), both(twin.jax), rtol=1e-4, atol=1e-4)


@twins("nested", "writes", "ids", "top", "hidden_input", "inner_grad", "complex")
@pytest.mark.covering(4)
def test_derivative_of_a_batch_of_derivatives(getkey, twin):
    args = twin.args(getkey, 2)

    def sandwich(f):
        inner = jax.vmap(jax.grad(scalar(f), twin.smooth))
        return jax.jit(jax.grad(scalar(inner), twin.smooth))(*args)

    assert_trees_equal(sandwich(twin.wrapped), sandwich(twin.jax), rtol=1e-4, atol=1e-4)


@every_method
@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)], ids=str)
@pytest.mark.covering(2)
def test_unbatched_arguments_get_the_sum(getkey, method, in_axes):
    args = [random_array(getkey, (4,) if axis is None else (3, 4)) for axis in in_axes]
    f = torch2jax(batch_aware, vmap_method=method)

    def everything(f):
        loss = scalar(jax.vmap(f, in_axes))
        inner = jax.vmap(jax.grad(scalar(f), (0, 1)), in_axes)
        second = jax.vmap(jax.hessian(scalar(f)), in_axes)
        return jax.jit(
            lambda *xs: (
                jax.grad(loss, (0, 1))(*xs),
                inner(*xs),
                jax.hessian(loss, (0, 1))(*xs),
                second(*xs),
                jax.jvp(jax.vmap(f, in_axes), xs, xs),
            )
        )(*args)

    assert_trees_equal(everything(f), everything(batch_aware_in_jax), rtol=1e-4, atol=1e-4)


@every_method
@pytest.mark.covering(2)
def test_two_batches_around_a_derivative(getkey, method):
    x, y = random_array(getkey, (2, 3, 4)), random_array(getkey, (3, 4))
    f = torch2jax(batch_aware, vmap_method=method)

    def nested(f):
        gradient = jax.grad(scalar(f), (0, 1))
        return jax.vmap(jax.vmap(gradient), (0, None), out_axes=1)(x, y)

    assert_trees_equal(nested(f), nested(batch_aware_in_jax), rtol=1e-4)


def test_batched_pullback(getkey):
    """One forward, many cotangents."""
    x = random_array(getkey, (4,))
    us = random_array(getkey, (5, 4))
    f = torch2jax(lambda x: x.sin() * x.flip(0))

    def pulled(f):
        return jax.vmap(jax.vjp(f, x)[1])(us)

    assert_trees_equal(pulled(f), pulled(lambda x: jnp.sin(x) * x[::-1]))


class HookedWithin(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda g: 0.5 * g)
        return y.sin()


def hooked_from_outside():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    net[1].register_full_backward_hook(lambda module, inner, outer: (0.5 * inner[0],))
    return net


@pytest.mark.parametrize("make", [lambda: HookedWithin(3, 2), hooked_from_outside])
def test_hooks_are_not_passed_by_in_a_batch(make, getkey):
    """In a batch of torch.func no tensor seems to require gradients, and torch sets no hooks."""
    module = make()
    x = jax.random.normal(getkey(), (5, 1, 3))
    inputs = j2t(x).clone().requires_grad_()
    (expected,) = torch.autograd.grad(module(inputs).sum(), inputs)
    gradients = jax.vmap(jax.grad(lambda x: from_torch(module)(x).sum()))
    for _ in range(2):
        assert_trees_equal(gradients(x), expected, rtol=1e-5)
    assert_trees_equal(jax.jit(gradients)(x), expected, rtol=1e-5)
    v = jnp.ones_like(x)
    f = lambda x: jax.vmap(from_torch(module))(x).sum()  # noqa: E731
    assert_trees_equal(jax.jvp(f, (x,), (v,))[1], expected.sum(), rtol=1e-4)
