"""Arrays sharded over explicit mesh axes, with `out_specs`."""

import re
import threading

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec as P

from eqx_torch import ShardingError, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.meshes import collectives, explicit_mesh, put
from ..helpers.twins import random_array, scalar


def _model():
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.SiLU(), torch.nn.Linear(5, 3))


def _in_jax(params, x):
    h = jax.nn.silu(x @ params["0.weight"].T + params["0.bias"])
    return h @ params["2.weight"].T + params["2.bias"]


def test_functional_call_on_eight_devices(getkey):
    """Data parallel: no collective forward, one sum over the devices backward."""
    model = _model()
    params = {k: jnp.asarray(v.detach().numpy()) for k, v in model.named_parameters()}
    x = random_array(getkey, (16, 6))

    def fwd(params, x):
        return torch.func.functional_call(model, params, x)

    mesh = explicit_mesh(8)
    with jax.set_mesh(mesh):
        sharded = put(x, mesh, "x")
        replicated = jax.tree.map(lambda p: put(p, mesh), params)
        f = torch2jax(fwd, replicated, sharded, out_specs=P("x"), lock=True)
        y = jax.jit(f)(replicated, sharded)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
        assert_trees_equal(y, _in_jax(params, x))
        assert_trees_equal(f(replicated, sharded), _in_jax(params, x))
        assert collectives(f, replicated, sharded) == set()

        loss = lambda params, x: (f(params, x) ** 2).mean()  # noqa: E731
        gradient = jax.jit(jax.grad(loss))
        grads = gradient(replicated, sharded)
        expected = jax.grad(lambda params, x: (_in_jax(params, x) ** 2).mean())(params, x)
        assert_trees_equal(grads, expected, rtol=1e-5)
        assert_trees_equal(jax.grad(loss)(replicated, sharded), expected, rtol=1e-5)
        assert all(g.sharding.is_fully_replicated for g in jax.tree.leaves(grads))
        assert collectives(jax.grad(loss), replicated, sharded) == {"all-reduce"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_over_one_of_two_axes(getkey, dtype):
    """XLA's compiler for CPUs may abort at a sum over some axes of those of the mesh."""
    w, x = random_array(getkey, (3,), dtype), random_array(getkey, (8, 3), dtype)
    mesh = explicit_mesh(2, 4)
    with jax.set_mesh(mesh):
        f = torch2jax(lambda w, x: (w * x).sin(), out_specs=P("y"))
        loss = lambda w, x: (f(w, x) ** 2).astype("float32").sum()  # noqa: E731
        grads = jax.jit(jax.grad(loss, (0, 1)))(put(w, mesh), put(x, mesh, "y"))
    in_jax = lambda w, x: (jnp.sin(w * x) ** 2).astype("float32").sum()  # noqa: E731
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    assert_trees_equal(grads, jax.grad(in_jax, (0, 1))(w, x), rtol=tolerance, atol=tolerance)


def test_example_arguments_of_torch(getkey):
    mesh = explicit_mesh(8)
    with jax.set_mesh(mesh):
        f = torch2jax(torch.sin, torch.ones(16), out_specs=P("x"))
        x = put(random_array(getkey, (16,)), mesh, "x")
        assert_trees_equal(jax.jit(f)(x), jnp.sin(jnp.asarray(x)))


def _two_outputs(x, w):
    return {"y": (x @ w).tanh(), "s": x.sin()}


def _two_outputs_in_jax(x, w):
    return {"y": jnp.tanh(x @ w), "s": jnp.sin(x)}


@pytest.mark.parametrize("use_mesh", [True, False], ids=["set_mesh", "no mesh set"])
@pytest.mark.parametrize(
    ("x_spec", "w_spec", "out_specs"),
    [
        (("x",), (), P("x")),
        (("x",), (), {"y": P("x"), "s": P("x", None)}),
        ((("x", "y"),), (), P(("x", "y"))),
        (("x",), (None, "y"), {"y": P("x", "y"), "s": P("x", "y")}),
        (("y",), (None, "x"), {"y": P("y", "x"), "s": P("y", "x")}),
    ],
)
def test_two_axes(getkey, use_mesh, x_spec, w_spec, out_specs):
    """Where an output lies over an axis that it does not depend on, devices give its parts."""
    mesh = explicit_mesh(2, 4)
    x, w = random_array(getkey, (8, 8)), random_array(getkey, (8, 8))
    if w_spec:
        twin = lambda x, w: {"y": jnp.tanh(x @ w)}  # noqa: E731
        fn = lambda x, w: {"y": (x @ w).tanh()}  # noqa: E731
        out_specs = {"y": out_specs["y"]}
    else:
        twin, fn = _two_outputs_in_jax, _two_outputs
    with jax.set_mesh(mesh) if use_mesh else threading.Lock():
        args = put(x, mesh, *x_spec), put(w, mesh, *w_spec)
        f = torch2jax(fn, out_specs=out_specs)
        assert_trees_equal(jax.jit(f)(*args), twin(x, w))
        assert_trees_equal(f(*args), twin(x, w))
        everything = lambda f: jax.jit(  # noqa: E731
            lambda x, w: (
                jax.grad(scalar(f), (0, 1))(x, w),
                jax.jvp(f, (x, w), (x, w)),
                jax.jvp(jax.grad(scalar(f), (0, 1)), (x, w), (x, w)),
            )
        )
        assert_trees_equal(everything(f)(*args), everything(twin)(x, w), rtol=1e-4, atol=1e-4)


def test_the_gradient_has_the_sharding_of_its_argument(getkey):
    mesh = explicit_mesh(2, 4)
    with jax.set_mesh(mesh):
        x = put(random_array(getkey, (8, 4)), mesh, "x", None)
        w = put(random_array(getkey, (4, 8)), mesh, None, "y")
        f = torch2jax(torch.matmul, out_specs=P("x", "y"))
        gx, gw = jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1)))(x, w)
        assert gx.sharding.spec == P("x", None)
        assert gw.sharding.spec == P(None, "y")


