"""A model is a PyTree of arrays: JAX's own transformations, control flow and optax take it."""

import copy
import pickle

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec as P

from eqx_torch import from_torch, stack_modules, to_torch

from ..helpers import assert_trees_equal


X = jnp.arange(12.0).reshape(4, 3) / 10
MESH = jax.make_mesh((2,), ("batch",))


def linear():
    return from_torch(torch.nn.Linear(3, 3))


def affine(model, x):
    """What a linear model computes, by JAX alone."""
    return x @ model.params["weight"].T + model.params["bias"]


def loss(call):
    return lambda model: jnp.sum(jnp.tanh(call(model, X)))


TRANSFORMED = {
    "jit": lambda call, m: jax.jit(call)(m, X),
    "checkpoint": lambda call, m: jax.checkpoint(call)(m, X),
    "grad": lambda call, m: jax.grad(loss(call))(m).params,
    "value_and_grad": lambda call, m: jax.value_and_grad(loss(call))(m)[1].params,
    "grad of jit": lambda call, m: jax.grad(jax.jit(loss(call)))(m).params,
    "jvp": lambda call, m: jax.jvp(loss(call), (m,), (m,)),
    "vjp": lambda call, m: jax.vjp(loss(call), m)[1](jnp.ones(()))[0].params,
    "linearize": lambda call, m: jax.linearize(loss(call), m)[1](m),
    "jacrev": lambda call, m: jax.jacrev(loss(call))(m).params,
    "jacfwd": lambda call, m: jax.jacfwd(loss(call))(m).params,
    "vmap": lambda call, m: jax.vmap(call, in_axes=(0, None))(stack_modules([m, m]), X),
    "vmap, shared": lambda call, m: jax.vmap(call, in_axes=(None, 0))(m, X),
    "scan, carried": lambda call, m: jax.lax.scan(
        lambda m, x: (jax.tree.map(jnp.negative, m), call(m, x)), m, X
    )[1],
    "scan, stacked": lambda call, m: jax.lax.scan(
        lambda x, m: (call(m, x), None), X, stack_modules([m, m])
    )[0],
    "cond": lambda call, m: jax.lax.cond(X[0, 0] < 1, call, lambda m, x: x, m, X),
    "switch": lambda call, m: jax.lax.switch(jnp.int32(1), [lambda m, x: x, call], m, X),
    "while_loop": lambda call, m: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1], call(c[1], c[2])), (0, m, X)
    )[2],
    "fori_loop": lambda call, m: jax.lax.fori_loop(0, 3, lambda i, c: (c[0], call(*c)), (m, X))[1],
    "map": lambda call, m: jax.lax.map(lambda m: call(m, X), stack_modules([m, m])),
    "tree.map": lambda call, m: call(jax.tree.map(lambda a: 2 * a, m), X),
    "ravel_pytree": lambda call, m: call(
        jax.flatten_util.ravel_pytree(m)[1](jax.flatten_util.ravel_pytree(m)[0] + 1), X
    ),
    "closed over": lambda call, m: jax.lax.scan(lambda x, _: (call(m, x), None), X, length=3)[0],
}


@pytest.mark.parametrize("use", TRANSFORMED.values(), ids=TRANSFORMED)
def test_transformations_and_control_flow_take_models(use):
    model = linear()
    result = use(lambda model, x: model(x), model)
    assert_trees_equal(result, use(affine, model))


def test_shapes_without_a_run():
    shapes = jax.eval_shape(lambda model: model(X), linear())
    assert (shapes.shape, shapes.dtype) == (X.shape, X.dtype)


def test_shard_map_takes_a_model():
    model = linear()
    with jax.set_mesh(MESH):
        call = jax.shard_map(lambda m, x: m(x), in_specs=(P(), P("batch")), out_specs=P("batch"))
        y = call(model, jax.device_put(X, P("batch")))
    assert_trees_equal(np.asarray(y), np.asarray(affine(model, X)))


@pytest.mark.parametrize("place", [P(), NamedSharding(MESH, P()), jax.devices()[1], None])
def test_device_put_takes_a_model(place):
    model = linear()
    with jax.set_mesh(MESH):
        moved, expected = jax.device_put(model, place), jax.device_put(model.params, place)
    for name, array in expected.items():
        assert moved.params[name].sharding == array.sharding
    assert_trees_equal(jax.device_get(moved(X)), jax.device_get(affine(model, X)))


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1), optax.adam(0.1), optax.adamw(0.1), optax.lbfgs(0.1)]
)
@jax.numpy_dtype_promotion("standard")
def test_optax_takes_a_whole_model(optimizer):
    model = linear()

    def step(call, params, state):
        value, grads = jax.value_and_grad(call)(params)
        extra = {"value": value, "grad": grads, "value_fn": call}
        updates, state = optax.with_extra_args_support(optimizer).update(
            grads, state, params, **extra
        )
        return optax.apply_updates(params, updates), state

    trained, state = model, optimizer.init(model)
    expected = model.params
    expected_state = optimizer.init(expected)
    for _ in range(3):
        trained, state = step(loss(lambda m, x: m(x)), trained, state)
        expected, expected_state = step(
            lambda p: jnp.sum(jnp.tanh(X @ p["weight"].T + p["bias"])), expected, expected_state
        )
    assert_trees_equal(trained.params, expected, rtol=1e-4)
    assert trained(X).shape == X.shape


def test_a_compiled_function_follows_the_mode():
    model = from_torch(torch.nn.Dropout(0.5))
    call = jax.jit(lambda model, key: model(X, key=key))
    key = jax.random.key(0)
    dropped = call(model, key)
    assert (np.asarray(dropped) == 0).sum() > 1
    assert_trees_equal(call(eqx.nn.inference_mode(model), key), X)
    assert_trees_equal(call(model, key), dropped)


@pytest.mark.parametrize("value", [True, False, np.True_])
def test_ways_to_set_the_mode(value):
    model = from_torch(torch.nn.Dropout(0.5))
    pair = [model, model, eqx.nn.Dropout(0.5)]  # the same model twice, and a layer with a bool leaf
    for changed in (
        eqx.nn.inference_mode(model, value=value),
        eqx.tree_at(lambda m: m.inference, model, value),
        eqx.tree_at(lambda ms: [m.inference for m in ms], pair, [value] * 3)[1],
        eqx.nn.inference_mode(pair, value=value)[0],
    ):
        assert changed.inference == value
        assert f"{changed.inference}" == f"{bool(value)}"
        assert to_torch(changed).training is not bool(value)
        assert len(jax.tree.leaves(changed)) == 0
        for copied in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
            assert jax.tree.structure(copied) == jax.tree.structure(changed)
    assert not model.inference


def test_trees_of_different_modes_do_not_mix():
    """Loudly, and the whole model takes another mode."""
    model = linear()
    params, rest = eqx.partition(model, eqx.is_array)
    with pytest.raises(ValueError, match="inference|custom node data"):
        eqx.combine(params, eqx.nn.inference_mode(rest))
    evaluated = eqx.nn.inference_mode(eqx.combine(params, rest))
    assert evaluated.inference
    assert_trees_equal(evaluated(X), model(X))
