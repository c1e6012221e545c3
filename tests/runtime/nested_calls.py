"""JAX inside of torch inside of JAX. Run by `test_threads.py`, in a process of its own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from eqx_torch import (
    check_errors,
    EqxTorchError,
    from_torch,
    j2t,
    t2j,
    torch2jax,
    tree_j2t,
    tree_t2j,
)

from ..helpers import assert_trees_equal
from ..helpers.meshes import explicit_mesh, put


X = jnp.arange(8.0)
INNER = torch2jax(torch.sin)
MODULE = from_torch(torch.nn.Linear(8, 8))
REFUSED = (
    "was called inside a torch function that JAX is running. Its device may be waiting for that "
    "function to end, so the call might never return. Call the torch function that was wrapped, or "
    "return to JAX and call it there."
)


def _in_a_new_program():
    return jax.jit(lambda x: INNER(x) + 1)(X)


NESTED = {
    "wrapped": (lambda x: INNER(X), f"`sin` {REFUSED}"),
    "module": (lambda x: MODULE(X), f"`Linear` {REFUSED}"),
    "new program": (lambda x: _in_a_new_program(), f"`sin` {REFUSED}"),
    "gradient": (lambda x: jax.grad(lambda x: INNER(x).sum())(X), f"`sin` {REFUSED}"),
    "t2j": (lambda x: t2j(x), "t2j was called inside a torch function that JAX is running."),
    "tree_t2j": (lambda x: tree_t2j([x]), "t2j was called inside a torch function"),
    "t2j of another": (lambda x: t2j(torch.ones(3)), "t2j was called inside a torch function"),
}


class Nested:
    """A torch function that calls JAX, unless it is told to behave."""

    def __init__(self, call):
        self.call = call
        self.behaves = False

    def __call__(self, x):
        if not self.behaves:
            self.call(x)
        return x * 2


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("call", "message"), NESTED.values(), ids=NESTED)
def test_on_one_device(how, call, message):
    jax.block_until_ready((INNER(X), MODULE(X)))
    nested = Nested(call)
    f = how(torch2jax(nested, output_shapes=X))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as info:
        jax.block_until_ready(f(X))
    assert message in str(info.value)
    nested.behaves = True
    assert_trees_equal(f(X), 2 * X)


@pytest.mark.parametrize(("call", "message"), NESTED.values(), ids=NESTED)
def test_on_a_mesh(call, message):
    """Between collectives, where a device that waits would stop all others."""
    jax.block_until_ready((INNER(X), MODULE(X)))
    nested = Nested(call)
    mesh = explicit_mesh(8)
    with jax.set_mesh(mesh):
        x = put(X, mesh, "x")
        local = torch2jax(nested, output_shapes=lambda x: x)
        body = lambda x: jax.lax.psum(local(x + jax.lax.psum(x, "x")), "x")  # noqa: E731
        f = jax.jit(jax.shard_map(body, in_specs=P("x"), out_specs=P()))
        assert_trees_equal(f(x), np.full(1, np.nan, np.float32))
    with pytest.raises(EqxTorchError, match=re.escape(message)):
        check_errors()
    nested.behaves = True
    with jax.set_mesh(mesh):
        assert_trees_equal(f(x), np.float32([2 * (8 + 1) * X.sum()]))
    check_errors()


def test_arrays_that_are_ready_can_be_converted():
    constant = jnp.full(8, 3.0).block_until_ready()
    f = torch2jax(lambda x: x * j2t(constant) + tree_j2t([constant])[0], output_shapes=X)
    assert_trees_equal(jax.jit(f)(X), 3 * X + 3)


def test_arrays_that_are_not_ready_cannot():
    """The device that computes them is the one that waits."""

    class NeverReady:
        def __enter__(self):
            self.original = type(X).is_ready
            type(X).is_ready = lambda array: False

        def __exit__(self, *error):
            type(X).is_ready = self.original

    f = torch2jax(lambda x: x * j2t(X), output_shapes=X)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as info, NeverReady():
        jax.block_until_ready(jax.jit(f)(X))
    assert (
        "j2t was called on a float32[8] that is not computed yet, inside a torch function"
        in str(info.value)
    )
    assert_trees_equal(jax.jit(lambda x: f(x))(X), X * X)


def test_the_torch_function_itself_can_be_called():
    inner = torch.sin
    f = torch2jax(lambda x: inner(x) * 2)
    assert_trees_equal(jax.jit(lambda x: INNER(f(x)))(X), jnp.sin(2 * jnp.sin(X)), rtol=1e-5)
