"""A call makes the host wait for nothing, and the device for nothing that it does not need."""

import contextlib
import functools
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import profile, ProfilerActivity, record_function

from eqx_torch import from_torch, torch2jax

from ..helpers import assert_trees_equal
from .devices import briefly, needs_gpu, ON_GPU


WAITING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
X = jnp.linspace(0, 1, 512)
NETWORK = torch.nn.Sequential(torch.nn.Linear(512, 64), torch.nn.BatchNorm1d(64), torch.nn.SiLU())


def _training():
    model, state = eqx.nn.make_with_state(from_torch)(NETWORK)
    batch = jnp.stack([X, X**2, X**3, X**4])

    def loss(model, state):
        y, state = model(batch, state=state)
        return (y**2).sum(), state

    arrays, static = eqx.partition((model, state), eqx.is_array)
    gradient = eqx.filter_value_and_grad(loss, has_aux=True)
    step = jax.jit(lambda arrays: eqx.filter(gradient(*eqx.combine(arrays, static)), eqx.is_array))
    return lambda: step(arrays)


def _of(transform):
    f = torch2jax(lambda x: (x.sin() * x).tanh())
    step = jax.jit(transform(f))
    return lambda: step(X)


STEPS = {
    "call": lambda: _of(lambda f: f),
    "eager": lambda: functools.partial(torch2jax(torch.sin), X),
    "grad": lambda: _of(lambda f: jax.grad(lambda x: f(x).sum())),
    "jvp": lambda: _of(lambda f: lambda x: jax.jvp(f, (x,), (x,))),
    "vmap": lambda: _of(lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x]))),
    "scan": lambda: _of(lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 4)),
    "remat": lambda: _of(lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum())),
    "training": _training,
}
FEW_STEPS = briefly(STEPS, "jvp", "training")
every_step = pytest.mark.parametrize("make", FEW_STEPS.values(), ids=FEW_STEPS)


@contextlib.contextmanager
def torch_must_not_wait():
    """torch raises where one of its operators would wait for the device."""
    if not ON_GPU:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_step
def test_torch_never_waits(make):
    step = make()
    expected = jax.block_until_ready(step())
    jax.block_until_ready(step())
    with torch_must_not_wait():
        results = [step() for _ in range(5)]
        jax.block_until_ready(results)
    for result in results:
        assert_trees_equal(result, expected, rtol=1e-4, atol=1e-4)


@needs_gpu
def test_the_check_finds_waiting():
    f = torch2jax(lambda x: x * x.sum().item(), output_shapes=X)
    jax.block_until_ready(f(X))
    with torch_must_not_wait(), pytest.raises(Exception, match="synchronizing CUDA operation"):
        jax.block_until_ready(f(X))


def _waiting_in(step, count):
    """The names of the runtime's calls, within `count` steps, that make the host wait."""
    jax.block_until_ready([step() for _ in range(3)])
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function("window"):
            results = [step() for _ in range(count)]
            time.sleep(0.5)  # for threads of XLA's that have yet to make the calls
        jax.block_until_ready(results)
    events = [e for e in trace.events() if e.device_type == DeviceType.CPU]
    window = next(e.time_range for e in events if e.name == "window")
    inside = [e.name for e in events if window.start <= e.time_range.start <= window.end]
    assert sum("LaunchKernel" in name for name in inside) >= count
    return [name for name in inside if name in WAITING]


@needs_gpu
@every_step
def test_no_synchronisation_in_a_trace(make):
    assert _waiting_in(make(), 20) == []


@needs_gpu
def test_a_trace_shows_synchronisation():
    f = torch2jax(lambda x: x * x.sum().item(), output_shapes=X)
    assert len(_waiting_in(lambda: f(X), 20)) >= 20


@needs_gpu
def test_other_streams_overlap():
    """The user's work on a side stream runs at the same time as a call."""
    cycles = 200_000_000  # a tenth of a second of one thread

    def f(x):
        torch.cuda._sleep(cycles)
        return x + 1

    call = jax.jit(torch2jax(f, output_shapes=X))
    side = torch.cuda.Stream()

    def seconds(in_torch, in_jax):
        jax.block_until_ready(call(X))
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        side.wait_stream(torch.cuda.current_stream())
        if in_torch:
            with torch.cuda.stream(side):
                torch.cuda._sleep(cycles)
        if in_jax:
            jax.block_until_ready(call(X))
        torch.cuda.current_stream().wait_stream(side)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000

    alone, together = seconds(False, True), seconds(True, True)
    assert seconds(True, False) > 0.5 * alone
    assert together < 1.5 * alone
