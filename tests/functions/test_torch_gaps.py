"""Where torch lacks something, or loses it without a word."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import torch2jax

from ..helpers import assert_trees_equal


@pytest.fixture(scope="module")
def square():
    """A custom operator: `torch.func.jvp` gives zeros for its tangents."""

    @torch.library.custom_op("eqx_torch_tests::square", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    square.register_fake(torch.empty_like)
    square.register_autograd(
        lambda ctx, u: 2 * u * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return square


def _quartic(square):
    return torch2jax(lambda x: square(x) * x + square(square(x)))


def _jax_quartic(x):
    return x**3 + x**4


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(lambda x: f(x).sum()),
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        lambda f: lambda x: jax.jvp(jax.grad(lambda x: f(x).sum()), (x,), (x,)),
    ],
)
def test_custom_operators(square, transform):
    x = jnp.array([1.0, 2.0])
    assert_trees_equal(transform(_quartic(square))(x), transform(_jax_quartic)(x), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot batch:UserWarning")
@pytest.mark.parametrize(
    "transform",
    [
        jax.jacfwd,
        jax.jacrev,
        lambda f: jax.hessian(lambda x: f(x).sum()),
        lambda f: jax.jacfwd(jax.jacfwd(f)),
        lambda f: jax.jacrev(jax.jacfwd(f)),
        lambda f: jax.vmap(lambda x: jax.jvp(f, (x,), (x,))),
    ],
)
def test_custom_operators_in_batches(square, transform):
    x = jnp.array([1.0, 2.0])
    actual = jax.jit(transform(_quartic(square)))(x)
    assert_trees_equal(actual, transform(_jax_quartic)(x), rtol=1e-5)


@pytest.mark.parametrize("transform", [jax.jacfwd, jax.jacrev])
def test_operator_that_drops_tangents(transform):
    def products(x):
        index = torch.tensor([0, 0, 1])
        return torch.ones(2).scatter_reduce(0, index, x, "prod")

    actual = jax.jit(transform(torch2jax(products)))(jnp.array([2.0, 3.0, 5.0]))
    assert_trees_equal(actual, np.array([[3.0, 2.0, 0.0], [0.0, 0.0, 1.0]], np.float32))


@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot batch:UserWarning")
def test_members_of_a_loop_have_memory_of_their_own():
    def function(x):
        assert x.untyped_storage().nbytes() == x.nbytes
        return x.view(-1) * (2 if x.sum().item() > 0 else 3)

    shape = jax.ShapeDtypeStruct((3,), "float32")
    looped = jax.jit(jax.vmap(torch2jax(function, output_shapes=shape), in_axes=1))
    x = np.array([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]], np.float32)
    assert_trees_equal(looped(x), np.stack([2 * x[:, 0], 3 * x[:, 1]]))


def test_results_that_torch_names_are_namedtuples():
    x = jnp.array([[3.0, 1.0], [4.0, 1.5]])
    values, indices = jax.jit(torch2jax(torch.sort))(x)
    assert_trees_equal(values, jnp.sort(x))
    assert_trees_equal(indices, jnp.argsort(x))
    largest = jax.vmap(torch2jax(lambda row: torch.max(row, 0)))(x)
    assert_trees_equal(largest.values, x.max(1))
    assert_trees_equal(jax.tree.map(lambda y: y + 1, largest).indices, x.argmax(1) + 1)
