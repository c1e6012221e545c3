"""Settings of the calling thread that are in force where torch runs."""

import threading

import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import torch2jax
from eqx_torch._ambient import Ambient

from ..helpers import assert_trees_equal
from ..helpers.twins import random_array


def _matmul(x):
    return x @ x


def _squared(f):
    return jax.jit(jax.value_and_grad(lambda x: (f(x).astype("float32") ** 2).sum()))


def _reference(x, autocast):
    t = torch.tensor(x.tolist(), requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = _matmul(t)
    loss = (y.float() ** 2).sum()
    return y, (loss, *torch.autograd.grad(loss, t))


def test_autocast_around_the_traced_call(getkey):
    x = random_array(getkey, (8, 8))
    y, expected = _reference(x, True)
    f = torch2jax(_matmul)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert f(x).dtype == jnp.bfloat16
        assert_trees_equal(f(x), y)
        assert_trees_equal(jax.jit(f)(x), y)
        compiled = _squared(f).lower(x).compile()
        assert_trees_equal(_squared(f)(x), expected, rtol=1e-2)
    assert_trees_equal(compiled(x), expected, rtol=1e-2)
    assert_trees_equal(f(x), _reference(x, False)[0])


def test_autocast_inside_the_function(getkey):
    x = random_array(getkey, (8, 8))

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x

    y, expected = _reference(x, True)
    g = torch2jax(f)
    assert_trees_equal(g(x), y)
    assert_trees_equal(_squared(g)(x), expected, rtol=1e-2)


def test_autocast_switched_off_inside(getkey):
    x = random_array(getkey, (8, 8))

    def f(x):
        with torch.autocast("cpu", enabled=False):
            return x @ x

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch2jax(f)(x).dtype == jnp.float32


def test_the_same_jitted_function_in_and_out_of_autocast(getkey):
    """JAX does not know torch's settings: those of the trace hold."""
    x = random_array(getkey, (8, 8))
    f = jax.jit(torch2jax(_matmul))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert f(x).dtype == jnp.bfloat16
    assert f(x).dtype == jnp.bfloat16


@pytest.mark.usefixtures("x64")
def test_default_dtype(getkey):
    f = torch2jax(lambda x: x * torch.full((3,), 0.1))
    x = jnp.ones(3, "float64")
    single = torch.full((3,), 0.1).double()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        compiled = jax.jit(f).lower(x).compile()
        double = torch.full((3,), 0.1)
        assert_trees_equal(f(x), double, exact=True)
    finally:
        torch.set_default_dtype(before)
    assert_trees_equal(compiled(x), double, exact=True)
    assert torch.get_default_dtype() == before
    assert_trees_equal(f(x), single, exact=True)


def test_default_device():
    devices = []

    def f(x):
        devices.append(torch.empty(1).device.type)
        return x

    g = torch2jax(f, output_shapes=lambda x: x)
    with torch.device("meta"):
        compiled = jax.jit(g).lower(jnp.ones(3)).compile()
    compiled(jnp.ones(3))
    jax.jit(lambda x: g(x) + 0)(jnp.ones(3))
    with torch.device("meta"):
        # Called where another default is set, the one of the trace holds.
        jax.jit(lambda x: g(x) + 0).lower(jnp.ones(3))
    assert devices == ["meta", "cpu"]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradients_do_not_depend_on_torchs_grad_mode(getkey, context):
    x = random_array(getkey, (3,))

    def f(x):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        return x.sin()

    with context():
        g = torch2jax(f)
        assert_trees_equal(jax.grad(lambda x: g(x).sum())(x), jnp.cos(x))
        assert_trees_equal(jax.jit(jax.hessian(lambda x: g(x).sum()))(x), jnp.diag(-jnp.sin(x)))
        assert torch.is_grad_enabled() is (context is not torch.no_grad and False)


def test_no_grad_inside_the_function(getkey):
    x = random_array(getkey, (3,))

    def f(x):
        with torch.no_grad():
            scale = x.exp()
        return scale * x

    def twin(x):
        return jax.lax.stop_gradient(jnp.exp(x)) * x

    def both(f):
        return jax.jit(lambda x: (jax.grad(lambda x: f(x).sum())(x), jax.jvp(f, (x,), (x,))))(x)

    assert_trees_equal(both(torch2jax(f)), both(twin))


def test_settings_hold_in_any_thread_and_are_put_back():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = Ambient.capture()
    assert ambient != Ambient.capture()
    seen = []

    def other():
        before = Ambient.capture()
        with ambient.in_force():
            seen.append(Ambient.capture() == ambient)
        seen.append(Ambient.capture() == before)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [True, True]


def test_the_default_dtype_is_put_back_by_the_last_thread_to_leave():
    double = Ambient((None, None), torch.float64, None)
    half = Ambient((None, None), torch.float16, None)
    before = torch.get_default_dtype()
    first, second = double.in_force(), half.in_force()
    with first:
        second.__enter__()
    second.__exit__(None, None, None)
    assert torch.get_default_dtype() == before


def test_settings_without_effect_cost_nothing():
    assert Ambient.capture().in_force() is Ambient.capture().in_force()
