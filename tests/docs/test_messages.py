"""The texts that the page of messages lists are those that come: each is provoked here.

An entry's heading is in code where it is a text; `PLAIN` and `ON_A_MESH` have a program for each of
them. What the page advises is run with its blocks.
"""

import re
import warnings
from pathlib import Path

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqx_torch import from_torch, load_state_dict, torch2jax


PAGE = (Path(__file__).parents[2] / "docs" / "messages.md").read_text()
HEADINGS = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
# A machine's memory, and a fork, are not for a test; zeros and NaN have no text.
UNTRIED = {
    "`os.fork() was called`",
    "`RESOURCE_EXHAUSTED`, or torch's `CUDA out of memory`",
    "Gradients are zero and nothing is raised",
    "Results are NaN, and an error was logged",
}
X = jnp.ones((16, 8))
MESH = jax.make_mesh((8,), ("batch",))
AUTO = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))


def linear(**options):
    return from_torch(torch.nn.Linear(8, 4), **options)


def sharded(*axes):
    return jax.device_put(X, P(*axes or ("batch",)))


def labels():
    return jax.device_put(jnp.zeros(16, jnp.int32), P("batch"))


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


class WithDropout(eqx.Module):
    layer: eqx.Module
    dropout: eqx.nn.Dropout


def old_state():
    model, state = eqx.nn.make_with_state(from_torch)(torch.nn.BatchNorm1d(8))
    model(X, state=state)
    model(X, state=state)


def leaked():
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(X)
    return kept[0] + 1


def undecayed():
    optimizer, model = optax.adamw(1e-3), linear()
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        return optimizer.update(model, optimizer.init(model))


def sharded_parameter():
    model = from_torch(torch.nn.Linear(8, 8), out_specs=P("batch"))
    return jax.device_put(model, P("batch"))(sharded())


def two_branches():
    other = from_torch(torch.nn.Linear(8, 4, bias=False))
    return jax.lax.cond(True, lambda: linear(), lambda: other)


