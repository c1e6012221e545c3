"""The run that shows what a function returns."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import ShapeError, torch2jax

from ..helpers import assert_trees_equal
from ..helpers.by_values import VALUE_DEPENDENT
from ..helpers.twins import random_array


def test_it_computes_nothing_and_allocates_nothing():
    """A terabyte of output."""
    f = torch2jax(lambda x: (x[:, None] * x[None]).sin())
    out = jax.eval_shape(f, jax.ShapeDtypeStruct((500_000,), "float32"))
    assert (out.shape, out.dtype) == ((500_000, 500_000), jnp.float32)


def test_one_run_for_each_shape(getkey):
    runs = []

    def f(x):
        runs.append(x.shape)
        return x.sin()

    g = torch2jax(f)
    for n in (3, 3, 4, 3, 4):
        assert_trees_equal(g(jnp.ones(n)), jnp.sin(jnp.ones(n)))
    assert len(runs) == 2 + 5


every_value_dependent = pytest.mark.parametrize("f", VALUE_DEPENDENT.values(), ids=VALUE_DEPENDENT)


@every_value_dependent
def test_functions_that_need_values_run_on_zeros_with_a_warning(getkey, f):
    """Where JAX traces, and no example gives any."""
    x = random_array(getkey, (4,))
    with pytest.warns(UserWarning, match="inferred by running it on zeros") as warned:
        first = jax.jit(torch2jax(f))(x)
    (warning,) = warned
    text = str(warning.message)
    assert text.startswith("the output shapes of `<lambda>` were inferred by running it on zeros, ")
    assert text.endswith(
        "If they depend on values, wrap it with example arguments that have some, or declare them "
        "by `output_shapes=`, which saves this run too."
    )
    assert_trees_equal(first, f(torch.tensor(np.asarray(x))), rtol=1e-5)


@every_value_dependent
def test_functions_that_need_values_run_on_those_at_hand(getkey, f):
    x = random_array(getkey, (4,))
    expected = f(torch.tensor(np.asarray(x)))
    eager = torch2jax(f)
    for call in (eager, eager, jax.jit(torch2jax(f, x)), jax.jit(torch2jax(f, torch.ones(4)))):
        assert_trees_equal(call(x), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "of",
    [torch.from_dlpack, lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))],
)
def test_memory_of_tensors_without_values_is_not_given_away(of):
    """There is none: to write to it would end the process."""
    f = torch2jax(lambda x: of(x.detach()).mul_(2) + x)
    with pytest.warns(UserWarning, match="inferred by running it on zeros"):
        assert_trees_equal(jax.jit(f)(jnp.arange(3.0)), 4 * jnp.arange(3.0))


def test_it_draws_no_random_numbers():
    def f(x):
        noise = torch.rand(3)
        return x + noise if x.sum().item() >= 0 else None

    for g in (torch2jax(lambda x: x + torch.rand(3)), torch2jax(f)):
        state = torch.random.get_rng_state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jax.eval_shape(g, jnp.ones(3))
        assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:.*changes the buffers")
def test_modules_keep_no_tensor_of_it():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.norm = torch.nn.BatchNorm1d(3)
            self.calls = 0
            self.history = []

        def forward(self, x):
            self.calls += 1
            self.history.append(x)
            self.last = self.norm(self.linear(x))
            return self.last

    module = Module()
    attributes = dict(vars(module))
    state = {k: v.clone() for k, v in module.state_dict().items()}
    jax.eval_shape(torch2jax(module), jnp.ones((4, 3)))
    assert module.calls == 1  # what is no tensor is what Python code does when JAX traces it
    assert dict(vars(module)) == attributes | {"calls": 1}
    assert module.history == []
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())


def test_a_stored_tensor_does_no_harm(getkey):
    class Module(torch.nn.Module):
        def forward(self, x):
            self.last = x.sin()
            return self.last * 2

    x = random_array(getkey, (3,))
    f = torch2jax(Module())
    for _ in range(3):
        assert_trees_equal(f(x), 2 * jnp.sin(x))
        assert_trees_equal(jax.grad(lambda x: f(x).sum())(x), 2 * jnp.cos(x))


def test_gradients_are_allowed_in_it(getkey):
    def f(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.pow(3).sum(), x)[0]

    x = random_array(getkey, (3,))
    with torch.no_grad():
        assert_trees_equal(torch2jax(f)(x), 3 * x**2)


@pytest.mark.slow
def test_compiled_functions(getkey):
    x = random_array(getkey, (3,))
    f = torch2jax(torch.compile(lambda x: x.sin() * 2))
    assert_trees_equal(jax.jit(f)(x), 2 * jnp.sin(x))
    assert_trees_equal(jax.grad(lambda x: f(x).sum())(x), 2 * jnp.cos(x))


def test_shapes_that_depend_on_values_are_refused():
    for f in (
        torch.nonzero,
        lambda x: (torch.nonzero(x), x),
        lambda x: x[x > 0],
        lambda x: x[x > 2],
    ):
        with pytest.raises(ShapeError, match="seem to depend on the values of its inputs"):
            jax.eval_shape(torch2jax(f), jax.ShapeDtypeStruct((3,), "float32"))


def test_what_is_empty_by_its_inputs_is_not_refused():
    f = torch2jax(lambda x: torch.from_numpy(x.numpy() * 2))
    with pytest.warns(UserWarning, match="inferred by running it on zeros"):
        assert jax.jit(f)(jnp.ones((0, 3))).shape == (0, 3)
    assert f(jnp.ones((0, 3))).shape == (0, 3)


def test_shapes_that_differ_at_run_time_are_refused():
    f = torch2jax(torch.unique)
    with pytest.warns(UserWarning, match="inferred by running it on zeros"):
        assert jax.eval_shape(f, jnp.ones(3)).shape == (1,)
    message = r"another shape than was declared.\n  declared by one run on zeros"
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(jax.jit(f)(jnp.arange(3.0)))
    assert_trees_equal(f(jnp.arange(3.0)), jnp.arange(3.0))


def test_an_error_names_the_shapes():
    with pytest.raises(
        ShapeError, match=r"argument 0 float32\[2, 3\], argument 1 int32\[\]: running"
    ):
        torch2jax(lambda x, i: x @ x)(jnp.ones((2, 3)), jnp.array(1))
