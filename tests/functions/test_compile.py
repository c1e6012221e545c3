"""Modules and functions under `torch.compile`, with its real compiler, on eight devices."""

import equinox as eqx
import jax
import pytest
import torch
from jax.sharding import PartitionSpec as P

from eqx_torch import from_torch, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.meshes import explicit_mesh, put


pytestmark = [
    pytest.mark.slow,
    # The compiler uses what Python and torch themselves have deprecated.
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]


def test_a_compiled_module_on_eight_devices_trains_as_the_module(getkey):
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    mesh = explicit_mesh(8)
    x = jax.random.normal(getkey(), (32, 8))

    def loss_of(model, x):
        return (model(x) ** 2).mean()

    expected = eqx.filter_value_and_grad(loss_of)(from_torch(module), x)
    compiled = from_torch(torch.compile(module), out_specs=P("x"))
    with jax.set_mesh(mesh):
        step = eqx.filter_jit(eqx.filter_value_and_grad(loss_of))
        value, grads = step(compiled, put(x, mesh, "x"))
        again, _ = step(compiled, put(x, mesh, "x"))
    assert_trees_equal([value, again], [expected[0]] * 2)
    assert_trees_equal(jax.tree.leaves(grads), jax.tree.leaves(expected[1]))


def test_a_compiled_function_on_eight_devices_has_derivatives(getkey):
    def f(x):
        return torch.sin(x) * torch.cumsum(x, -1)

    mesh = explicit_mesh(8)
    x = jax.random.normal(getkey(), (16, 4))
    expected = jax.value_and_grad(lambda x: torch2jax(f)(x).sum())(x)
    sharded = torch2jax(torch.compile(f), out_specs=P("x"))
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(lambda x: sharded(x).sum()))(put(x, mesh, "x"))
        jax.block_until_ready(found)
    assert_trees_equal(found, expected)
