"""Jacobians and Hessians in every mixture of modes."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from ..helpers import assert_trees_equal
from ..helpers.twins import scalar, TWINS, twins


pytestmark = pytest.mark.filterwarnings("ignore:torch.func.vmap cannot batch")

MODES = {"fwd": jax.jacfwd, "rev": jax.jacrev}


@twins("nested", "layouts", "top", "hidden_input", "constant", "linear")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_jacobian(getkey, twin, mode):
    args = twin.args(getkey)

    def jacobian(f):
        def inexact(*xs):
            return [y for y in jax.tree.leaves(f(*xs)) if jnp.issubdtype(y.dtype, jnp.floating)]

        return jax.jit(mode(inexact, twin.smooth))(*args)

    assert_trees_equal(jacobian(twin.wrapped), jacobian(twin.jax), rtol=1e-4)


@twins("nested", "writes", "hidden_input", "inner_grad")
@pytest.mark.parametrize("modes", list(itertools.product(MODES, MODES)), ids="-over-".join)
def test_hessian(getkey, twin, modes):
    args = twin.args(getkey)
    outer, inner = (MODES[m] for m in modes)

    def hessian(f):
        return jax.jit(outer(inner(scalar(f), twin.smooth), twin.smooth))(*args)

    assert_trees_equal(hessian(twin.wrapped), hessian(twin.jax), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_holomorphic_jacobian(getkey, mode):
    twin = TWINS["complex"]
    z, w = twin.args(getkey)
    actual, expected = (
        mode(lambda z, f=f: f(z, w), holomorphic=True)(z) for f in (twin.wrapped, twin.jax)
    )
    assert_trees_equal(actual, expected)
