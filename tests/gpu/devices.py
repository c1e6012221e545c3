"""What the tests of this folder run on: JAX's default device, and torch's name of the same.

`make test-gpu` runs them on a GPU. In `make test` they run on a CPU, where those that only mean
something on a GPU are skipped, so that the others keep working.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqx_torch import j2t
from eqx_torch._module.rng import _as_seed


ON_GPU = jax.default_backend() == "gpu"
TORCH_DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="no CUDA device; `make test-gpu` runs it on one")
needs_two_devices = pytest.mark.skipif(jax.device_count() < 2, reason="only one CUDA device")


def briefly(cases: dict[str, Any], *names: str) -> dict[str, Any]:
    """All of the cases on a GPU; on a CPU, where other files test them at length, only these."""
    return cases if ON_GPU else {name: cases[name] for name in names}


def on_torch(tree: Any) -> Any:
    """Copies of JAX arrays as torch tensors, on the same device."""
    return jax.tree.map(lambda x: j2t(x).clone() if isinstance(x, jax.Array) else x, tree)


def seed_of(key: jax.Array) -> int:
    """The number with which torch is seeded for a call with this key."""
    high, low = jax.random.bits(key, (2,), jnp.uint32).tolist()
    return _as_seed(high, low)


SIZE = 4096 if ON_GPU else 64
ROUNDS = 40


def slow(x: jax.Array) -> jax.Array:
    """The vector `x` itself, after about a tenth of a second of a GPU's time.

    It is carried through products with a permutation, so nothing of the work can be left out.
    """
    rotation = jnp.roll(jnp.eye(SIZE), 1, axis=0)
    rows = jnp.zeros((SIZE, SIZE)).at[0, : x.size].set(x)
    rows = jax.lax.fori_loop(0, ROUNDS, lambda _, rows: rotation @ rows, rows)
    return rows[ROUNDS % SIZE, : x.size]


def slow_on_torch(x: torch.Tensor) -> torch.Tensor:
    """The same by torch."""
    rotation = torch.roll(torch.eye(SIZE, device=x.device), 1, 0)
    rows = torch.zeros(SIZE, SIZE, device=x.device)
    rows[0, : x.numel()] = x
    for _ in range(ROUNDS):
        rows = rotation @ rows
    return rows[ROUNDS % SIZE, : x.numel()].clone()


def bits(x: Any) -> np.ndarray:
    """The bytes of an array, NaN payloads included."""
    return np.asarray(x).reshape(-1).view(np.uint8)
