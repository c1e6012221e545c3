"""Functions that use `torch.func`, sparse gradients or caches of their own inside."""

import random

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec as P

from eqx_torch import torch2jax

from ..helpers import assert_trees_equal


pytestmark = pytest.mark.filterwarnings("ignore:torch.func.vmap cannot batch")


def quartic(z):
    return (z**4).sum() + z[0] * z[1] * z[2]


INSIDE = {
    "hessian": lambda x: torch.func.hessian(quartic)(x).sum(),
    "jacfwd of jacfwd": lambda x: torch.func.jacfwd(torch.func.jacfwd(quartic))(x).sum(),
    "jvp of grad": lambda x: torch.func.jvp(torch.func.grad(quartic), (x,), (torch.ones_like(x),))[
        1
    ].sum(),
    "vmap of hessian": lambda x: torch.func.vmap(torch.func.hessian(quartic))(x[None]).sum(),
    "jacrev": lambda x: torch.func.jacrev(torch.func.jacrev(quartic))(x).sum(),
}
X = jnp.array([1.0, 0.5, 3.0])


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torch_func_inside(name):
    # Forward mode on the tensors that find out shapes is not torch's strength.
    f = torch2jax(INSIDE[name], output_shapes=jax.ShapeDtypeStruct((), jnp.float32))
    expected = lambda x: jax.hessian(quartic)(x).sum()  # noqa: E731
    for take in (jax.grad, jax.hessian):
        assert_trees_equal(take(f)(X), take(expected)(X), rtol=1e-5)
    assert_trees_equal(jax.vmap(f)(X[None]), expected(X)[None], rtol=1e-5)
    assert_trees_equal(jax.jvp(f, (X,), (X,)), jax.jvp(expected, (X,), (X,)), rtol=1e-5)


def test_batched_gradients_inside():
    def jacobian(x):
        z = x if x.requires_grad else x.detach().requires_grad_()
        eye = torch.eye(3, dtype=x.dtype)
        y = z.sin() * z.sum()
        return torch.autograd.grad(y, z, eye, is_grads_batched=True, create_graph=True)[0]

    expected = jax.jacrev(lambda z: jnp.sin(z) * z.sum())
    assert_trees_equal(jax.jacrev(torch2jax(jacobian))(X), jax.jacrev(expected)(X), rtol=1e-5)
    twice = jax.jacrev(jax.jacrev(torch2jax(jacobian)))(X)
    assert_trees_equal(twice, jax.jacrev(jax.jacrev(expected))(X), rtol=1e-5)


_ROWS = torch.tensor([[0, 1], [3, 1]])
_F = torch.nn.functional
SPARSE = {
    "embedding": lambda sparse: lambda w: (_F.embedding(_ROWS, w, sparse=sparse) ** 3).sum(),
    "embedding_bag": lambda sparse: (
        lambda w: (_F.embedding_bag(_ROWS, w, sparse=sparse, mode="sum") ** 2).sum()
    ),
    "gather": lambda sparse: (
        lambda w: (torch.gather(w, 0, _ROWS.repeat(1, 2)[:, :3], sparse_grad=sparse) ** 3).sum()
    ),
}


@pytest.mark.parametrize("residuals", ["tape", "recompute"])
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_sparse_gradients_arrive_dense(name, residuals):
    w = jnp.arange(15.0).reshape(5, 3) / 7
    f, expected = torch2jax(SPARSE[name](True), residuals=residuals), torch2jax(SPARSE[name](False))
    stacked = jnp.stack([w, 2 * w])
    total = lambda f: lambda x: jax.vmap(f)(x).sum()  # noqa: E731
    assert_trees_equal(jax.grad(f)(w), jax.grad(expected)(w))
    assert_trees_equal(jax.jit(jax.grad(f))(w), jax.grad(expected)(w))
    assert_trees_equal(jax.vmap(jax.grad(f))(stacked), jax.vmap(jax.grad(expected))(stacked))
    assert_trees_equal(jax.grad(total(f))(stacked), jax.grad(total(expected))(stacked))
    if name != "embedding_bag":  # of which torch has no second derivative
        twice = lambda f: jax.grad(lambda w: jax.grad(f)(w).sum())(w)  # noqa: E731
        assert_trees_equal(twice(f), twice(expected))


def cached():
    cache = {}

    def f(x):
        if "mask" not in cache:
            cache["mask"] = 2 * torch.ones_like(x)
        return x * cache["mask"]

    return torch2jax(f)


_ONE, _MANY = jnp.array([1.0, 2.0]), jnp.arange(6.0).reshape(3, 2)
USES = {
    "call": lambda m: m(_ONE),
    "jit": lambda m: jax.jit(lambda x: m(x))(_ONE),
    "vmap": lambda m: jax.vmap(m)(_MANY),
    "grad": lambda m: jax.grad(lambda x: m(x).sum())(_ONE),
    "vjp": lambda m: jax.vjp(m, _ONE)[1](_ONE)[0],
    "jvp": lambda m: jax.jvp(m, (_ONE,), (_ONE,))[1],
    "vmap of grad": lambda m: jax.vmap(jax.grad(lambda x: m(x).sum()))(_MANY),
}


@pytest.mark.parametrize("seed", range(10))
def test_a_cache_survives_any_order_of_uses(seed):
    f, draw = cached(), random.Random(seed)
    for name in draw.choices(list(USES), k=6):
        assert_trees_equal(USES[name](f), USES[name](lambda x: 2 * x))


SPECS = [
    ((2, 2), P("x", "y"), P("y")),
    ((2, 2), P("y", "x"), P("x")),
    ((2, 2), P("x"), None),
    ((2, 2), P(("x", "y")), None),
    ((2, 2), P(None, "y"), P("y")),
    ((2, 2), P(None, ("x", "y")), P(("x", "y"))),
    ((4,), P("x"), None),
    ((4,), P(None, "x"), P("x")),
]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.parametrize(("sizes", "spec", "out_specs"), SPECS)
def test_derivatives_of_a_batch_on_a_mesh(sizes, spec, out_specs, wrap):
    names = ("x", "y")[: len(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * len(sizes))
    f = torch2jax(lambda x, w: (x * w[0]).sin() * w[0], out_specs=out_specs)
    g = lambda x, w: jnp.sin(x * w[0]) * w[0]  # noqa: E731
    batch = lambda f: lambda x, w: jax.vmap(f, (0, None))(x, w)  # noqa: E731
    loss = lambda f: lambda x, w: (batch(f)(x, w) ** 2).sum()  # noqa: E731
    first = lambda f: jax.grad(loss(f), (0, 1))  # noqa: E731
    second = lambda f: jax.grad(  # noqa: E731
        lambda x, w: sum((u**2).sum() for u in first(f)(x, w)), (0, 1)
    )
    x, w = jnp.arange(16.0).reshape(4, 4) / 8, jnp.arange(4.0) + 1
    expected = [take(g)(x, w) for take in (batch, first, second)]
    with jax.set_mesh(mesh):
        xs, ws = jax.device_put(x, P(*spec)), jax.device_put(w, P())
        for take, right in zip((batch, first, second), expected, strict=True):
            assert_trees_equal(wrap(take(f))(xs, ws), right, rtol=1e-4)