def test_replicated_inputs_need_no_out_specs(getkey, recwarn):
    """Their types prove it, so nothing is gathered and nothing is said."""
    mesh = explicit_mesh(8)
    x = random_array(getkey, (4,))
    with jax.set_mesh(mesh):
        f = torch2jax(torch.sin)
        y = jax.jit(f)(put(x, mesh))
        assert_trees_equal(y, jnp.sin(x))
        assert_trees_equal(jax.grad(lambda x: f(x).sum())(put(x, mesh)), jnp.cos(x))
        assert y.sharding.is_fully_replicated
    assert not recwarn.list


def test_out_specs_do_nothing_without_a_mesh(getkey):
    x = random_array(getkey, (4,))
    f = torch2jax(torch.sin, out_specs=P("x"))
    assert_trees_equal(f(x), jnp.sin(x))
    assert_trees_equal(jax.jit(f)(x), jnp.sin(x))


@pytest.mark.parametrize("method", ["torch", "sequential", "broadcast_all", "expand_dims"])
def test_vmap_over_a_sharded_batch(getkey, method):
    """Each device computes its own members."""
    mesh = explicit_mesh(8)
    x, w = random_array(getkey, (16, 3)), random_array(getkey, (3,))
    with jax.set_mesh(mesh):
        args = put(x, mesh, "x"), put(w, mesh)
        f = torch2jax(lambda x, w: (x.sin() * w).sum(-1), vmap_method=method)
        twin = lambda x, w: (jnp.sin(x) * w).sum(-1)  # noqa: E731
        batched = lambda f: jax.vmap(f, (0, None))  # noqa: E731
        y = jax.jit(batched(f))(*args)
        assert_trees_equal(y, batched(twin)(x, w))
        assert y.sharding.spec == P("x")
        assert collectives(batched(f), *args) == set()
        gradient = lambda f: jax.jit(jax.grad(scalar(batched(f)), (0, 1)))  # noqa: E731
        assert_trees_equal(gradient(f)(*args), gradient(twin)(x, w), rtol=1e-5)
        inner = lambda f: jax.jit(jax.vmap(jax.grad(f, (0, 1)), (0, None)))  # noqa: E731
        assert_trees_equal(inner(f)(*args), inner(twin)(x, w), rtol=1e-5)


def test_vmap_of_a_sharded_call(getkey):
    """The batch is over one axis of the mesh, the call over another."""
    mesh = explicit_mesh(2, 4)
    x = random_array(getkey, (4, 8))
    with jax.set_mesh(mesh):
        f = jax.vmap(torch2jax(torch.sin, out_specs=P("y")))
        for spec in [(None, "y"), ("x", "y")]:
            y = jax.jit(f)(put(x, mesh, *spec))
            assert_trees_equal(y, jnp.sin(x))
            assert y.sharding.spec == P(*spec)


@pytest.mark.parametrize("out_specs", [None, P()], ids=str)
def test_each_device_calls_torch_for_its_own_members(getkey, out_specs):
    """One batched call a device, of values and of gradients by example; nothing is gathered."""
    mesh = explicit_mesh(8)
    x, w = random_array(getkey, (16, 3)), random_array(getkey, (3,))
    with jax.set_mesh(mesh):
        args = put(x, mesh, "x"), put(w, mesh)
        seen = []

        def f(x, w):
            seen.append(threading.get_ident())
            return (x.sin() * w).sum(-1)

        f = torch2jax(f, output_shapes=jax.ShapeDtypeStruct((), x.dtype), out_specs=out_specs)
        twin = lambda x, w: (jnp.sin(x) * w).sum(-1)  # noqa: E731
        for transform in (lambda f: f, lambda f: jax.grad(f, (0, 1))):
            batched = lambda f: jax.jit(jax.vmap(transform(f), (0, None)))  # noqa: B023, E731
            assert_trees_equal(batched(f)(*args), batched(twin)(x, w), rtol=1e-5)
            seen.clear()
            y = jax.block_until_ready(batched(f)(*args))
            assert len(seen) == 8
            assert {leaf.sharding.spec[0] for leaf in jax.tree.leaves(y)} == {"x"}
            assert collectives(batched(f), *args) == set()


