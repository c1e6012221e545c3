"""Gradients of functions that return one number: one call gives the number and the gradient."""

import collections

import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import EqxTorchError, from_torch, torch2jax, tree_t2j
from eqx_torch._program import reverse

from ..helpers import assert_trees_equal
from ..helpers.twins import every_twin, random_array, scalar


RUNS = collections.Counter()


def number(f):
    """`scalar` of the twins, in torch."""

    def loss(*args):
        total = torch.zeros(())
        for leaf in jax.tree.leaves(f(*args)):
            if not (leaf.is_floating_point() or leaf.is_complex()):
                continue
            weights = torch.arange(leaf.numel(), dtype=torch.float32).cos().reshape(leaf.shape)
            total = total + (weights * leaf.real).sum()
            if leaf.is_complex():
                total = total + 0.5 * (weights * leaf.imag).sum()
        return total

    return torch2jax(loss)


def energy(x):
    RUNS["forward"] += 1
    return (x.sin() * x.flip(0)).sum()


def energy_in_jax(x):
    return (jnp.sin(x) * x[::-1]).sum()


@every_twin
@pytest.mark.covering(10)
def test_gradients_are_the_twins(getkey, twin):
    args = twin.args(getkey)
    actual, expected = number(twin.torch), scalar(twin.jax)
    cubed = [
        jax.value_and_grad(lambda *a, f=f: f(*a) ** 3, twin.smooth) for f in (actual, expected)
    ]
    of_gradients = [scalar(jax.grad(f, twin.smooth)) for f in (actual, expected)]
    second = [jax.grad(f, twin.smooth) for f in of_gradients]
    for ours, jaxs in (cubed, second):
        for _ in range(2):
            assert_trees_equal(jax.jit(ours)(*args), jaxs(*args), rtol=1e-3, atol=1e-3)


@every_twin
@pytest.mark.covering(10)
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot batch")
def test_gradients_of_batches_are_the_twins(getkey, twin):
    args = twin.args(getkey, 3)
    gradients = [jax.grad(f, twin.smooth) for f in (number(twin.torch), scalar(twin.jax))]
    if not twin.smooth:
        return
    shared = tuple(None if i == twin.smooth[0] else 0 for i in range(len(args)))
    for axes in (0, shared):
        if axes != 0 and len(args) == 1:
            continue
        inputs = [x[0] if axes != 0 and axes[i] is None else x for i, x in enumerate(args)]
        actual, expected = (jax.vmap(g, axes)(*inputs) for g in gradients)
        assert_trees_equal(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_pullback_takes_any_cotangent_and_again(getkey):
    x = random_array(getkey, (4,))
    y, pull = jax.vjp(torch2jax(energy), x)
    expected, pull_in_jax = jax.vjp(energy_in_jax, x)
    assert_trees_equal(y, expected, rtol=1e-5)
    RUNS.clear()
    for u in (1.0, -3.0, 0.0):
        assert_trees_equal(pull(jnp.float32(u)), pull_in_jax(jnp.float32(u)), rtol=1e-5)
    assert RUNS["forward"] == 0


def test_no_gradient_is_computed_for_nobody(getkey, monkeypatch):
    x = random_array(getkey, (4,))
    f = jax.jit(lambda x: jax.vjp(torch2jax(energy), x)[0])
    monkeypatch.setattr(reverse, "run_backward", None)
    for _ in range(2):
        assert_trees_equal(f(x), energy_in_jax(x), rtol=1e-5)


@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=str)
def test_one_number_of_any_shape_beside_integers(getkey, shape):
    x = random_array(getkey, (4,))
    f = torch2jax(lambda x: (x.cos().sum().reshape(shape), x.argmax()))
    loss = lambda x: (lambda y, i: (jnp.exp(y).sum(), i))(*f(x))  # noqa: E731
    (value, i), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    expected = jnp.exp(jnp.cos(x).sum())
    assert_trees_equal(value, expected, rtol=1e-5)
    assert i == x.argmax()
    assert_trees_equal(gradient, -expected * jnp.sin(x), rtol=1e-5)


def test_complex_inputs(getkey):
    z = jax.lax.complex(random_array(getkey, (3,)), random_array(getkey, (3,)))
    f = torch2jax(lambda z: (z.sin() * z.conj()).abs().pow(2).sum())
    f_in_jax = lambda z: (jnp.abs(jnp.sin(z) * jnp.conj(z)) ** 2).sum()  # noqa: E731
    actual, expected = (jax.grad(lambda z, g=g: 2 * g(z)) for g in (f, f_in_jax))
    assert_trees_equal(jax.jit(actual)(z), expected(z), rtol=1e-4)


