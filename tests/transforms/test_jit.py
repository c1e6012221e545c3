"""Calls under `jax.jit` and outside of it."""

import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import torch2jax

from ..helpers import assert_trees_equal
from ..helpers.twins import every_twin, random_array


@every_twin
def test_eager_and_jitted_are_the_twin(getkey, twin):
    args = twin.args(getkey)
    expected = twin.jax(*args)
    assert_trees_equal(twin.wrapped(*args), expected)
    assert_trees_equal(jax.jit(twin.wrapped)(*args), expected)


def test_jit_is_switched_off(getkey):
    x = random_array(getkey, (3,))
    f = torch2jax(torch.sin)
    with jax.disable_jit():
        assert_trees_equal(f(x), jnp.sin(x))
        assert_trees_equal(jax.jit(f)(x), jnp.sin(x))
        assert_trees_equal(jax.grad(lambda x: f(x).sum())(x), jnp.cos(x))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_nans_and_infinities_are_found(transform):
    log = transform(torch2jax(torch.log))
    with jax.debug_nans(True):
        assert_trees_equal(log(jnp.ones(3)), jnp.zeros(3))
        with pytest.raises(
            FloatingPointError, match="invalid value \\(nan\\) encountered in torch's log"
        ):
            jax.block_until_ready(log(-jnp.ones(3)))
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="\\(inf\\)"):
        jax.block_until_ready(log(jnp.zeros(3)))
