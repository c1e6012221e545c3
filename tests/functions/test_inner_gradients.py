"""Forwards that take gradients themselves, or register hooks, against torch."""

import contextlib

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import from_torch, t2j, torch2jax

from ..helpers import assert_trees_equal


class Maml(torch.nn.Module):
    """One inner step of gradient descent on each task, then the loss of the adapted layer."""

    def __init__(self):
        super().__init__()
        self.l = torch.nn.Linear(3, 2)

    def forward(self, xs, ys):
        losses = []
        for x, y in zip(xs, ys, strict=True):
            inner = (self.l(x) - y).pow(2).mean()
            w, b = torch.autograd.grad(inner, (self.l.weight, self.l.bias), create_graph=True)
            adapted = torch.nn.functional.linear(x, self.l.weight - 0.1 * w, self.l.bias - 0.1 * b)
            losses.append((adapted - y).pow(2).mean())
        return torch.stack(losses).sum()


class Hooked(torch.nn.Module):
    """Scales the gradient of what it computes by a hook, and keeps another."""

    def __init__(self):
        super().__init__()
        self.l = torch.nn.Linear(3, 2)

    def forward(self, x):
        h = self.l(x)
        h.register_hook(lambda g: 3 * g)
        k = h.tanh()
        k.retain_grad()
        return k.sum()


@pytest.fixture(params=["maml", "hooked"])
def case(request, getkey):
    xs = torch.randn(2, 4, 3)
    if request.param == "maml":
        return Maml(), (xs, torch.randn(2, 4, 2))
    return Hooked(), (xs,)


@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit])
@pytest.mark.covering
def test_modules_whose_forward_relies_on_gradients(case, wrap):
    module, args = case
    model, arrays = from_torch(module), [t2j(x) for x in args]
    expected = module(*args)
    assert_trees_equal(wrap(model)(*arrays), expected)
    gradients = torch.autograd.grad(expected, tuple(module.parameters()))
    loss = wrap(eqx.filter_grad(lambda model: model(*arrays)))
    names = dict(module.named_parameters())
    assert_trees_equal(loss(model).params, dict(zip(names, gradients, strict=True)), rtol=1e-5)


def test_a_batch_of_such_a_module(case):
    module, args = case
    model = from_torch(module)
    stacked = [torch.stack([x, 2 * x]) for x in args]
    expected = torch.stack([module(*x) for x in zip(*stacked, strict=True)])
    tried = pytest.warns(UserWarning, match="torch.func.vmap cannot batch")
    with (
        contextlib.nullcontext() if isinstance(module, Hooked) else tried
    ):  # it is not tried on hooks
        actual = jax.vmap(model)(*map(t2j, stacked))
    assert_trees_equal(actual, expected)


def test_a_frozen_parameter_stays_one():
    module = Hooked().requires_grad_(False)
    with pytest.raises(Exception, match="doesn't require gradient"):
        from_torch(module)(jnp.ones((4, 3)))


def test_a_function_whose_inputs_have_to_require_gradients():
    def force(x):
        return torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]

    x = jnp.array([1.0, 2.0, 3.0])
    f = torch2jax(force)
    assert_trees_equal(f(x), 3 * x**2)
    assert_trees_equal(jax.jit(f)(x), 3 * x**2)
    assert_trees_equal(jax.grad(lambda x: f(x).sum())(x), 6 * x)
    assert_trees_equal(jax.jvp(f, (x,), (x,))[1], 6 * x**2)
