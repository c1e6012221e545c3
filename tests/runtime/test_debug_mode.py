"""`EQX_TORCH_DEBUG=1` shows torch functions that keep or change what is not theirs."""

import operator
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from eqx_torch import check_errors, from_torch, torch2jax
from eqx_torch._dtypes import _NAMES

from ..helpers import assert_trees_equal
from ..helpers.meshes import explicit_mesh, put
from ..helpers.twins import random_array


@pytest.fixture(autouse=True)
def debug(monkeypatch):
    monkeypatch.setenv("EQX_TORCH_DEBUG", "1")


def _eager(f):
    return f


def _known(f, x):
    """`f` wrapped and run once: without a trial, the first run is on copies that are torch's."""
    wrapped = torch2jax(f, output_shapes=jax.eval_shape(torch2jax(f), x))
    jax.block_until_ready(wrapped(x))
    return wrapped


hows = pytest.mark.parametrize("how", [_eager, jax.jit], ids=["eager", "jit"])


@hows
def test_a_kept_input_is_poisoned(how):
    kept = []

    def f(x):
        kept.append(x)
        return x * 2

    x = jnp.arange(4.0)
    y = how(_known(f, x))(x)
    assert_trees_equal(y, 2 * x)
    assert_trees_equal(kept[-1], torch.full((4,), torch.nan))


@hows
def test_a_kept_view_is_poisoned_and_the_result_that_is_one_is_not(how):
    kept = []

    def f(x):
        kept.append(x[1:])
        return x, x.T, x[::2], x.flip(0)

    x = jnp.arange(6.0).reshape(2, 3)
    results = how(_known(f, x))(x)
    assert_trees_equal(results, (x, x.T, x[::2], x[::-1]))
    assert_trees_equal(kept[-1], torch.full((1, 3), torch.nan))


@pytest.mark.parametrize("name", _NAMES)
def test_each_dtype(name, x64):
    dtype = getattr(torch, name)
    kept = []

    def f(x):
        kept.append(x)
        return x

    x = jnp.ones(3, name)
    assert_trees_equal(_known(f, x)(x), x)
    value = kept[-1].to(torch.complex128 if dtype.is_complex else torch.float64)
    if dtype.is_floating_point or dtype.is_complex:
        assert value.isnan().all()
    else:
        least = False if dtype is torch.bool else torch.iinfo(dtype).min
        assert_trees_equal(kept[-1], torch.full((3,), least, dtype=dtype))


def test_without_it_nothing_is_copied_or_poisoned(monkeypatch):
    monkeypatch.setenv("EQX_TORCH_DEBUG", "0")
    addresses, looking = [], []

    address = operator.methodcaller("data_ptr")  # by name, it would have its argument copied

    def f(x):
        if looking:  # to ask for the address in the first run is to give the memory away
            addresses.append(address(x))
        return x * 2

    x = jnp.arange(4.0)
    f = jax.jit(torch2jax(f, output_shapes=x))
    for _ in range(2):  # the first run is on copies, to see what is written
        jax.block_until_ready(f(x))
        looking.append(True)
    assert addresses[-1] == x.unsafe_buffer_pointer()


def test_it_is_read_when_a_program_is_compiled(monkeypatch):
    kept = []

    def f(x):
        kept.append(x)
        return x * 2

    x = jnp.arange(4.0)
    wrapped = torch2jax(f, output_shapes=x)
    debugged = jax.jit(wrapped)
    debugged(x)
    monkeypatch.delenv("EQX_TORCH_DEBUG")
    debugged(x)
    assert torch.isnan(kept[-1]).all()
    jax.block_until_ready(jax.jit(lambda x: wrapped(x) + 1)(x))
    assert_trees_equal(kept[-1], x)


# None of these names a way to write, for which the argument would be copied.
_numpy = operator.methodcaller("numpy")
_data = operator.attrgetter("data")
_triple = operator.methodcaller("mul_", 3)


def _through_numpy(x):
    operator.setitem(_numpy(x), 0, 7.0)


def _through_data(x):
    _triple(_data(x))


def _through_a_preserved_version(x):
    with torch.autograd._unsafe_preserve_version_counter(x):
        _triple(x)


