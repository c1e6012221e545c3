"""Several Python threads and several devices at once."""

import concurrent.futures
import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from eqx_torch import torch2jax

from ..helpers import assert_trees_equal
from ..helpers.isolated import run_tests
from ..helpers.meshes import explicit_mesh, put
from ..helpers.twins import random_array


def _in_threads(count, f):
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(f, range(count)))


def test_the_first_calls_of_one_function_at_once(getkey):
    x = random_array(getkey, (5, 3))
    f = torch2jax(lambda x: (x.clone().mul_(2) ** 2).sum(-1))
    start = threading.Barrier(6, timeout=60)

    def work(i):
        start.wait()
        y = x[: i % 3 + 1]
        return i % 3 + 1, f(y), jax.jit(jax.grad(lambda y: f(y).sum()))(y)

    for n, y, gradient in _in_threads(6, work):
        assert_trees_equal(y, 4 * (x[:n] ** 2).sum(-1), rtol=1e-5)
        assert_trees_equal(gradient, 8 * x[:n], rtol=1e-5)


def test_threads_on_their_own_devices(getkey):
    x = random_array(getkey, (3,))
    f = jax.jit(torch2jax(torch.sin))

    def work(i):
        y = jax.device_put(x, jax.devices()[i])
        for _ in range(50):
            y = f(y)
        assert y.devices() == {jax.devices()[i]}
        return np.asarray(y)

    results = _in_threads(8, work)
    expected = x
    for _ in range(50):
        expected = jnp.sin(expected)
    for result in results:
        assert_trees_equal(result, expected)


def test_threads_with_sharded_programs(getkey):
    mesh = explicit_mesh(8)
    x = random_array(getkey, (16, 3))
    f = torch2jax(lambda x: (x.sin() ** 2).sum(-1), out_specs=P("x"))

    def work(i):
        with jax.set_mesh(mesh):
            y = put(x + i, mesh, "x")
            step = jax.jit(jax.value_and_grad(lambda y: f(y).sum()))
            for _ in range(5):
                value, gradient = step(y)
            return i, np.asarray(value), np.asarray(gradient)

    for i, value, gradient in _in_threads(3, work):
        expected = jax.value_and_grad(lambda y: (jnp.sin(y) ** 2).sum())(x + i)
        assert_trees_equal((value, gradient), expected, rtol=1e-4, atol=1e-5)


def test_settings_of_threads_do_not_mix(getkey):
    x = random_array(getkey, (8, 8))
    f = torch2jax(lambda x: x @ x)

    def work(i):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=i % 2 == 0):
            return {str(f(x).dtype) for _ in range(20)}

    for i, dtypes in enumerate(_in_threads(4, work)):
        assert dtypes == {"bfloat16" if i % 2 == 0 else "float32"}


def test_devices_overlap():
    """Without a lock, torch runs on all devices at the same time."""
    mesh = explicit_mesh(4)
    spans = []

    def f(x):
        start = time.perf_counter()
        time.sleep(0.2)
        spans.append((start, time.perf_counter()))
        return x

    with jax.set_mesh(mesh):
        x = put(jnp.ones(8), mesh, "x")
        jax.block_until_ready(torch2jax(f, output_shapes=x, out_specs=P("x"))(x))
    assert len(spans) == 4
    latest_start, earliest_end = max(s for s, _ in spans), min(e for _, e in spans)
    assert latest_start < earliest_end


def test_tangents_of_devices_do_not_erase_each_other():
    """Torch has one forward-mode level for the whole process."""
    mesh = explicit_mesh(8)
    order = itertools.count()

    def f(x):
        y = x.sin()
        time.sleep(0.01 * (next(order) % 3))
        return y * x

    with jax.set_mesh(mesh):
        x = put(jnp.arange(16.0), mesh, "x")
        g = torch2jax(f, output_shapes=x, out_specs=P("x"))
        tangents = jax.jit(lambda x: jax.jvp(g, (x,), (x,)))(x)
    x = jnp.arange(16.0)
    assert_trees_equal(tangents, jax.jvp(lambda x: jnp.sin(x) * x, (x,), (x,)), rtol=1e-5)


@pytest.mark.parametrize("size", [1, 30, 500])
def test_many_calls_finish(getkey, size):
    """Nothing waits for the runtime that waits for it."""
    x = random_array(getkey, (size, size)) / size
    f = jax.jit(lambda x: torch2jax(torch.sin)(x @ x) + 1)
    expected = jnp.sin(x @ x) + 1
    results = [f(x) for _ in range(100)]
    assert_trees_equal(results[-1], expected, rtol=1e-4)


def test_calls_between_slow_operations(getkey):
    x = random_array(getkey, (64, 64)) / 8
    f = torch2jax(lambda x: x * 2)
    program = lambda x: jnp.linalg.matrix_power(f(jnp.linalg.matrix_power(x, 3)), 2)  # noqa: E731
    jitted = jax.jit(program)
    expected = program(x)
    for _ in range(300):
        y = jitted(x)
        assert_trees_equal(y, expected, rtol=1e-3, atol=1e-4)


def test_programs_at_once_on_one_mesh_and_on_single_devices(getkey):
    """Threads that share devices, functions and locks."""
    mesh = explicit_mesh(8)
    x = random_array(getkey, (16, 3))
    f = torch2jax(lambda x: (x.sin() ** 2).sum(-1), out_specs=P("x"))
    locked = torch2jax(lambda x: x.exp().sum(-1), out_specs=P("x"), lock=True)
    single = jax.jit(jax.value_and_grad(lambda y: torch2jax(torch.cos)(y).sum()))

    def work(i):
        with jax.set_mesh(mesh):
            y = put(x + i, mesh, "x")
            step = jax.jit(jax.value_and_grad(lambda y: (f(y) * locked(y)).sum()))
            sharded = [jax.tree.map(np.asarray, step(y)) for _ in range(3)]
        z = jax.device_put(x + i, jax.devices()[i])
        return i, sharded, [jax.tree.map(np.asarray, single(z)) for _ in range(10)]

    twin = lambda y: ((jnp.sin(y) ** 2).sum(-1) * jnp.exp(y).sum(-1)).sum()  # noqa: E731
    for i, sharded, alone in _in_threads(4, work):
        expected = jax.value_and_grad(twin)(x + i)
        for result in sharded:
            assert_trees_equal(result, expected, rtol=1e-3, atol=1e-3)
        expected = jax.value_and_grad(lambda y: jnp.cos(y).sum())(x + i)
        for result in alone:
            assert_trees_equal(result, expected, rtol=1e-4, atol=1e-5)


def test_jax_inside_of_torch_is_refused():
    run_tests("runtime/nested_calls.py", timeout=300)
