"""Shapes that depend on values come from the values at hand: of examples, or of an eager call."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.distributions import (
    Beta,
    Categorical,
    Dirichlet,
    Gamma,
    LogNormal,
    MultivariateNormal,
    Normal,
    Pareto,
    Wishart,
)

from eqx_torch import from_torch, ShapeError, t2j, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.meshes import explicit_mesh
from ..helpers.twins import random_array


MASK = jnp.array([True, False, True, True])
X = jnp.array([3.0, -1.0, 2.0, 5.0])
BY_VALUES = {
    "nonzero": (torch.nonzero, (MASK,)),
    "argwhere": (torch.argwhere, (X,)),
    "masked_select": (torch.masked_select, (X, MASK)),
    "mask": (lambda x: x[x > 0], (X,)),
    "unique": (torch.unique, (X.round(),)),
    "where": (lambda x: torch.where(x > 0), (X,)),
    "repeat": (lambda x, n: x.repeat_interleave(n), (X, jnp.array([1, 0, 2, 1]))),
    "split": (lambda x, i: torch.tensor_split(x, i.long().cpu()), (X, jnp.array([1, 3]))),
    "lstsq": (lambda a, b: torch.linalg.lstsq(a, b), (jnp.eye(4)[:, :2] + 1, X[:, None])),
    "bincount": (torch.bincount, (jnp.array([0, 2, 2, 5]),)),
    "sliced": (lambda x, n: x[: int(n)], (X, jnp.array(2))),
}
every_by_values = pytest.mark.parametrize(("f", "args"), BY_VALUES.values(), ids=BY_VALUES)


def in_torch(f, args):
    return f(*(torch.tensor(np.asarray(x)) for x in args))


def leaves(tree):
    return list(tree) if isinstance(tree, tuple) else [tree]


@every_by_values
def test_of_examples(f, args):
    """Torch tensors and arrays; what JAX traces then has these shapes."""
    expected = leaves(in_torch(f, args))
    for examples in (args, [torch.tensor(np.asarray(x)) for x in args]):
        wrapped = torch2jax(f, *examples)
        assert_trees_equal(leaves(wrapped(*args)), expected, rtol=1e-5)
        assert_trees_equal(leaves(jax.jit(wrapped)(*args)), expected, rtol=1e-5)


@every_by_values
def test_of_an_eager_call(f, args):
    wrapped = torch2jax(f)
    for _ in range(2):
        assert_trees_equal(leaves(wrapped(*args)), leaves(in_torch(f, args)), rtol=1e-5)


def test_each_eager_call_has_its_own():
    f = torch2jax(torch.nonzero, MASK)
    for mask in (MASK, ~MASK, MASK & False, MASK | True, MASK):
        expected = torch.nonzero(torch.tensor(np.asarray(mask)))
        assert_trees_equal(f(mask), expected)
    assert f(MASK & False).shape == (0, 1)


def test_another_shape_at_run_time_is_an_error():
    f = jax.jit(torch2jax(torch.nonzero, MASK))
    assert_trees_equal(f(MASK[::-1]), torch.nonzero(torch.tensor(np.asarray(MASK[::-1]))))
    message = r"returned another shape than was declared(.|\n)*one run on values"
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message) as info:
        jax.block_until_ready(f(~MASK))
    assert ShapeError.__name__ in str(info.value)


def test_an_empty_result_is_fixed_by_no_example():
    """XLA drops calls whose results are all empty, so that no check would tell."""
    f = torch2jax(torch.nonzero, MASK & False)
    with pytest.raises(ShapeError, match="seem to depend on the values of its inputs"):
        jax.jit(f)(MASK)
    assert f(MASK).shape == (3, 1)


def test_shapes_alone_are_no_values():
    f = jax.ShapeDtypeStruct((4,), "bool")
    with pytest.raises(ShapeError, match="Wrap it with example arguments"):
        torch2jax(torch.nonzero, f)


def test_values_of_shards():
    with jax.set_mesh(explicit_mesh(4)):
        x = jax.device_put(jnp.arange(8.0) + 1, jax.P("x"))
        f = torch2jax(lambda x: x[x > 0].cumsum(0), out_specs=jax.P("x"))
        assert_trees_equal(f(x), torch.arange(1.0, 9).reshape(4, 2).cumsum(1).reshape(-1))


class Packed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.GRU(3, 4, batch_first=True)

    def forward(self, x, lengths):
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            x, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return torch.nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


@pytest.mark.filterwarnings("ignore:.*weight.*not part of single contiguous")
def test_packed_sequences(getkey):
    module = Packed()
    x, lengths = random_array(getkey, (2, 5, 3)), jnp.array([5, 3])
    tensors = torch.tensor(np.asarray(x)), torch.tensor(np.asarray(lengths))
    expected = module(*tensors)
    for model in (from_torch(module, *tensors), from_torch(module, x, lengths), from_torch(module)):
        assert_trees_equal(model(x, lengths), expected, rtol=1e-5)
        assert_trees_equal(eqx.filter_jit(model)(x, lengths), expected, rtol=1e-5)


POSITIVE = t2j(torch.rand(3, generator=torch.Generator().manual_seed(0)) + 0.5)
SIMPLEX = jnp.array([0.2, 0.3, 0.5])
LIKELIHOODS = {
    "Normal": lambda x: Normal(x, x).log_prob(x),
    "Gamma": lambda x: Gamma(x, x).log_prob(x),
    "Beta": lambda x: Beta(x, x).log_prob(x / 10),
    "LogNormal": lambda x: LogNormal(x, x).log_prob(x),
    "Pareto": lambda x: Pareto(x, x).log_prob(2 * x),
    "Dirichlet": lambda x: Dirichlet(x).log_prob(x / x.sum()),
    "Categorical": lambda x: Categorical(x).log_prob(torch.tensor(1)),
    "MultivariateNormal": lambda x: MultivariateNormal(x, torch.diag(x)).log_prob(x),
    "Wishart": lambda x: Wishart(x.sum() + 3, torch.diag(x)).log_prob(torch.diag(x)),
    "rsample": lambda x: 0 * Normal(x, x).rsample() + x,
}


@pytest.mark.parametrize("f", LIKELIHOODS.values(), ids=LIKELIHOODS)
@pytest.mark.filterwarnings("ignore:.*draws random numbers")
def test_log_densities(f):
    """Their arguments are checked, which needs values: when the program runs."""
    expected = f(torch.tensor(np.asarray(POSITIVE)))
    for wrapped in (torch2jax(f), jax.jit(torch2jax(f, POSITIVE))):
        assert_trees_equal(wrapped(POSITIVE), expected, rtol=1e-4)
    traced = jax.jit(torch2jax(f))
    if f is not LIKELIHOODS["Wishart"]:
        assert_trees_equal(traced(POSITIVE), expected, rtol=1e-4)
        return
    with pytest.raises(ShapeError, match="`validate_args=False`, or wrap .* example arguments"):
        traced(POSITIVE)


def test_checks_of_distributions_are_made_at_run_time():
    # Once a process has compiled a function, torch checks only where it is asked to.
    f = jax.jit(torch2jax(lambda x: Normal(x, x, validate_args=True).log_prob(x)))
    with pytest.raises(Exception, match="to satisfy the constraint"):
        jax.block_until_ready(f(-POSITIVE))


def _raising(x):
    raise ValueError("no result")


@pytest.mark.parametrize("f", [lambda x: x[x > 2], _raising])
def test_results_that_are_declared_to_be_empty_are_checked(f):
    """XLA sees no need for a call that gives no elements."""
    declared = torch2jax(f, output_shapes=jax.ShapeDtypeStruct((0,), "float32"))
    with pytest.raises(Exception, match="another shape than was declared|no result"):
        jax.block_until_ready(jax.jit(declared)(X))


def test_results_that_are_empty():
    declared = torch2jax(lambda x: x[x > 9], output_shapes=jax.ShapeDtypeStruct((0,), "float32"))
    assert_trees_equal(jax.jit(declared)(X), jnp.zeros(0))
    assert_trees_equal(torch2jax(lambda x: x[x > 9])(X), jnp.zeros(0))


def test_memory_that_grows_during_a_run():
    def points(x):
        grown = torch.empty(0)
        torch.add(x, 1, out=grown)
        return grown + torch.quasirandom.SobolEngine(3).draw(2)[1]

    assert_trees_equal(torch2jax(points)(POSITIVE), points(torch.tensor(POSITIVE.tolist())))