@hows
@pytest.mark.parametrize("write", [_through_numpy, _through_data, _through_a_preserved_version])
def test_a_write_that_torch_does_not_notice(how, write):
    """It is one that begins later: what the first run writes is known from then on."""
    writes = []

    def f(x, y):
        if writes:
            write(y)
        return x * 2

    x, y = jnp.arange(1.0, 5.0), jnp.arange(1.0, 3.0)
    g = how(torch2jax(f, output_shapes=x))
    assert_trees_equal(g(x, y), 2 * x)
    writes.append(1)
    message = (
        "`f` has changed its input argument 1, which is a JAX array, in a way that torch does not "
        "notice (by NumPy, `x.data` or a kernel of its own), so that no copy was made. Write to a "
        "copy in the function itself: `x = x.clone()`. Without EQX_TORCH_DEBUG the array itself "
        "would have changed."
    )
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=re.escape(message)):
        jax.block_until_ready(g(x, y))
    assert_trees_equal(y, np.float32([1, 2]))
    writes.clear()
    assert_trees_equal(g(x, y), 2 * x)


def test_writes_that_are_known_are_on_copies_as_always():
    x = jnp.arange(4.0)
    f = torch2jax(lambda x: x.add_(1) * 2)
    assert_trees_equal(jax.jit(f)(x), 2 * (x + 1))
    assert_trees_equal(x, np.arange(4, dtype=np.float32))


class WritesGradient(torch.autograd.Function):
    """x * 2, whose backward writes to what it is given."""

    write = staticmethod(lambda g: g)

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        WritesGradient.write(g)
        return g * 2


def test_a_hidden_write_to_a_gradient(monkeypatch):
    x = jnp.arange(3.0)
    gradient = jax.jit(jax.grad(lambda x: (torch2jax(WritesGradient.apply)(x) ** 2).sum()))
    assert_trees_equal(gradient(x), 8 * x)
    monkeypatch.setattr(WritesGradient, "write", staticmethod(_through_numpy))
    with pytest.raises(Exception, match="has changed its input gradient, which is a JAX array"):
        jax.block_until_ready(gradient(x))


def _twin(x, w):
    return jnp.sin(x @ w).sum(-1) ** 2


@pytest.mark.parametrize("residuals", ["tape", "recompute"])
def test_derivatives_and_batches_are_right(getkey, residuals):
    """Recorded graphs refer to tensors that are poisoned after the forward."""
    x, w = random_array(getkey, (4, 3)), random_array(getkey, (3, 3))
    f = torch2jax(lambda x, w: (x @ w).sin().sum(-1) ** 2, residuals=residuals)
    loss = lambda f: lambda x, w: f(x, w).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss(f), (0, 1)))
    for _ in range(3):
        assert_trees_equal(gradient(x, w), jax.grad(loss(_twin), (0, 1))(x, w), rtol=1e-4)
    assert_trees_equal(
        jax.jvp(f, (x, w), (x, w)), jax.jvp(_twin, (x, w), (x, w)), rtol=1e-4, atol=1e-5
    )
    hessian = jax.jit(jax.hessian(loss(f)))(x, w)
    assert_trees_equal(hessian, jax.hessian(loss(_twin))(x, w), rtol=1e-3, atol=1e-4)
    batch = jnp.stack([x, 2 * x])
    batched = jax.vmap(jax.grad(loss(f)), (0, None))(batch, w)
    assert_trees_equal(batched, jax.vmap(jax.grad(loss(_twin)), (0, None))(batch, w), rtol=1e-4)


def test_a_module_trains_as_in_torch(getkey):
    network = torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.SiLU(), torch.nn.Linear(4, 1)
    )
    x = random_array(getkey, (8, 5))
    model, state = eqx.nn.make_with_state(from_torch)(network)

    @eqx.filter_jit
    def step(model, state):
        def loss(model):
            y, new = model(x, state=state)
            return (y**2).mean(), new

        (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), state, value

    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for _ in range(4):
        model, state, value = step(model, state)
        optimizer.zero_grad()
        expected = (network(torch.tensor(np.asarray(x))) ** 2).mean()
        expected.backward()
        optimizer.step()
        assert_trees_equal(value, expected, rtol=1e-4)


def test_on_a_mesh_it_poisons_only_the_device_that_wrote():
    writes = []

    def f(x):
        if writes and float(x[0]) == 3:
            operator.setitem(_numpy(x), 0, 0)
        return x * 2

    mesh = explicit_mesh(8)
    with jax.set_mesh(mesh):
        x = put(jnp.arange(8.0), mesh, "x")
        g = jax.jit(torch2jax(f, output_shapes=x, out_specs=P("x")))
        assert_trees_equal(g(x), 2 * x)
        writes.append(1)
        expected = np.arange(8, dtype=np.float32) * 2
        expected[3] = np.nan
        assert_trees_equal(g(x), expected)
        with pytest.raises(Exception, match="has changed its input argument 0"):
            check_errors()