def _in_a_scan(f):
    return lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0]


MAPPED = {
    "eager": jax.vmap,
    "jit outside": lambda f: jax.jit(jax.vmap(f)),
    "jit inside": lambda f: jax.vmap(jax.jit(f)),
    "gradient inside": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())),
    "gradient outside": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
    "scan inside": lambda f: jax.vmap(_in_a_scan(f)),
    "vmap inside": lambda f: jax.vmap(jax.vmap(f)),
}


@pytest.mark.parametrize("mapped", MAPPED.values(), ids=MAPPED)
def test_out_specs_that_name_the_axis_of_a_vmap(getkey, mapped):
    mesh = explicit_mesh(4, 2)
    x = random_array(getkey, (8, 4))
    with jax.set_mesh(mesh):
        for spec, names in [(P("x"), "['x']"), (P(("x", "y")), "['x', 'y']")]:
            f = torch2jax(torch.sin, out_specs=spec)
            message = f"has {spec}, but over {names} `jax.vmap` maps it: the function sees one"
            with pytest.raises(ShardingError, match=re.escape(message)) as info:
                mapped(f)(put(x, mesh, *spec))
            assert "examples only. Leave the axis out." in str(info.value)
            result = mapped(torch2jax(torch.sin))(put(x, mesh, *spec))
            assert_trees_equal(result, mapped(jnp.sin)(x), rtol=1e-5)


def test_an_axis_that_no_vmap_maps_is_another_mistake():
    mesh = explicit_mesh(4, 2)
    with jax.set_mesh(mesh):
        x = put(jnp.ones((8, 4)), mesh, "x")
        with pytest.raises(ShardingError, match=r"no input is sharded over \['y'\]"):
            jax.vmap(torch2jax(torch.sin, out_specs=P("y")))(x)


def test_scan_and_remat_over_shards(getkey):
    mesh = explicit_mesh(4)
    x, w = random_array(getkey, (8, 3)), random_array(getkey, (2, 3, 3))

    def loss(layer):
        step = jax.checkpoint(lambda x, w: (layer(x, w), None))
        return jax.jit(jax.grad(lambda x, w: (jax.lax.scan(step, x, w)[0] ** 2).mean(), (0, 1)))

    expected = loss(lambda x, w: jnp.tanh(x @ w))(x, w)
    with jax.set_mesh(mesh):
        f = torch2jax(lambda x, w: (x @ w).tanh(), out_specs=P("x"))
        assert_trees_equal(loss(f)(put(x, mesh, "x"), put(w, mesh)), expected, rtol=1e-5)


def test_integers_and_bools_over_shards(getkey):
    mesh = explicit_mesh(4)
    ids, table = random_array(getkey, (8,), "int32"), random_array(getkey, (3, 2))
    with jax.set_mesh(mesh):
        f = torch2jax(lambda i, t: (t[i.long()], i > 1), out_specs=P("x"))
        args = put(ids, mesh, "x"), put(table, mesh)
        assert_trees_equal(jax.jit(f)(*args), (table[ids], ids > 1))
        gradient = lambda f: jax.jit(jax.grad(lambda t, i: (f(i, t)[0] ** 2).sum()))  # noqa: E731
        expected = gradient(lambda i, t: (t[i], i > 1))(table, ids)
        assert_trees_equal(gradient(f)(args[1], args[0]), expected)


def test_every_device_runs_on_its_own_shard():
    mesh = explicit_mesh(8)
    shapes, threads = [], set()
    together = threading.Barrier(2, timeout=60)

    def f(x):
        shapes.append(tuple(x.shape))
        threads.add(threading.get_ident())
        together.wait()
        return x

    with jax.set_mesh(mesh):
        x = put(jnp.ones(16), mesh, "x")
        jax.block_until_ready(torch2jax(f, output_shapes=x, out_specs=P("x"))(x))
    assert shapes == [(2,)] * 8
    assert len(threads) > 1


def test_lock_holds_devices_apart():
    mesh = explicit_mesh(8)
    inside, most = [0], [0]
    counting = threading.Lock()

    def f(x):
        with counting:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        y = (x @ x.T).sin()
        with counting:
            inside[0] -= 1
        return y

    with jax.set_mesh(mesh):
        x = put(jnp.ones((8, 200, 200)), mesh, "x")
        g = torch2jax(
            lambda x: torch.vmap(lambda a: a @ a)(x) + f(x[0]), out_specs=P("x"), lock=True
        )
        jax.block_until_ready(jax.jit(jax.grad(lambda x: g(x).sum()))(x))
    assert most[0] == 1
