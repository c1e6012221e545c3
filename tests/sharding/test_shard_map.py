"""Calls inside of `jax.shard_map`, which type-checks them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, PartitionSpec as P

from eqx_torch import ShardingError, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.meshes import collectives, put
from ..helpers.twins import random_array, scalar


def _layer(x, w):
    return {"y": (x @ w).tanh(), "norm": x.square().sum(-1)}


def _layer_in_jax(x, w):
    return {"y": jnp.tanh(x @ w), "norm": (x**2).sum(-1)}


def _everything(f):
    return jax.jit(
        lambda x, w: (
            f(x, w),
            jax.grad(scalar(f), (0, 1))(x, w),
            jax.jvp(f, (x, w), (x, w)),
            jax.jvp(jax.grad(scalar(f), (0, 1)), (x, w), (x, w)),
        )
    )


def _forward(f):
    """What JAX can do with a `jax.shard_map` inside another: it cannot lower the gradient."""
    return jax.jit(lambda x, w: jax.jvp(f, (x, w), (x, w)))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_data_parallel(getkey, axis_type):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    x, w = random_array(getkey, (16, 4)), random_array(getkey, (4, 4))
    f = jax.shard_map(
        torch2jax(_layer), mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=True
    )
    args = put(x, mesh, "x"), put(w, mesh)
    expected = _everything(_layer_in_jax)(x, w)
    assert_trees_equal(_everything(f)(*args), expected, rtol=1e-4, atol=1e-4)
    assert_trees_equal(f(*args), expected[0])
    assert collectives(f, *args) == set()
    assert collectives(jax.grad(scalar(f), 1), *args) == {"all-reduce"}


@pytest.mark.parametrize("other", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.filterwarnings("ignore:.*do not prove that they are replicated")
def test_manual_over_one_of_two_axes(getkey, other):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(other,) * 2)
    x, w = random_array(getkey, (8, 4)), random_array(getkey, (4, 4))
    with jax.set_mesh(mesh):
        f = jax.shard_map(
            torch2jax(_layer), in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"}
        )
        args = put(x, mesh, "x"), put(w, mesh)
        expected = _everything(_layer_in_jax)(x, w)
        assert_trees_equal(_everything(f)(*args), expected, rtol=1e-4, atol=1e-4)


def test_explicit_inside_of_manual(getkey):
    """One axis is the user's, the call is split over the other."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    x, w = random_array(getkey, (8, 4)), random_array(getkey, (4, 4))
    with jax.set_mesh(mesh):
        f = jax.shard_map(
            torch2jax(_layer, out_specs=P("y")),
            in_specs=(P("x"), P()),
            out_specs=P("x"),
            axis_names={"x"},
        )
        args = put(x, mesh, ("x", "y")), put(w, mesh)
        assert_trees_equal(_forward(f)(*args), _forward(_layer_in_jax)(x, w), rtol=1e-4)


def test_nested_shard_maps(getkey):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x, w = random_array(getkey, (8, 4)), random_array(getkey, (4, 4))
    inner = functools.partial(jax.shard_map, in_specs=(P("y"), P()), out_specs=P("y"))
    outer = functools.partial(jax.shard_map, in_specs=(P("x"), P()), out_specs=P("x"))
    with jax.set_mesh(mesh):
        f = outer(inner(torch2jax(_layer), axis_names={"y"}), axis_names={"x"})
        args = put(x, mesh, ("x", "y")), put(w, mesh)
        assert_trees_equal(_forward(f)(*args), _forward(_layer_in_jax)(x, w), rtol=1e-4)


def test_arguments_that_differ_in_where_they_vary(getkey):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    a, b, c = (random_array(getkey, s) for s in [(4, 3), (8, 3), (3,)])

    def combine(a, b, c):
        return (a * c).sum(0) + (b.sin() * c).sum(0)

    def in_jax(a, b, c):
        return (a * c).sum(0) + (jnp.sin(b) * c).sum(0)

    def mapped(f):
        def body(a, b, c):
            return jax.lax.psum(f(a, b, c), ("x", "y"))

        specs = P("x"), P("y"), P()
        g = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
        return jax.jit(lambda *xs: (g(*xs), jax.grad(scalar(g), (0, 1, 2))(*xs)))(a, b, c)

    assert_trees_equal(mapped(torch2jax(combine)), mapped(in_jax), rtol=1e-5)


def test_collectives_between_calls(getkey):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = random_array(getkey, (8, 3))

    def mapped(sin, square):
        def body(x):
            y = sin(x)
            y = y - jax.lax.pmean(y, "x")
            z = square(jax.lax.ppermute(y, "x", [(i, (i + 1) % 8) for i in range(8)]))
            return jax.lax.psum(z, "x")

        f = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())
        return jax.jit(lambda x: (f(x), jax.grad(scalar(f))(x)))(x)

    actual = mapped(torch2jax(torch.sin), torch2jax(torch.square))
    assert_trees_equal(actual, mapped(jnp.sin, jnp.square), rtol=1e-5, atol=1e-5)


