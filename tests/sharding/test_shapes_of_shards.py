"""Where shapes are found out, it is those of one shard; `out_specs` says how shards form the whole.

The reference is `jax.shard_map` of the same function written in JAX.
"""

import random

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec as P
from jaxtyping import Float
from torch import Tensor

from eqx_torch import from_torch, ShapeError, ShardingError, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.meshes import explicit_mesh


X = jnp.arange(24.0).reshape(8, 3)

PER_SHARD = {
    "kept sum": (
        lambda x: x.sum(0, keepdim=True),
        lambda x: x.sum(0, keepdims=True),
        P("x"),
    ),
    "sum of rows": (lambda x: (x * 2, x.sum(0)), lambda x: (x * 2, x.sum(0)), (P("x"), P("x"))),
    "mean a device": (lambda x: x.mean()[None], lambda x: x.mean()[None], P("x")),
    "along another axis": (
        lambda x: x.sum(0, keepdim=True).T,
        lambda x: x.sum(0, keepdims=True).T,
        P(None, "x"),
    ),
    "rows of its own": (
        lambda x: torch.cat([x, x[:1]]),
        lambda x: jnp.concatenate([x, x[:1]]),
        P("x"),
    ),
    "a tree": (
        lambda x: {"all": x.sin(), "top": x.amax(0)[None, None]},
        lambda x: {"all": jnp.sin(x), "top": x.max(0)[None, None]},
        {"all": P("x"), "top": P(None, "x")},
    ),
}
every_per_shard = pytest.mark.parametrize(
    ("f", "twin", "out_specs"), PER_SHARD.values(), ids=PER_SHARD
)


class Wrapped(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


@every_per_shard
@pytest.mark.parametrize("wrap", [torch2jax, lambda f, **kw: from_torch(Wrapped(f), **kw)])
@pytest.mark.parametrize("jit", [eqx.filter_jit, lambda f: f], ids=["jit", "eager"])
def test_results_are_put_together_as_in_shard_map(wrap, jit, f, twin, out_specs):
    mesh = explicit_mesh(4)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("x"))
        expected = jax.jit(jax.shard_map(twin, in_specs=P("x"), out_specs=out_specs))(x)
        actual = jit(wrap(f, out_specs=out_specs))(x)
        assert_trees_equal(actual, expected, rtol=1e-6)
        assert jax.tree.map(lambda y: jax.typeof(y).sharding.spec, actual) == jax.tree.map(
            lambda y: jax.typeof(y).sharding.spec, expected
        )


def test_gradients_of_results_per_shard():
    f, twin, out_specs = PER_SHARD["kept sum"]
    with jax.set_mesh(explicit_mesh(4)):
        x = jax.device_put(X, P("x"))
        wrapped = torch2jax(f, out_specs=out_specs)
        mapped = jax.shard_map(twin, in_specs=P("x"), out_specs=out_specs)
        loss = lambda f: jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))  # noqa: E731
        assert_trees_equal(loss(wrapped)(x), loss(mapped)(x), rtol=1e-6)


def test_a_number_a_shard_is_refused_with_what_to_write():
    with jax.set_mesh(explicit_mesh(4)):
        x = jax.device_put(X, P("x"))
        with pytest.raises(ShardingError, match=r"has 0 dimensions.*one value for each shard, `y"):
            jax.eval_shape(torch2jax(lambda x: x.mean(), out_specs=P("x")), x)


ONLY_A_SHARD = {
    "one row": (torch.nn.BatchNorm1d(3), X, P("x"), "Expected more than 1 value per channel"),
    "a part of the features": (torch.nn.Linear(8, 2), X.T, P(None, "x"), "cannot be multiplied"),
    "no window fits": (torch.nn.AvgPool1d(3), X.T, P(None, "x"), "Output size is too small"),
}


@pytest.mark.parametrize(
    ("module", "x", "spec", "message"), ONLY_A_SHARD.values(), ids=ONLY_A_SHARD
)
@pytest.mark.parametrize("wrap", [torch2jax, from_torch])
def test_errors_that_only_a_shard_has_come_when_jax_traces(wrap, module, x, spec, message):
    module = torch.nn.Sequential(module)
    if wrap is from_torch and isinstance(module[0], torch.nn.BatchNorm1d):
        model, state = eqx.nn.make_with_state(from_torch)(module, out_specs=spec)
    else:
        model, state = wrap(module, out_specs=spec), None
    with jax.set_mesh(explicit_mesh(8)):
        x = jax.device_put(x, spec)
        model, state = jax.tree.map(
            lambda a: jax.device_put(a, P()) if eqx.is_array(a) else a, (model, state)
        )
        own = {} if state is None else {"state": state}
        with pytest.raises(ShapeError, match=message) as info:
            eqx.filter_eval_shape(lambda x: model(x, **own), x)
    assert "(the shapes of one shard)" in str(info.value)


