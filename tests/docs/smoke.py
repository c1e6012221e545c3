"""What an installed `eqx_torch` must do, with nothing at hand but its dependencies.

`python -I smoke.py VERSION`; without `-I` the checkout would be imported instead.
"""

import importlib.metadata
import shutil
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import torch

import eqx_torch
from eqx_torch import from_torch, torch2jax


def check_install(version: str) -> None:
    """The package is the installed one, has one version, and there is no compiler."""
    assert Path(eqx_torch.__file__).is_relative_to(sys.prefix), eqx_torch.__file__
    assert eqx_torch.__version__ == importlib.metadata.version("eqx-torch") == version
    assert not any(map(shutil.which, ("cc", "gcc", "g++", "clang", "ninja")))


def check_function() -> None:
    """A gradient under jit is torch's."""
    x = torch.linspace(-2.0, 2.0, 5, requires_grad=True)
    torch.nn.functional.softplus(x).sum().backward()
    softplus = torch2jax(torch.nn.functional.softplus)
    grad = jax.jit(jax.grad(lambda x: softplus(x).sum()))(jnp.linspace(-2.0, 2.0, 5))
    assert jnp.allclose(grad, x.grad.numpy(), atol=1e-6)


def check_module() -> None:
    """A step of gradient descent is torch's."""
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model = from_torch(network)

    @eqx.filter_jit
    def step(model, x):
        grads = eqx.filter_grad(lambda model: model(x).sum())(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

    model = step(model, jnp.ones((2, 3)))
    network(torch.ones(2, 3)).sum().backward()
    for name, parameter in network.named_parameters():
        expected = (parameter - 0.1 * parameter.grad).detach().numpy()
        assert jnp.allclose(model.params[name], expected, atol=1e-6)


if __name__ == "__main__":
    check_install(sys.argv[1])
    check_function()
    check_module()
    print("ok")
