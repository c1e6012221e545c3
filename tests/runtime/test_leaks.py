"""What the user drops is freed, and memory stays flat."""

import gc
import json
import pathlib
import resource
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import t2j, torch2jax

from ..helpers import assert_trees_equal
from . import leak_workloads
from .leak_workloads import DROPPING, WORKLOADS


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


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_compiled_programs_of_dropped_functions_are_freed(use):
    client = jax.devices()[0].client
    use(torch2jax(torch.sin), jnp.ones(3))  # compiles what JAX itself needs for this
    gc.collect()
    before = len(client.live_executables())
    jax.block_until_ready(use(torch2jax(torch.sin), jnp.ones(3)))
    gc.collect()
    assert len(client.live_executables()) == before


def test_clear_caches_frees_the_graphs_of_pullbacks_that_are_still_held():
    seen = []

    def f(x):
        y = x.exp()
        seen.append(weakref.ref(y))
        return y.sin()

    x = jnp.arange(3.0)
    g = torch2jax(f, output_shapes=lambda x: x)
    _, pullback = jax.vjp(g, x)
    seen.clear()  # of the probe of writes
    _, pullback = jax.vjp(g, x)
    (kept,) = seen
    assert kept() is not None
    jax.clear_caches()
    gc.collect()
    assert kept() is None
    assert_trees_equal(pullback(x), jax.vjp(lambda x: jnp.sin(jnp.exp(x)), x)[1](x))


SHORT = {name: 16 if name in DROPPING else 400 for name in WORKLOADS}
LONG = {name: 1000 if name in DROPPING else 20_000 for name in WORKLOADS}
LONG |= {"compilations": 1000, "dropped pullbacks": 10_000}


@pytest.mark.parametrize(
    "counts",
    [SHORT, *(pytest.param({name: LONG[name]}, marks=pytest.mark.slow) for name in LONG)],
    ids=["short", *LONG],
)
def test_memory_of_a_long_process_is_flat(counts):
    """One buffer lost a call would be 12 MiB in the short run, and one object 20 in the long."""
    run = subprocess.run(
        [sys.executable, "-m", leak_workloads.__name__, json.dumps(counts)],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stderr
    reports = [json.loads(line) for line in run.stdout.splitlines()]
    assert [report["name"] for report in reports] == list(counts)
    print(run.stdout)
    for report in reports:
        # One model, whose torch module is there twice, is kept by Equinox, with some versions of
        # JAX until the next workload.
        assert report["alive"] <= (2 if report["name"] == "jitted conversions" else 0), report
        assert report["MiB"] < 8, report


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
