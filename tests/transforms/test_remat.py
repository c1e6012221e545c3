"""Rematerialisation."""

import jax
import jax.numpy as jnp
import pytest

from eqx_torch import torch2jax

from ..helpers import assert_trees_equal
from ..helpers.twins import random_array, scalar, twins


POLICIES = {
    "all": None,
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
}


# JAX cannot save complex numbers there.
@twins("nested", "writes", "ids", "top", "hidden_input", "inner_grad", "detached")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_gradients(getkey, twin, policy):
    args = twin.args(getkey)

    def gradients(f):
        loss = scalar(jax.checkpoint(f, policy=policy))
        return jax.jit(jax.grad(loss, twin.smooth))(*args)

    assert_trees_equal(gradients(twin.wrapped), gradients(twin.jax), rtol=1e-4, atol=1e-4)


def test_remat_of_layers_in_a_scan(getkey):
    x, ws = random_array(getkey, (2, 4)), random_array(getkey, (3, 4, 4))

    def everything(layer):
        @jax.checkpoint
        def step(x, w):
            return layer(x, w), None

        def loss(x, ws):
            return (jax.lax.scan(step, x, ws)[0] ** 2).sum()

        both = jax.grad(loss, (0, 1))
        return jax.jit(lambda x, ws: jax.jvp(both, (x, ws), (x, ws)))(x, ws)

    actual = everything(torch2jax(lambda x, w: (x @ w).tanh()))
    expected = everything(lambda x, w: jnp.tanh(x @ w))
    assert_trees_equal(actual, expected, rtol=1e-4, atol=1e-4)


def test_the_forward_runs_again_in_the_backward(getkey):
    x = random_array(getkey, (3,))
    forwards = []

    def f(x):
        forwards.append(None)
        return x.sin()

    g = jax.checkpoint(torch2jax(f, output_shapes=lambda x: x))
    gradient = jax.jit(jax.grad(lambda x: jnp.sin(g(x)).sum()))
    assert_trees_equal(gradient(x), jnp.cos(jnp.sin(x)) * jnp.cos(x))
    assert forwards
