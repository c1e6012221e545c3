"""Values and derivatives under JAX's transformations are those of the same program in JAX."""

import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import j2t, t2j, torch2jax

from ..helpers import assert_trees_equal, to_numpy
from ..helpers.twins import random_array, scalar, Twin, TWINS
from .devices import bits, briefly, ON_GPU, on_torch, TORCH_DEVICE


TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "uint16",
    "uint32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
]
SMOOTH = Twin(
    lambda x, w: ((x @ w).tanh() * x.exp()).sum(-1),
    lambda x, w: (jnp.tanh(x @ w) * jnp.exp(x)).sum(-1),
    (((5, 3), "float32"), ((3, 3), "float32")),
)

FEW_TWINS = briefly(TWINS, "writes", "ids")
few_twins = pytest.mark.parametrize("twin", FEW_TWINS.values(), ids=FEW_TWINS)


@few_twins
def test_values(getkey, twin):
    args = twin.args(getkey)
    expected = twin.jax(*args)
    actual = jax.jit(twin.wrapped)(*args)
    assert_trees_equal(actual, expected, **TOLERANCE)
    assert_trees_equal(twin.wrapped(*args), expected, **TOLERANCE)
    leaf = next(y for y in jax.tree.leaves(actual) if isinstance(y, jax.Array))
    assert leaf.devices() == {jax.devices()[0]}


@few_twins
@pytest.mark.parametrize("order", [1, 2, 3])
def test_gradients(getkey, twin, order):
    args = twin.args(getkey)

    def gradient(f):
        for _ in range(order):
            f = jax.grad(scalar(f), twin.smooth)
        return jax.jit(f)

    actual, expected = gradient(twin.wrapped)(*args), gradient(twin.jax)(*args)
    assert_trees_equal(actual, expected, **TOLERANCE)


def _total(f):
    return lambda x, w: f(x, w).sum()


def _carried(f):
    def body(x, w):
        return x + 0.1 * f(x, w)[:, None], None

    return body


TRANSFORMATIONS = {
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), w),
    "vmap of grad": lambda f: (
        lambda x, w: jax.vmap(jax.grad(_total(f)), (0, None))(jnp.stack([x, 2 * x]), w)
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), w).sum(), (0, 1)
    ),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (w.sum() * x, w)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "jacrev": lambda f: jax.jacrev(f, (0, 1)),
    "hessian": lambda f: jax.hessian(_total(f), 1),
    "scan": lambda f: lambda x, w: jax.lax.scan(_carried(f), x, jnp.stack([w, w.T, -w])),
    "grad of scan": lambda f: jax.grad(
        lambda x, w: jax.lax.scan(_carried(f), x, jnp.stack([w, w.T, -w]))[0].sum(), (0, 1)
    ),
    "cond": lambda f: lambda x, w: jax.lax.cond(x.sum() > 0, f, lambda x, w: -f(x, w), x, w),
    "remat": lambda f: jax.grad(_total(jax.checkpoint(f)), (0, 1)),
    "remat of scan": lambda f: jax.grad(
        lambda x, w: jax.lax.scan(jax.checkpoint(_carried(f)), x, jnp.stack([w, w.T]))[0].sum()
    ),
    "linearize": lambda f: lambda x, w: jax.linearize(f, x, w)[1](x, w),
}
FEW_TRANSFORMATIONS = briefly(TRANSFORMATIONS, "vmap of grad", "remat of scan")


@pytest.mark.parametrize("transform", FEW_TRANSFORMATIONS.values(), ids=FEW_TRANSFORMATIONS)
def test_transformations(getkey, transform):
    args = SMOOTH.args(getkey)
    actual, expected = (jax.jit(transform(f))(*args) for f in (SMOOTH.wrapped, SMOOTH.jax))
    assert_trees_equal(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("method", ["sequential", "broadcast_all", "expand_dims"])
def test_other_ways_of_batching(getkey, method):
    x = random_array(getkey, (4, 3))
    f = torch2jax(torch.sin, vmap_method=method)
    assert_trees_equal(jax.jit(jax.vmap(f))(x), jnp.sin(x), **TOLERANCE)


def _values(getkey, dtype):
    """Every kind of value: of float dtypes also infinities, NaN and zeros of both signs."""
    x = random_array(getkey, (64,), "float32") * 4
    if dtype == "bool":
        return x > 0
    if jnp.issubdtype(dtype, jnp.integer):
        return x.astype("int32").astype(dtype)
    special = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 0.0, -0.0])
    x = jnp.concatenate([x, special]).astype(dtype)
    return x * (1 + 2j) if dtype == "complex64" else x


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_cross_bit_for_bit(getkey, dtype):
    x = _values(getkey, dtype)
    seen = []

    def f(x):
        seen.append(x.dtype)
        return x.clone(), x

    for y in jax.jit(torch2jax(f, output_shapes=(x, x)))(x):
        assert y.dtype == x.dtype
        assert (bits(y) == bits(x)).all()
    assert seen == [getattr(torch, dtype)]
    assert (bits(t2j(j2t(x))) == bits(x)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
def test_low_precision_is_computed_as_torch_does(getkey, dtype):
    x = random_array(getkey, (16, 16)).astype(dtype)

    def f(x):
        return (x @ x).tanh()

    def loss(x):
        return torch2jax(f)(x).real.sum()

    x_torch = on_torch(x).requires_grad_()
    y_torch = f(x_torch)
    (gradient,) = torch.autograd.grad(y_torch.real.sum(), x_torch)
    # The order in which products are summed may depend on where the operands lie.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if ON_GPU else {}
    assert_trees_equal(jax.jit(torch2jax(f))(x), y_torch, **tolerance)
    assert_trees_equal(jax.jit(jax.grad(loss))(x), gradient.conj(), **tolerance)


def test_64_bits(getkey, x64):
    x = random_array(getkey, (8, 8), "float64")
    ids = jnp.arange(5, dtype="int64")
    f = torch2jax(lambda x, ids: (x @ x, x[ids], ids.cumsum(0)))
    y, rows, sums = jax.jit(f)(x, ids)
    assert (y.dtype, rows.dtype, sums.dtype) == ("float64", "float64", "int64")
    assert_trees_equal((y, rows, sums), (x @ x, x[ids], jnp.cumsum(ids)), rtol=1e-10)


def test_autocast(getkey):
    x = random_array(getkey, (8, 8))
    f = torch2jax(lambda x: x @ x)
    with torch.autocast(TORCH_DEVICE.type, dtype=torch.bfloat16):
        y = jax.jit(f)(x)
        expected = on_torch(x) @ on_torch(x)
    assert y.dtype == jnp.bfloat16
    assert_trees_equal(y, expected, rtol=2e-2, atol=2e-2)


def test_results_on_the_host_are_brought_to_the_device(getkey):
    x = random_array(getkey, (5,))
    f = torch2jax(lambda x: x.detach().cpu().sin(), output_shapes=x)
    assert_trees_equal(jax.jit(f)(x), to_numpy(jnp.sin(x)))