def test_a_number_may_not_depend_on_an_input(getkey):
    x, y = random_array(getkey, (3,)), random_array(getkey, (3,))
    f = torch2jax(lambda x, y: y.sum())
    assert_trees_equal(jax.jit(jax.grad(f, (0, 1)))(x, y), (jnp.zeros(3), jnp.ones(3)))


# What makes the pullback of a cotangent other than that of 1 times the cotangent


class Clipped(torch.autograd.Function):
    """The identity; its gradient is at most 1."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1)


def with_hook(x):
    y = x * 1
    y.register_hook(lambda g: g.clamp(-1, 1))
    return (2 * y).sum()


@pytest.mark.parametrize(
    "f", [lambda x: (2 * Clipped.apply(x)).sum(), with_hook], ids=["function", "hook"]
)
@pytest.mark.parametrize("u", [0.25, 100.0])
def test_clipping_sees_the_cotangent(getkey, f, u):
    gradient = jax.jit(jax.grad(lambda x: u * torch2jax(f)(x)))
    for _ in range(2):
        assert_trees_equal(gradient(random_array(getkey, (3,))), jnp.full(3, min(2 * u, 1.0)))


def test_half_precision_sees_the_cotangent():
    """A scaled loss keeps small gradients from underflow."""
    f = torch2jax(lambda x: (x.to(torch.float16) * 2.0**-14 * 2.0**-14).float().sum())
    g = torch2jax(lambda x: (x * 2.0**-14 * 2.0**-14).float().sum())
    x = jnp.ones(3)
    expected = jnp.full(3, 2.0**-16)
    assert_trees_equal(jax.jit(jax.grad(lambda x: f(x) * 2.0**12))(x), expected)
    half = jax.jit(jax.grad(lambda x: g(x) * 2.0**12))(x.astype("float16"))
    assert_trees_equal(half, expected.astype("float16"))


def clamp(module, grad_input, grad_output):
    return tuple(g.clamp(-1, 1) for g in grad_input)


def double(module, grad_input, grad_output):
    return tuple(2 * g for g in grad_input)


def hooked(hook, **options):
    torch.manual_seed(0)
    inner = torch.nn.Linear(3, 3)
    inner.register_full_backward_hook(hook)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), inner, torch.nn.Flatten(0), Sum())
    return module, from_torch(module, **options)


class Sum(torch.nn.Module):
    def forward(self, x):
        return x.sum()


def gradients_in_torch(module, x, u):
    (u * module(x)).backward()
    return {name: tree_t2j(p.grad) for name, p in module.named_parameters()}


def test_hooks_that_no_code_names_are_found_by_the_first_run():
    x = torch.ones(4, 2)
    module, model = hooked(clamp)
    gradient = jax.jit(jax.grad(lambda model, x: 100 * model(x)))
    with pytest.raises(Exception, match='its backward is not linear.*residuals="recompute"'):
        jax.block_until_ready(gradient(model, tree_t2j(x)).params)
    _, recomputing = hooked(clamp, residuals="recompute")
    expected = gradients_in_torch(module, x, 100)
    actual = jax.jit(jax.grad(lambda m, x: 100 * m(x)))(recomputing, tree_t2j(x)).params
    assert_trees_equal(dict(actual), expected, rtol=1e-5)


def test_hooks_that_are_linear():
    x = torch.ones(4, 2)
    module, model = hooked(double)
    expected = gradients_in_torch(module, x, 100)
    gradient = jax.jit(jax.grad(lambda model, x: 100 * model(x)))
    for _ in range(2):
        assert_trees_equal(dict(gradient(model, tree_t2j(x)).params), expected, rtol=1e-5)


def test_an_error_of_the_backward_is_raised(getkey):
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise EqxTorchError("no gradient today")

    f = torch2jax(lambda x: Refusing.apply(x).sum())
    x = random_array(getkey, (3,))
    assert_trees_equal(jax.jit(lambda x: jax.vjp(f, x)[0])(x), x.sum(), rtol=1e-5)
    with pytest.raises(Exception, match="no gradient today"):
        jax.block_until_ready(jax.grad(f)(x))
