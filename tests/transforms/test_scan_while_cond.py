"""Calls inside of JAX's control flow."""

import jax
import jax.numpy as jnp

from eqx_torch import torch2jax

from ..helpers import assert_trees_equal
from ..helpers.twins import random_array, scalar, twins


def _step(carry, x):
    return (carry * x).sin(), carry.sum()


def _step_in_jax(carry, x):
    return jnp.sin(carry * x), carry.sum()


def test_scan_and_its_derivatives(getkey):
    carry, xs = random_array(getkey, (3,)), random_array(getkey, (5, 3))
    f = torch2jax(_step)

    def everything(f):
        loss = scalar(lambda c, xs: jax.lax.scan(f, c, xs))
        return jax.jit(
            lambda carry, xs: (
                jax.lax.scan(f, carry, xs),
                jax.grad(loss, (0, 1))(carry, xs),
                jax.jvp(loss, (carry, xs), (carry, xs)),
                jax.hessian(loss)(carry, xs),
            )
        )(carry, xs)

    assert_trees_equal(everything(f), everything(_step_in_jax), rtol=1e-4, atol=1e-4)


@twins("nested", "writes", "ids", "top", "hidden_input", "inner_grad", "complex", "empty")
def test_scan_over_arguments(getkey, twin):
    args = twin.args(getkey, 3)

    def scanned(f):
        def g(*args):
            return jax.lax.scan(lambda c, xs: (c, f(*xs)), None, args)[1]

        return jax.jit(lambda *xs: (g(*xs), jax.grad(scalar(g), twin.smooth)(*xs)))(*args)

    assert_trees_equal(scanned(twin.wrapped), scanned(twin.jax), rtol=1e-4, atol=1e-4)


def test_training_inside_of_scan(getkey):
    w, xs = random_array(getkey, (3,)), random_array(getkey, (10, 3))

    def train(f):
        def step(w, x):
            loss, gradient = jax.value_and_grad(lambda w: f(w, x))(w)
            return w - 0.1 * gradient, loss

        return jax.jit(lambda w: jax.lax.scan(step, w, xs))(w)

    actual = train(torch2jax(lambda w, x: ((w * x).sum() - 1) ** 2))
    assert_trees_equal(actual, train(lambda w, x: ((w * x).sum() - 1) ** 2), rtol=1e-4)


def test_while_loop_with_an_allocating_body(getkey):
    x = random_array(getkey, (3,))

    def loop(body, test):
        return jax.jit(
            lambda x: jax.lax.while_loop(
                lambda c: test(c[1]), lambda c: (c[0] + 1, body(c[1])), (0, x)
            )
        )(x)

    actual = loop(
        torch2jax(lambda x: x * 1.5 + x.new_ones(1000).mean()),
        torch2jax(lambda x: x.abs().max() < 100),
    )
    expected = loop(lambda x: x * 1.5 + 1, lambda x: jnp.abs(x).max() < 100)
    assert_trees_equal(actual, expected, rtol=1e-5)


def test_fori_loop_in_forward_mode(getkey):
    x = random_array(getkey, (3,))

    def tangent(f):
        return jax.jvp(lambda x: jax.lax.fori_loop(0, 4, lambda _, y: f(y), x), (x,), (x,))

    assert_trees_equal(tangent(torch2jax(lambda x: x.sin())), tangent(jnp.sin))


def test_only_the_branch_taken_runs(getkey):
    x = random_array(getkey, (3,))
    runs = []

    def counted(name, f):
        def g(x):
            runs.append(name)
            return f(x)

        return torch2jax(g, output_shapes=lambda x: x)

    sin, cos = counted("sin", lambda x: x.sin()), counted("cos", lambda x: x.cos())
    cond = jax.jit(lambda p, x: jax.lax.cond(p, sin, cos, x))
    assert_trees_equal(cond(True, x), jnp.sin(x))
    assert_trees_equal(cond(False, x), jnp.cos(x))
    assert runs == ["sin", "cos"]
    gradient = jax.grad(lambda x: cond(False, x).sum())
    assert_trees_equal(gradient(x), -jnp.sin(x))
    switched = jax.vmap(lambda i, x: jax.lax.switch(i, [sin, cos], x), (0, None))
    assert_trees_equal(switched(jnp.array([0, 1]), x), jnp.stack([jnp.sin(x), jnp.cos(x)]))
