"""JAX and torch share the memory of a device, and neither copies what the other can use."""

import gc
import json
import operator
import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import torch

from eqx_torch import from_torch, j2t, t2j, torch2jax
from eqx_torch._program import TAPES

from ..helpers import assert_trees_equal
from .devices import needs_gpu, ON_GPU, TORCH_DEVICE


X = jnp.arange(1024.0)


def test_arrays_become_tensors_without_a_copy():
    assert j2t(X).data_ptr() == X.unsafe_buffer_pointer()
    assert j2t(X).device == TORCH_DEVICE


def test_tensors_become_arrays_without_a_copy():
    tensor = torch.arange(1024.0, device=TORCH_DEVICE)
    if not ON_GPU and tensor.data_ptr() % 64:
        tensor = j2t(X + 0)  # on a CPU XLA insists on its own alignment
    assert t2j(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


def test_functions_are_given_xlas_memory():
    seen = []
    # By name, or seen in a run, this would have the argument copied.
    address = operator.methodcaller("data_ptr")

    def f(x):
        with torch._C.DisableTorchFunction():
            seen.append((address(x), x.device))
        return x + 1

    call = jax.jit(torch2jax(f, output_shapes=X))
    for _ in range(2):  # the first run of a function whose shapes are declared is on copies
        assert_trees_equal(call(X), X + 1)
    assert seen[-1] == (X.unsafe_buffer_pointer(), TORCH_DEVICE)


def test_a_backward_has_the_graph_of_its_forward():
    """On a GPU without a look at the token, for which it would have to wait."""
    calls = []

    def f(x):
        calls.append(x.requires_grad)
        return x.sin()

    TAPES.clear()
    y, pullback = jax.vjp(torch2jax(f, output_shapes=X), X)
    jax.block_until_ready(y)
    assert len(TAPES) == 1
    calls.clear()
    assert_trees_equal(pullback(jnp.ones_like(X))[0], jnp.cos(X), atol=1e-5)
    assert calls == []


@needs_gpu
def test_memory_of_torch_is_flat():
    model = from_torch(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8)))
    x = jnp.ones((64, 256))
    step = eqx.filter_jit(eqx.filter_value_and_grad(lambda model: (model(x) ** 2).sum()))

    def used(count):
        for _ in range(count):
            result = step(model)
        jax.block_until_ready(jax.tree.leaves(result))
        gc.collect()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    used(20)
    allocated, reserved = used(20)
    after_allocated, after_reserved = used(300)
    assert after_allocated <= allocated
    assert after_reserved <= reserved


PROGRAM = """
import json, jax, jax.numpy as jnp, torch
from eqx_torch import torch2jax
y = jax.block_until_ready(torch2jax(lambda x: x + 1)(jnp.ones(3)))
free, total = torch.cuda.mem_get_info()
print(json.dumps({"free": free / total, "y": y.tolist()}))
"""


@needs_gpu
@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [({}, 0.0, 0.3), ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 0.7, 1.0)],
    ids=["by default", "XLA_PYTHON_CLIENT_PREALLOCATE=false"],
)
def test_what_jax_leaves_to_torch(settings, least, most):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XLA_PYTHON")}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | settings,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["y"] == [2.0, 2.0, 2.0]
    # This process holds some of the device too.
    assert least <= found["free"] <= most