# Programs on one device
PLAIN = {
    "must be Tensor, not": lambda: torch.nn.Linear(8, 4)(X),
    "takes JAX arrays, but got a": lambda: linear()(torch.ones(16, 8)),
    "Torch code met a JAX array, or JAX a tensor": lambda: torch2jax(lambda x: jnp.sin(x))(X),
    "optimizer can only optimize Tensors": lambda: torch.optim.Adam(linear().params.values()),
    "object has no attribute 'backward'": lambda: X.sum().backward(),
    "expected target dtype to be Long": lambda: torch2jax(torch.nn.functional.cross_entropy)(
        X, jnp.zeros(16, jnp.int32)
    ),
    "must have the same dtype": lambda: linear()(X.astype(jnp.bfloat16)),
    "Can't call numpy() on Tensor that requires grad": lambda: jax.grad(
        lambda x: torch2jax(lambda x: torch.from_numpy(x.numpy()), output_shapes=X)(x).sum()
    )(X),
    "but got bool": lambda: jax.grad(lambda m: m.layer(X).sum())(
        WithDropout(linear(), eqx.nn.Dropout())
    ),
    "as an abstract array. The problematic value is of type": lambda: jax.jit(lambda m, x: m(x))(
        eqx.nn.MLP(8, 4, 8, 1, key=jax.random.key(0)), X[0]
    ),
    "cannot be hashed": lambda: jax.jit(linear())(X),
    "Gradient only defined for scalar-output functions": lambda: jax.grad(lambda m: m(X))(linear()),
    "vmap got inconsistent sizes": lambda: eqx.filter_vmap(lambda m, x: m(x))(linear(), X),
    "rank should be at least 1": lambda: jax.vmap(lambda step, x: step * x)(jnp.array(1.0), X),
    "'tuple' object is not callable": lambda: eqx.nn.make_with_state(from_torch)(
        torch.nn.BatchNorm1d(8)
    )(X),
    "was called without `state=`": lambda: from_torch(torch.nn.BatchNorm1d(8))(X),
    "they were taken for constants": lambda: from_torch(Counter())(X),
    "Attempted to use old state": old_state,
    "was called without `key=`": lambda: from_torch(torch.nn.Dropout())(X),
    "draws random numbers from torch's own generator": lambda: torch2jax(
        lambda x: x + torch.randn(8)
    )(X),
    "cannot assign to field": lambda: setattr(linear(), "weight", 1),
    "writes to its parameter": lambda: from_torch(torch.nn.Embedding(8, 2, max_norm=1.0))(
        jnp.arange(4)
    ),
    "Error(s) in loading state_dict": lambda: load_state_dict(linear(), {}),
    "you are not passing `params` when calling `update`": undecayed,
    "is no container of modules": lambda: optax.adam(1e-3).update(
        optax.adam(1e-3).init(linear()), linear()
    ),
    "different pytree metadata at key path": lambda: eqx.apply_updates(
        eqx.nn.inference_mode(linear()), linear()
    ),
    "is not a leaf of the pytree": lambda: eqx.tree_at(lambda m: m.in_features, linear(), 3),
    "must have the same pytree structure": two_branches,
    "mat1 and mat2 shapes cannot be multiplied": lambda: linear()(X[:, :3]),
    "seem to depend on the values of its inputs": lambda: jax.jit(torch2jax(lambda x: x[x > 0]))(X),
    "were inferred by running it on zeros": lambda: jax.jit(
        torch2jax(lambda x: torch.from_numpy(x.numpy()) + 1)
    )(X),
    "Attempted boolean conversion of traced array": lambda: jax.jit(
        lambda x: x if x.sum() > 0 else -x
    )(X),
    "Abstract tracer value encountered where concrete value is expected": lambda: jax.jit(
        lambda x: float(x.sum())
    )(X),
    "Encountered an unexpected tracer": leaked,
    "Please set a mesh via": lambda: jax.device_put(X, P("batch")),
    "Mesh for all inputs should be equal": lambda: jax.jit(jnp.add)(
        jax.device_put(X, NamedSharding(MESH, P("batch"))),
        jax.device_put(X, NamedSharding(AUTO, P("batch"))),
    ),
    "is called in a program over": lambda: jax.jit(torch2jax(torch.sin))(
        jax.device_put(X, NamedSharding(AUTO, P("batch")))
    ),
    "was lowered for tpu": lambda: jax.export.export(
        jax.jit(torch2jax(torch.sin)), platforms=["tpu"]
    )(X),
}
# Programs under `jax.set_mesh(MESH)`
ON_A_MESH = {
    "are sharded over the explicit mesh axes": lambda: linear()(sharded()),
    "as if the results of all shards along": lambda: torch2jax(torch.sum, out_specs=P())(sharded()),
    "so that each device would compute with its own part of it": sharded_parameter,
    "Use `.at[...].get(out_sharding=)` to provide output PartitionSpec": lambda: sharded()[0],
    "slicing on sharded dims where out dim": lambda: jax.jit(lambda x: x[:3])(sharded()),
    "This reshape is not supported": lambda: sharded().reshape(4, 4, 8),
    "Contracting dimensions are sharded": lambda: sharded().T @ sharded(),
    "produces an illegally sharded result": lambda: sharded() + sharded(None, "batch"),
    "should be unsharded over the": lambda: jnp.cumsum(sharded(), axis=0),
    "0th dimension of all xs should be replicated": lambda: jax.lax.scan(
        lambda total, row: (total + row.sum(), None), 0.0, sharded()
    ),
    "All operands should have the same sharding": lambda: sharded()[jnp.arange(16), labels()],
    "does not evenly divide the dimension size": lambda: jax.device_put(X[:10], P("batch")),
    "is only valid for values of rank at least 1": lambda: jax.jit(
        lambda x: x, in_shardings=NamedSharding(MESH, P("batch"))
    )(jnp.array(1.0)),
    "acts as an assert when all axes of mesh are of type": lambda: eqx.filter_shard(
        linear(), P("batch")
    ),
}


def _messages(program):
    """The texts of what a program raises and of the warnings that it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            jax.block_until_ready(program())
        except Exception as error:
            return [str(error), *(str(warning.message) for warning in caught)]
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("text", PLAIN)
def test_the_text_comes(text):
    assert any(text in message for message in _messages(PLAIN[text]))


@pytest.mark.parametrize("text", ON_A_MESH)
def test_the_text_comes_on_a_mesh(text):
    with jax.set_mesh(MESH):
        assert any(text in message for message in _messages(ON_A_MESH[text]))


def test_the_page_lists_these_texts_and_no_others():
    headings = {f"`` {text} ``" if "`" in text else f"`{text}`" for text in PLAIN | ON_A_MESH}
    assert headings == set(HEADINGS) - UNTRIED
    assert set(HEADINGS) >= UNTRIED


def test_scalars_are_refused_by_device_put_as_the_page_says():
    with jax.set_mesh(MESH), pytest.raises(AssertionError, match=re.escape("(0, P('batch',))")):
        jax.device_put(jnp.array(1.0), P("batch"))
    assert "`AssertionError: (0, P('batch',))`" in PAGE


def test_arrays_can_be_read_by_numpy_as_the_page_says():
    with jax.set_mesh(MESH):
        assert np.asarray(sharded())[0].shape == (8,)
