"""What the user drops is freed, and memory stays flat."""

import gc
import resource
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import t2j, torch2jax


USES = {
    "eager": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "jitted grad": lambda f, x: jax.jit(jax.grad(lambda x: f(x).sum()))(x),
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, x])),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "hessian": lambda f, x: jax.hessian(lambda x: f(x).sum())(x),
    "scan": lambda f, x: jax.jit(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2))(x),
    "remat": lambda f, x: jax.grad(lambda x: jax.checkpoint(f)(x).sum())(x),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(lambda x: f(x).sum()))(jnp.stack([x, x])),
}


class Payload(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.big = torch.nn.Parameter(torch.ones(100, 3))

    def forward(self, x):
        return self.big.sum(0) * x.sin()


def _closing_over(payload):
    return lambda x: payload(x)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("closed_over", [True, False], ids=["closure", "module"])
def test_dropped_functions_are_freed(use, closed_over):
    payload = Payload()
    alive = weakref.ref(payload)
    f = torch2jax(_closing_over(payload) if closed_over else payload)
    jax.block_until_ready(use(f, jnp.ones(3)))
    del f, payload
    gc.collect()
    assert alive() is None


def test_control_flow_outside_of_jit_is_kept_by_jax_until_its_caches_are_cleared():
    payload = Payload()
    alive = weakref.ref(payload)
    f = torch2jax(payload)
    jax.lax.scan(lambda c, _: (f(c), None), jnp.ones(3), None, length=2)
    del f, payload
    jax.clear_caches()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_wrapping_again_and_again_leaves_nothing(count):
    x = jnp.ones(3)
    alive = []
    for _ in range(count):
        payload = Payload()
        alive.append(weakref.ref(payload))
        jax.jit(torch2jax(payload))(x)
    del payload
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_memory_is_flat_over_calls(dtype):
    x = t2j(torch.ones(64, 64).to(dtype))
    f = jax.jit(torch2jax(lambda x: (x, x.clone())))

    def run(count):
        for _ in range(count):
            f(x)
        jax.block_until_ready(f(x))
        gc.collect()
        return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    run(1000)
    objects, peak = run(1000)
    after_objects, after_peak = run(4000)
    assert after_objects - objects < 200
    assert after_peak - peak < 8 * 1024


def test_tensors_do_not_outlive_the_call():
    seen = []

    def f(x):
        y = x.sin()
        seen.extend([weakref.ref(x), weakref.ref(y)])
        return y

    g = torch2jax(f, output_shapes=lambda x: x)
    jax.block_until_ready(jax.jit(jax.grad(lambda x: g(x).sum()))(jnp.ones(3)))
    gc.collect()
    assert not [ref for ref in seen if ref() is not None]


def test_results_survive_the_function(recwarn):
    y = torch2jax(Payload())(jnp.ones(3))
    gc.collect()
    np.testing.assert_allclose(y, 100 * np.sin(np.ones(3)), rtol=1e-6)
