"""torch runs after what it reads was written and before what it writes is read, and nobody waits.

XLA and torch both run ahead of the device. An order that only held by luck would be lost once one
of them has a tenth of a second of work before or behind the call.
"""

import time

import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import torch2jax
from eqx_torch._call import runtime
from eqx_torch._call.streams import XlaStreams

from ..helpers import assert_trees_equal
from .devices import needs_gpu, needs_two_devices, slow, slow_on_torch, TORCH_DEVICE


ROUNDS = 10
X = jnp.arange(32.0)


def _sandwich(f):
    """A slow producer, `f`, and a consumer that waits for nothing but its input."""
    return jax.jit(lambda x: slow(f(slow(x)) + 1) * 2)


def test_between_a_slow_producer_and_a_slow_consumer():
    actual = _sandwich(torch2jax(lambda x: x.sin() * 3))
    results = [actual(X + i) for i in range(ROUNDS)]
    for i, y in enumerate(results):
        assert_trees_equal(y, (jnp.sin(X + i) * 3 + 1) * 2, rtol=1e-4, atol=1e-4)


def test_slow_torch_between_quick_operations():
    actual = jax.jit(lambda x: torch2jax(slow_on_torch)(x + 1) * 2)
    results = [actual(X + i) for i in range(ROUNDS)]
    for i, y in enumerate(results):
        assert_trees_equal(y, (X + i + 1) * 2)


def test_calls_that_follow_each_other():
    f, g = torch2jax(slow_on_torch), torch2jax(lambda x: x.cos())
    actual = jax.jit(lambda x: g(f(g(slow(x)))))
    results = [actual(X + i) for i in range(ROUNDS)]
    for i, y in enumerate(results):
        assert_trees_equal(y, jnp.cos(jnp.cos(X + i)), rtol=1e-4, atol=1e-4)


def test_backwards_between_slow_operations():
    f = torch2jax(lambda x: (slow_on_torch(x.detach()) * x).sin())
    loss = lambda x: slow(f(slow(x))).sum()  # noqa: E731
    gradient = jax.jit(jax.value_and_grad(lambda x: loss(x)))
    results = [gradient(X / 8 + i) for i in range(3)]
    for i, (value, grad) in enumerate(results):
        x = X / 8 + i
        assert_trees_equal(value, jnp.sin(x * x).sum(), rtol=1e-3, atol=1e-3)
        assert_trees_equal(grad, jnp.cos(x * x) * x, rtol=1e-3, atol=1e-3)


def test_donated_memory_is_not_reused_too_early():
    f = torch2jax(lambda x: slow_on_torch(x) + 1)
    step = jax.jit(lambda x: f(x) * 2, donate_argnums=0)
    x, expected = X + 0, X
    for _ in range(ROUNDS):
        x, expected = step(x), (expected + 1) * 2
    assert_trees_equal(x, expected)


def test_torchs_temporaries_do_not_overwrite_each_other():
    """Their memory is given back while kernels still use it."""

    def f(x):
        y = x
        for i in range(30):
            y = (slow_on_torch(y) if i == 0 else y) + torch.full_like(y, 1.0)
        return y

    actual = jax.jit(torch2jax(f))
    results = [actual(X + i) for i in range(ROUNDS)]
    for i, y in enumerate(results):
        assert_trees_equal(y, X + i + 30)


def test_torch_work_before_the_call_is_seen():
    closed_over = torch.zeros(32, device=TORCH_DEVICE)
    f = jax.jit(torch2jax(lambda x: x + closed_over))
    jax.block_until_ready(f(X))
    for i in range(ROUNDS):
        closed_over.copy_(slow_on_torch(torch.full((32,), float(i), device=TORCH_DEVICE)))
        assert_trees_equal(f(X), X + i)


def test_what_the_function_leaves_in_torchs_memory_is_seen_after_it():
    kept = torch.zeros(32, device=TORCH_DEVICE)

    def f(x):
        kept.copy_(slow_on_torch(x))
        return x

    call = jax.jit(torch2jax(f, output_shapes=X))
    for i in range(ROUNDS):
        jax.block_until_ready(call(X + i))
        assert_trees_equal(kept + 1, X + i + 1)


@needs_gpu
def test_torchs_current_stream_is_xlas():
    seen = []

    class Seen(XlaStreams):
        def entered(self, context, buffers, settled=False):
            seen.append(context.stream)
            return super().entered(context, buffers, settled)

    def f(x):
        stream = torch.cuda.current_stream()
        seen.append((stream.cuda_stream, stream.device.index, torch.cuda.current_device()))
        return x.sin()

    before = torch.cuda.current_stream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "XLA_STREAMS", Seen(torch.cuda))
        assert_trees_equal(torch2jax(f, output_shapes=X)(X), jnp.sin(X), atol=1e-5)
    address, (current, index, device) = seen
    assert type(address) is int
    assert current == address != 0
    assert index == device == 0
    assert torch.cuda.current_stream() == before


@needs_gpu
def test_the_host_runs_ahead():
    """To enqueue takes a fraction of the time that the work takes."""
    actual = _sandwich(torch2jax(lambda x: slow_on_torch(x).sin()))
    jax.block_until_ready(actual(X))
    start = time.perf_counter()
    results = [actual(X + i) for i in range(4)]
    enqueued = time.perf_counter()
    jax.block_until_ready(results)
    finished = time.perf_counter()
    assert enqueued - start < 0.5 * (finished - start)


@needs_two_devices
def test_each_device_uses_its_own_stream():
    devices = jax.devices()[:2]
    f = jax.jit(torch2jax(lambda x: slow_on_torch(x).sin()))
    results = [(f(jax.device_put(X + i, d)), d) for i in range(ROUNDS) for d in devices]
    for i, (y, device) in enumerate(results):
        assert y.devices() == {device}
        assert_trees_equal(y, jnp.sin(X + i // 2), rtol=1e-4, atol=1e-4)


@needs_two_devices
@pytest.mark.parametrize("lock", [False, True], ids=["no lock", "lock"])
def test_collectives_between_calls_that_wait_for_the_device(lock):
    """With a lock as well, though a device that is ahead waits for the others."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    spec = jax.P("x")

    def f(x):
        return x + x.sum().item()

    def local(x):
        g = torch2jax(f, output_shapes=x, lock=lock)
        for _ in range(10):
            x = g(x) / (1 + jax.lax.psum(g(x).sum(), "x"))
        return x

    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, spec))
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))

    def expected(x):
        parts = [x[:4], x[4:]]
        for _ in range(10):
            parts = [p + p.sum() for p in parts]
            total = sum(p.sum() for p in parts)
            parts = [p / (1 + total) for p in parts]
        return jnp.concatenate(parts)

    assert_trees_equal(sharded(x), expected(jnp.arange(8.0)), rtol=1e-4)
