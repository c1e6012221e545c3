"""Forward mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import torch2jax

from ..helpers import assert_trees_equal
from ..helpers.twins import Cube, every_twin, scalar


def _tangents(getkey, args):
    return tuple(
        jax.random.normal(getkey(), x.shape, x.dtype)
        if jnp.issubdtype(x.dtype, jnp.inexact)
        else np.zeros(x.shape, jax.dtypes.float0)
        for x in args
    )


@every_twin
def test_jvp(getkey, twin):
    args = twin.args(getkey)
    tangents = _tangents(getkey, args)
    actual, expected = (
        jax.jit(lambda *xs, f=f: jax.jvp(f, xs, tangents))(*args) for f in (twin.wrapped, twin.jax)
    )
    assert_trees_equal(actual, expected, rtol=1e-4)
    assert_trees_equal(jax.jvp(twin.wrapped, args, tangents), expected, rtol=1e-4)


@every_twin
def test_jvp_of_jvp(getkey, twin):
    args = twin.args(getkey)
    tangents, others = _tangents(getkey, args), _tangents(getkey, args)

    def second(f):
        first = lambda *xs: jax.jvp(f, xs, tangents)  # noqa: E731
        return jax.jit(lambda *xs: jax.jvp(first, xs, others))(*args)

    assert_trees_equal(second(twin.wrapped), second(twin.jax), rtol=1e-4, atol=1e-4)


@every_twin
def test_linearize_is_used_twice(getkey, twin):
    args = twin.args(getkey)
    actual, actual_map = jax.linearize(twin.wrapped, *args)
    expected, expected_map = jax.linearize(twin.jax, *args)
    assert_trees_equal(actual, expected)
    for _ in range(2):
        tangents = _tangents(getkey, args)
        assert_trees_equal(actual_map(*tangents), expected_map(*tangents), rtol=1e-4)


@every_twin
def test_vjp_is_used_twice(getkey, twin):
    args = twin.args(getkey)
    outs, actual = jax.vjp(twin.wrapped, *args)
    expected = jax.vjp(twin.jax, *args)[1]
    for _ in range(2):
        cotangents = jax.tree.map(lambda y: _tangents(getkey, [y])[0], outs)
        assert_trees_equal(actual(cotangents), expected(cotangents), rtol=1e-4)


@every_twin
def test_jvp_of_grad_and_grad_of_jvp(getkey, twin):
    args = twin.args(getkey)
    tangents = _tangents(getkey, args)

    def forward_over_reverse(f):
        gradient = jax.grad(scalar(f), twin.smooth)
        return jax.jit(lambda *xs: jax.jvp(gradient, xs, tangents))(*args)

    def reverse_over_forward(f):
        loss = scalar(lambda *xs: jax.jvp(f, xs, tangents))
        return jax.jit(jax.grad(loss, twin.smooth))(*args)

    for both in (forward_over_reverse, reverse_over_forward):
        assert_trees_equal(both(twin.wrapped), both(twin.jax), rtol=1e-4, atol=1e-4)


def test_only_tangents_that_are_not_zero_are_asked_of_torch(getkey):
    """Loss weights, which torch cannot differentiate by, are a float argument beside `x`."""

    def loss(x, labels, weights):
        return torch.nn.functional.cross_entropy(x, labels.long(), weights)

    x = jax.random.normal(getkey(), (4, 3))
    labels, weights = jnp.array([0, 2, 1, 1]), jnp.array([1.0, 2.0, 0.5])

    def in_jax(x):
        w = weights[labels]
        return -(w * jax.nn.log_softmax(x)[jnp.arange(4), labels]).sum() / w.sum()

    f = torch2jax(loss)
    assert_trees_equal(jax.grad(f)(x, labels, weights), jax.grad(in_jax)(x))
    tangent = (jnp.ones_like(x),)
    assert_trees_equal(
        jax.jvp(lambda x: f(x, labels, weights), (x,), tangent), jax.jvp(in_jax, (x,), tangent)
    )
    message = "not differentiable with respect to argument 'weight'"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.grad(f, 2)(x, labels, weights)
    assert_trees_equal(f(x, labels, weights), in_jax(x))


@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot batch")
def test_forward_mode_of_a_function_that_only_has_a_pullback(getkey):
    x, t = jax.random.normal(getkey(), (4,)), jax.random.normal(getkey(), (4,))
    f = torch2jax(Cube.apply)
    assert_trees_equal(jax.jvp(f, (x,), (t,)), (x**3, 3 * x**2 * t))
    assert_trees_equal(jax.jacfwd(f)(x), jax.jacfwd(lambda x: x**3)(x))


def test_a_tangent_rule_that_calls_torch(getkey):
    @jax.custom_jvp
    def f(x):
        return torch2jax(torch.sin)(x)

    @f.defjvp
    def rule(primals, tangents):
        return f(*primals), torch2jax(torch.cos)(*primals) * tangents[0]

    x = jax.random.normal(getkey(), (3,))
    assert_trees_equal(jax.jvp(f, (x,), (x,)), jax.jvp(jnp.sin, (x,), (x,)))
    assert_trees_equal(jax.hessian(lambda x: f(x).sum())(x), jnp.diag(-jnp.sin(x)))


def test_linear_transpose(getkey):
    matrix = torch.randn(3, 4)
    f = torch2jax(lambda x: matrix @ x)
    transposed = jax.linear_transpose(f, jax.ShapeDtypeStruct((4,), "float32"))
    u = jax.random.normal(getkey(), (3,))
    assert_trees_equal(transposed(u), (jnp.asarray(matrix.numpy()).T @ u,))


def test_linear_transpose_in_one_of_two_arguments(getkey):
    f = torch2jax(lambda a, x: a.sin() @ x)
    a, u = jax.random.normal(getkey(), (3, 4)), jax.random.normal(getkey(), (3,))
    transposed = jax.linear_transpose(lambda x: f(a, x), jax.ShapeDtypeStruct((4,), "float32"))
    assert_trees_equal(jax.jit(transposed)(u), (jnp.sin(a).T @ u,))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("batched", [False, True])
def test_derivatives_of_forward_rules_that_torch_cannot_differentiate(getkey, name, batched):
    """torch's rules for the tangents of these write to what the derivative of the rule needs."""
    x, t, u = (jax.random.normal(getkey(), (2, 3) if batched else (3,)) for _ in range(3))

    def derivatives(f, x, t, u):
        tangent = lambda x: jax.jvp(f, (x,), (t,))[1]  # noqa: E731
        return tangent(x), jax.jvp(tangent, (x,), (u,)), jax.grad(scalar(tangent))(x)

    functions = torch2jax(lambda x: getattr(x, name)(-1)), getattr(jax.nn, name)
    for transform in (jax.vmap,) if batched else (lambda f: f, jax.jit):
        actual, expected = (
            transform(functools.partial(derivatives, f))(x, t, u) for f in functions
        )
        assert_trees_equal(actual, expected, rtol=1e-4, atol=1e-5)


class Refuses(torch.autograd.Function):
    """Neither of its derivatives has one."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        y = x.cos().exp()
        z = y * t
        y.mul_(2)
        return z * (x.cos() / y * 2)


def test_forward_mode_survives_a_derivative_that_is_refused():
    x = jnp.arange(3.0)
    f = torch2jax(lambda x: Refuses.apply(x))
    tangent = lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones(3),))[1]  # noqa: E731
    assert_trees_equal(tangent(f)(x), jnp.cos(x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="modified by an inplace operation"):
        jax.block_until_ready(jax.grad(scalar(tangent(f)))(x))
    assert_trees_equal(tangent(f)(x), jnp.cos(x))