def test_scan_vmap_and_remat_inside(getkey):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    x, ws = random_array(getkey, (8, 3)), random_array(getkey, (2, 3, 3))

    def mapped(layer):
        @jax.checkpoint
        def step(x, w):
            return jax.vmap(layer, (0, None))(x, w), None

        def body(x, ws):
            x = jax.lax.scan(step, x, ws)[0]
            return jax.lax.psum((x**2).sum(), "x")

        f = jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
        return jax.jit(jax.value_and_grad(f, (0, 1)))(x, ws)

    actual = mapped(torch2jax(lambda x, w: (x @ w).tanh()))
    assert_trees_equal(actual, mapped(lambda x, w: jnp.tanh(x @ w)), rtol=1e-5, atol=1e-5)


def test_out_specs_over_the_axes_of_the_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    f = torch2jax(torch.sin, out_specs=P("x"))
    with pytest.raises(ShardingError, match="Leave `out_specs` out") as info:
        jax.shard_map(f, mesh=mesh, out_specs=P("x"))(put(jnp.ones(8), mesh, "x"))
    assert "names ['x'], which are manual here" in str(info.value)


WARNING = (
    "`sin` is called in a program over 8 devices, and the types of its inputs do not prove that "
    "they are replicated. If they are sharded, XLA gathers them onto every device and every "
    "device computes the whole. Choose a mesh with explicit axes, `jax.set_mesh(jax.make_mesh(..., "
    "axis_types=(AxisType.Explicit,)))`, and pass `out_specs=`, or call it inside `jax.shard_map`."
)


def test_auto_axes_are_right_and_warn_once(getkey, recwarn):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = random_array(getkey, (16,))
    f = jax.jit(torch2jax(torch.sin))
    for _ in range(3):
        assert_trees_equal(f(put(x, mesh, "x")), jnp.sin(x))
    assert [str(w.message) for w in recwarn.list] == [WARNING]


UNSHARDED = {
    "eager": lambda f, early: f(early),
    "NumPy": lambda f, early: f(np.asarray(early)),
    "jit": lambda f, early: jax.jit(f)(early),
    "NumPy under jit": lambda f, early: jax.jit(f)(np.asarray(early)),
    "constant": lambda f, early: jax.jit(lambda: f(early))(),
    "scan": lambda f, early: jax.jit(
        lambda x: jax.lax.scan(lambda _, x: (None, f(x)), None, x[None])[1][0]
    )(early),
    "gradient": lambda f, early: jax.jit(jax.grad(scalar(f)))(np.asarray(early)),
}


@pytest.mark.parametrize("call", UNSHARDED.values(), ids=UNSHARDED)
def test_on_a_mesh_of_explicit_axes_what_nobody_sharded_is_whole_everywhere(getkey, recwarn, call):
    early = random_array(getkey, (16,))  # before there was a mesh
    shapes = []

    def sin(x):
        shapes.append(x.shape)
        return x.sin()

    # A backward then runs the one forward, whether or not graphs are kept.
    f = torch2jax(sin, output_shapes=early, residuals="recompute")
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))):
        assert_trees_equal(call(f, early), call(jnp.sin, early), rtol=1e-5)
    assert not recwarn.list
    assert shapes == [(16,)] * 8


def test_what_nobody_sharded_is_not_gathered_for_what_somebody_did(getkey, recwarn):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    x, y = np.asarray(random_array(getkey, (16,))), random_array(getkey, (16,))
    f = lambda x, y: torch2jax(torch.sin)(x) * y  # noqa: E731
    with jax.set_mesh(mesh):
        sharded = put(y, mesh, "x")
        assert_trees_equal(jax.jit(f)(x, sharded), jnp.sin(x) * y)
        assert collectives(f, x, sharded) == set()
    assert not recwarn.list


@pytest.mark.parametrize("kinds", ["Auto Auto", "Explicit Auto"])
def test_an_unsharded_array_where_axes_are_auto_warns(getkey, recwarn, kinds):
    kinds = tuple(AxisType[kind] for kind in kinds.split())
    x = np.asarray(random_array(getkey, (16,)))
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)):
        assert_trees_equal(jax.jit(torch2jax(torch.sin))(x), jnp.sin(x))
    assert [str(w.message) for w in recwarn.list] == [WARNING]


def test_one_device_never_warns(getkey, recwarn):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    f = jax.jit(torch2jax(torch.sin))
    f(jnp.ones(3))
    f(put(jnp.ones(4), mesh, "x"))
    f(jax.device_put(jnp.ones(5), jax.devices()[3]))
    assert not recwarn.list
