"""What messages say to write, for mistakes that programs from elsewhere bring: that it works."""

import importlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_torch
from eqx_torch import (
    from_torch,
    InputError,
    load_state_dict,
    ModuleError,
    ShardingError,
    state_dict,
    to_torch,
    torch2jax,
)

from ..helpers import assert_trees_equal


X = jnp.arange(12.0).reshape(4, 3) / 10
MESH = jax.make_mesh((4,), ("batch",))
LAYER = eqx.nn.Linear(3, 3, key=jax.random.key(0))


def raises(error, *phrases):
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, phrases)))


# NumPy in a forward, under a derivative.


class Tanh(torch.autograd.Function):
    """By NumPy, with a backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.tanh(x.numpy()))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / x.cosh() ** 2


@jax.custom_vjp
def by_callback(x):
    return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


by_callback.defvjp(lambda x: (by_callback(x), x), lambda x, g: (g / jnp.cosh(x) ** 2,))


def by_numpy(x):
    return torch.from_numpy(np.tanh(x.numpy()))


@pytest.mark.parametrize(
    "f",
    [
        by_numpy,
        lambda x: torch.from_numpy(np.tanh(np.asarray(x))),
    ],
    ids=["numpy()", "asarray"],
)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_numpy_under_a_derivative(f, jit):
    call = torch2jax(f, output_shapes=X)
    grad = jax.grad(lambda x: call(x).sum())
    said = (
        "after `detach()` JAX would silently take this one for zero",
        "`torch.autograd.Function` with a `backward`",
        "`jax.pure_callback` in a `jax.custom_vjp`",
        "`jax.lax.stop_gradient(x)`",
    )
    with raises(Exception, *said):
        jax.block_until_ready((jax.jit(grad) if jit else grad)(X))
    assert_trees_equal(call(X), jnp.tanh(X), rtol=1e-6)


@pytest.mark.parametrize(
    "f",
    [torch2jax(torch.tanh), torch2jax(Tanh.apply, output_shapes=X), by_callback],
    ids=["operators", "autograd.Function", "pure_callback"],
)
def test_derivatives_that_numpy_does_not_lose(f):
    grad = jax.grad(lambda x: f(x).sum())(X)
    assert_trees_equal(grad, 1 - jnp.tanh(X) ** 2, rtol=1e-5)


def test_numpy_of_a_constant():
    call = torch2jax(by_numpy, output_shapes=X)
    grad = jax.grad(lambda x: (x * call(jax.lax.stop_gradient(x))).sum())(X)
    assert_trees_equal(grad, jnp.tanh(X), rtol=1e-6)


# JAX in torch code, and torch code where JAX is expected.


@pytest.mark.parametrize(
    "f", [jnp.tanh, lambda x: jnp.tanh(x), lambda x: jax.vmap(LAYER)(x), lambda x: X * x]
)
def test_jax_in_torch_code_whose_shapes_are_declared(f):
    call = torch2jax(lambda x: f(x), output_shapes=X)
    with raises(Exception, "In torch code there are tensors only", "apply JAX functions"):
        jax.block_until_ready(call(X))


def test_a_layer_of_equinox_after_torch():
    y = jax.vmap(LAYER)(torch2jax(torch.tanh)(X))
    assert_trees_equal(y, jnp.tanh(X) @ LAYER.weight.T + LAYER.bias, rtol=1e-5)


@pytest.mark.parametrize(
    "f", [jnp.sin, jax.jit(lambda x: x), LAYER, from_torch(torch.nn.Linear(3, 3))]
)
def test_functions_that_are_of_jax_already(f):
    with raises(InputError, "is one of JAX arrays already. Call it as it is."):
        torch2jax(f)


def test_a_model_in_torch_code():
    module = torch.nn.Linear(3, 3)
    model = from_torch(module)
    with raises(InputError, "where there are tensors only, call the torch function or module"):
        torch2jax(lambda x: model(x))(X)
    with torch.no_grad():
        assert_trees_equal(torch2jax(lambda x: module(x))(X), model(X))


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.nn.Linear, "the class `Linear`. Make one: `from_torch(Linear(...))`."),
        (LAYER, "the Equinox module `Linear`, which takes JAX arrays already: call it as it is"),
        (torch.sin, "Functions of tensors are converted by `torch2jax`."),
        ((from_torch(torch.nn.ReLU()), None), "pass the model: `from_torch(model)`."),
    ],
)
def test_what_is_no_torch_module(x, said):
    with raises(ModuleError, "`from_torch` takes a `torch.nn.Module`, but got", said):
        from_torch(x)


# Pairs of a model and its state, and optimisers.


def test_pairs_that_were_not_unpacked():
    module = torch.nn.BatchNorm1d(3)
    pair = eqx.nn.make_with_state(from_torch)(module)
    sd = module.state_dict()
    for function, call, use in (
        ("to_torch", "to_torch(model, state=state)", lambda: to_torch(pair)),
        ("state_dict", "state_dict(model, state=state)", lambda: state_dict(pair)),
        (
            "load_state_dict",
            "load_state_dict(model, sd, state=state)",
            lambda: load_state_dict(pair, sd),
        ),
    ):
        said = f"write `model, state = pair`, `{call}`."
        with raises(ModuleError, f"`{function}` takes a model", "got a tuple", said):
            use()
    model, state = pair
    assert to_torch(model, state=state).training
    assert state_dict(model, state=state).keys() == sd.keys()
    load_state_dict(model, sd, state=state)


@jax.numpy_dtype_promotion("standard")
def test_parameters_for_an_optimiser():
    model = from_torch(torch.nn.Linear(3, 3))
    with raises(
        AttributeError, "Write `model.params`", "`opt_state = optax.adam(1e-3).init(model)`"
    ):
        torch.optim.Adam(model.parameters())
    optimizer = optax.adam(1e-3)
    grads = eqx.filter_grad(lambda model: model(X).sum())(model)
    updates, _ = optimizer.update(grads, optimizer.init(model), model)
    step = np.asarray(eqx.apply_updates(model, updates).params["bias"] - model.params["bias"])
    np.testing.assert_allclose(step, -1e-3, rtol=1e-3)


# Options.


@pytest.mark.parametrize(
    "wrap",
    [
        lambda specs: torch2jax(torch.sin, out_specs=specs),
        lambda specs: from_torch(torch.nn.ReLU(), out_specs=specs),
        lambda specs: from_torch(from_torch(torch.nn.ReLU()), out_specs=specs),
    ],
    ids=["torch2jax", "from_torch", "another from_torch"],
)
@pytest.mark.parametrize("specs", ["batch", ("batch",), {"y": "batch"}])
def test_out_specs_that_are_names(wrap, specs):
    with raises(ShardingError, "`out_specs` holds 'batch' of type str", '`out_specs=P("batch")`'):
        wrap(specs)


def test_a_sharding_as_out_specs():
    sharding = NamedSharding(MESH, P("batch"))
    with raises(ShardingError, "Pass its spec, `out_specs=sharding.spec`"):
        torch2jax(torch.sin, out_specs=sharding)
    with jax.set_mesh(MESH):
        y = torch2jax(torch.sin, out_specs=sharding.spec)(jax.device_put(X, sharding))
    assert_trees_equal(np.asarray(y), np.sin(X), rtol=1e-6)


@pytest.mark.parametrize("spec", [P("batch"), NamedSharding(MESH, P("batch")), MESH])
def test_specs_by_position(spec):
    said = f"out_specs={P('batch')}" if spec is not MESH else 'out_specs=P("x")'
    for wrap in (lambda: torch2jax(torch.sin, spec), lambda: from_torch(torch.nn.ReLU(), X, spec)):
        with raises(InputError, "by position, where examples of its arguments", f"`{said}`"):
            wrap()


def test_results_of_all_shards_added_up_in_jax():
    with jax.set_mesh(MESH):
        x = jax.device_put(X, P("batch"))
        for f in (
            torch2jax(lambda x: x.sum(0), out_specs=P()),
            torch2jax(lambda x: (x, x.sum(0)), out_specs=(P("batch"), P())),
        ):
            with raises(ShardingError, '`x.sum(0, keepdim=True)`, with `out_specs=P("batch")`'):
                f(x)
        rows = torch2jax(
            lambda x: x.sum(0, keepdim=True),
            output_shapes=jax.ShapeDtypeStruct((4, 3), X.dtype),  # a row for each of 4 shards
            out_specs=P("batch"),
        )
        total = jax.jit(lambda x: rows(x).sum(0))(x)
    assert_trees_equal(np.asarray(total), np.asarray(X).sum(0), rtol=1e-6)


def scaled(x, *, mask):
    return x * mask


class Scaled(torch.nn.Module):
    def forward(self, x, *, mask):
        return x * mask


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("torch2jax", lambda *a, **kw: torch2jax(scaled, *a, **kw)),
        ("from_torch", lambda *a, **kw: from_torch(Scaled(), *a, **kw)),
    ],
)
def test_examples_of_keyword_arguments(name, wrap):
    said = (
        f"`{name}` has no option `mask`.",
        '`example_kw={"mask": ...}`',
        "output_shapes, out_specs",
    )
    with raises(InputError, *said) as info:
        wrap(X, mask=X)
    assert "use_zeros" not in str(info.value)
    assert_trees_equal(wrap(X, example_kw={"mask": X})(X, mask=X), X * X)


# Programs that were written for `wrap_torch2jax`.


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("keyword", ["use_torch_vjp", "use_zeros"])
def test_keywords_that_are_ignored(keyword, value):
    with pytest.warns(DeprecationWarning, match=f"^`{keyword}` is ignored: .* Leave it out.$") as w:
        f = torch2jax(torch.sin, X, **{keyword: value})
    assert len(w) == 1
    assert w[0].filename == __file__
    assert_trees_equal(jax.grad(lambda x: f(x).sum())(X), jnp.cos(X), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "torch2jax_with_vjp": "write `torch2jax(f, ...)`, which has derivatives of every order",
        "torch2jax_without_vjp": "write `torch2jax(f, ..., depth=0)`",
        "torch2jax_auto": "write `torch2jax(f)`, which needs no example arguments",
        "wrap_torch_fn": "write `torch2jax`",
        "compile_and_import_module": "leave it out, since nothing is compiled",
    }.items(),
)
def test_names_of_wrap_torch2jax(name, said):
    message = f"^`eqx_torch` has no `{name}` of `wrap_torch2jax`: {re.escape(said)}.$"
    with pytest.raises(ImportError, match=message):
        exec(f"from eqx_torch import {name}")
    with pytest.raises(ImportError, match=message):
        getattr(eqx_torch, name)


def test_names_that_nobody_has():
    assert not hasattr(eqx_torch, "nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from eqx_torch import nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("eqx_torch.torch2jax_with_vjp")
