"""The methods of batching, and a function that all of them can take."""

import jax.numpy as jnp
import pytest


METHODS = ["torch", "sequential", "broadcast_all", "expand_dims"]
every_method = pytest.mark.parametrize("method", METHODS)
loops = pytest.mark.filterwarnings("ignore:torch.func.vmap cannot batch")


def batch_aware(x, y):
    """Takes any number of leading axes, also of size one."""
    return (x.sin() * y).sum(-1), (x + y).cumsum(-1)


def batch_aware_in_jax(x, y):
    return (jnp.sin(x) * y).sum(-1), (x + y).cumsum(-1)