def test_declared_shapes_are_global():
    def annotated(x: Float[Tensor, "batch d"]) -> Float[Tensor, "batch"]:
        assert x.shape[0] == 2
        return x.sum(1)

    with jax.set_mesh(explicit_mesh(4)):
        x = jax.device_put(X, P("x"))
        plain = lambda x: annotated(x)  # noqa: E731
        shape = jax.ShapeDtypeStruct((8,), "float32")
        for f in (
            torch2jax(annotated, out_specs=P("x")),
            torch2jax(plain, output_shapes=shape, out_specs=P("x")),
        ):
            assert_trees_equal(jax.jit(f)(x), X.sum(1))
        wrong = torch2jax(
            plain, output_shapes=jax.ShapeDtypeStruct((6,), "float32"), out_specs=P("x")
        )
        with pytest.raises(ShardingError, match="cannot be divided"):
            wrong(x)


def test_inside_shard_map_it_is_as_jax_has_it():
    f, twin, out_specs = PER_SHARD["kept sum"]
    with jax.set_mesh(explicit_mesh(4)):
        x = jax.device_put(X, P("x"))
        mapped = lambda f: jax.jit(jax.shard_map(f, in_specs=P("x"), out_specs=out_specs))  # noqa: E731
        assert_trees_equal(mapped(torch2jax(f))(x), mapped(twin)(x))


def test_shards_have_their_own_values():
    """An eager call has them at hand."""
    with jax.set_mesh(explicit_mesh(4)):
        x = jax.device_put(X + 1, P("x"))
        f = torch2jax(lambda x: x[x > 0], out_specs=P("x"))
        assert_trees_equal(f(x), (X + 1).reshape(-1))


# Of the rows of a shard, each written in torch and in JAX.
ROWS = {
    "kept sum": (lambda x: x.sum(0, keepdim=True), lambda x: x.sum(0, keepdims=True)),
    "mean": (lambda x: x.mean(0)[None], lambda x: x.mean(0)[None]),
    "running sum": (lambda x: x.cumsum(0), lambda x: jnp.cumsum(x, 0)),
    "from its mean": (lambda x: x - x.mean(0), lambda x: x - x.mean(0)),
    "softmax": (lambda x: x.softmax(0), lambda x: jax.nn.softmax(x, 0)),
    "flipped": (lambda x: x.flip(0) * x, lambda x: x[::-1] * x),
    "sorted": (lambda x: x.sort(0).values, lambda x: jnp.sort(x, 0)),
    "first row": (lambda x: x[:1].sin(), lambda x: jnp.sin(x[:1])),
    "twice": (lambda x: torch.cat([x, x.cos()]), lambda x: jnp.concatenate([x, jnp.cos(x)])),
    "products": (lambda x: x.T @ x, lambda x: x.T @ x),
    "a vector": (lambda x: x.square().sum(0), lambda x: jnp.square(x).sum(0)),
}
MESHES = {
    "2": ((2,), P("x")),
    "4": ((4,), P("x")),
    "2x2 over both": ((2, 2), P(("x", "y"))),
    "2x2 over one": ((2, 2), P("y")),
}


def _loss(f):
    return lambda x: sum((jnp.cos(jnp.arange(y.size)).reshape(y.shape) * y).sum() for y in f(x))


# What is done to a function of all rows.
WAYS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.jit(jax.grad(_loss(f))),
    "eager grad": lambda f: jax.grad(_loss(f)),
    "vmap": lambda f: jax.jit(jax.vmap(f, in_axes=2, out_axes=-1)),
    "grad of vmap": lambda f: jax.jit(jax.grad(_loss(jax.vmap(f, in_axes=2, out_axes=-1)))),
    "jvp": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x * x,))),
}


def check_rows(seed):
    """Random results per shard, of random combinations of these functions, in every way."""
    draw = random.Random(seed)
    (sizes, spec), way = MESHES[draw.choice(list(MESHES))], draw.choice(list(WAYS))
    names = draw.sample(list(ROWS), draw.randint(1, 3))
    first = draw.choice([name for name in ROWS if name != "a vector"])
    f = lambda x: tuple(ROWS[name][0](ROWS[first][0](x)) for name in names)  # noqa: E731
    twin = lambda x: tuple(ROWS[name][1](ROWS[first][1](x)) for name in names)  # noqa: E731
    shape = (8, 3, 2) if "vmap" in way else (8, 3)
    x = jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))
    mesh = jax.make_mesh(sizes, ("x", "y")[: len(sizes)], (AxisType.Explicit,) * len(sizes))
    with jax.set_mesh(mesh):
        x = jax.device_put(x, spec)
        wrapped = torch2jax(f, out_specs=spec)
        mapped = jax.shard_map(twin, in_specs=spec, out_specs=spec)
        expected = WAYS[way](jax.jit(mapped))(x)
        what = f"{way} of {names} of {first} on {sizes}, {spec}"
        for a, b in zip(
            jax.tree.leaves(WAYS[way](wrapped)(x)), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(a, b, 1e-4, 1e-5, err_msg=what)
            assert jax.typeof(a).sharding == jax.typeof(b).sharding, what


@pytest.mark.parametrize("part", range(2))
def test_random_results_per_shard(part):
    for seed in range(10 * part, 10 * part + 8):
        check_rows(seed)


@pytest.mark.slow
def test_many_random_results_per_shard():
    for seed in range(1000, 1300):
        check_rows(seed)
        if seed % 50 == 0:
            jax.clear_caches()
